"""The browsable page at ``/docs``: rendered here from the OpenAPI document, one small script to try it."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

_EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "/v1/completions": {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Say hello in three languages."}],
        "max_tokens": 64,
    },
    "/v1/embeddings": {"input": "A sentence to embed."},
    "/tokenize": {"prompt": "Hello, world"},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/submit": {"prompt": "Once upon a time", "max_tokens": 32, "priority": 0},
    "/v1/jobs": {
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "metadata": {"ticket": 7},
    },
}

_STYLE = """
:root{color-scheme:light dark;--line:#8884;--soft:#8882;--get:#0a7d4f;--post:#1f5fbf;--delete:#b3261e}
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:60rem;padding:1.5rem 1rem 6rem}
h1{margin:0}h2{margin:2rem 0 .5rem;text-transform:capitalize}
code,textarea,pre,input{font:13px/1.45 ui-monospace,monospace}
details{border:1px solid var(--line);border-radius:8px;margin:.5rem 0;overflow:hidden}
summary{cursor:pointer;padding:.55rem .8rem;background:var(--soft);display:flex;gap:.7rem;
align-items:baseline;flex-wrap:wrap}
.in{padding:.4rem .9rem 1rem}
.m{color:#fff;border-radius:5px;padding:.1rem .5rem;font-weight:600;font-size:12px;text-transform:uppercase}
.get{background:var(--get)}.post{background:var(--post)}.delete{background:var(--delete)}
table{border-collapse:collapse;width:100%;margin:.4rem 0}
td,th{border-top:1px solid var(--line);padding:.25rem .5rem;text-align:left;vertical-align:top}
textarea,input{width:100%;border:1px solid var(--line);border-radius:6px;padding:.5rem;background:transparent;
color:inherit}
button{margin:.5rem 0;padding:.4rem 1.1rem;border-radius:6px;border:1px solid var(--line);cursor:pointer}
pre{background:var(--soft);border-radius:6px;padding:.6rem;white-space:pre-wrap;overflow-wrap:anywhere;
max-height:26rem;overflow:auto}
.muted{opacity:.7}
"""

_SCRIPT = """
document.querySelectorAll('form').forEach(form => form.addEventListener('submit', async event => {
  event.preventDefault();
  const out = form.querySelector('pre'), button = form.querySelector('button');
  const key = document.getElementById('key').value, headers = {};
  if (key) headers['Authorization'] = 'Bearer ' + key;
  let path = form.dataset.path; const query = new URLSearchParams();
  form.querySelectorAll('input[data-in]').forEach(input => {
    const place = input.dataset.in, value = input.value;
    if (place === 'path') path = path.replace('{' + input.name + '}', encodeURIComponent(value));
    else if (value && place === 'query') query.set(input.name, value);
    else if (value) headers[input.name] = value;
  });
  const options = {method: form.dataset.method.toUpperCase(), headers};
  const body = form.querySelector('textarea');
  if (body) { options.body = body.value; headers['Content-Type'] = 'application/json'; }
  button.disabled = true; out.hidden = false; out.textContent = '…';
  try {
    const answer = await fetch(path + (query.size ? '?' + query : ''), options);
    out.textContent = answer.status + ' ' + answer.statusText + '\\n';
    const reader = answer.body.getReader(), decoder = new TextDecoder();
    let text = '';
    for (;;) {
      const {done, value} = await reader.read();
      if (done) break;
      text += decoder.decode(value, {stream: true});
      out.textContent = answer.status + ' ' + answer.statusText + '\\n' + text;
    }
    try { out.textContent = answer.status + '\\n' + JSON.stringify(JSON.parse(text), null, 2); } catch {}
  } catch (error) { out.textContent = String(error); }
  button.disabled = false;
}));
"""


def render_page(document: Mapping[str, Any], model: str) -> bytes:
    """The page as UTF-8 HTML."""
    tags: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            block = "".join(_operation(document, path, method, operation))
            tags.setdefault(operation["tags"][0], []).append(block)
    sections = "".join(f"<h2>{_text(tag)}</h2>{''.join(blocks)}" for tag, blocks in tags.items())
    info = document["info"]
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width,initial-scale=1'>"
        f"<title>{_text(info['title'])} {_text(info['version'])}</title><style>{_STYLE}</style>"
        f"<h1>{_text(info['title'])} <small class=muted>{_text(info['version'])}</small></h1>"
        f"<p>{_text(info['description'])} Serving <code>{_text(model)}</code>. "
        "The same as a document: <a href=/openapi.json>/openapi.json</a>.</p>"
        "<p><label>API key, where the server asks for one"
        "<input id=key type=password autocomplete=off></label></p>"
        f"{sections}<script>{_SCRIPT}</script></html>"
    ).encode()


def _operation(
    document: Mapping[str, Any], path: str, method: str, operation: Mapping[str, Any]
) -> Iterator[str]:
    yield (
        f"<details><summary><span class='m {method}'>{method}</span><code>{_text(path)}</code>"
        f"<span class=muted>{_text(operation['summary'])}</span></summary><div class=in>"
    )
    body = operation.get("requestBody")
    if body is not None:
        schema = _resolve(document, body["content"]["application/json"]["schema"])
        yield f"<p>{_text(schema.get('description', ''))}</p>" + _fields(document, schema)
    answers = "".join(
        f"<tr><td><code>{status}</code><td>{_text(answer['description'])}"
        for status, answer in operation["responses"].items()
    )
    yield f"<table><tr><th>Status<th>Meaning{answers}</table>"
    yield _form(path, method, operation)
    yield "</div></details>"


def _fields(document: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    needed = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{_text(name)}</code>{' *' if name in needed else ''}"
        f"<td>{_text(_kind(document, kind))}<td>{_text(_note(kind))}"
        for name, kind in schema.get("properties", {}).items()
    )
    return f"<table><tr><th>Field<th>Type<th>{rows}</table>"


def _form(path: str, method: str, operation: Mapping[str, Any]) -> str:
    inputs = "".join(
        f"<label>{_text(p['name'])} <span class=muted>({p['in']}) {_text(p['description'])}</span>"
        f"<input name='{_text(p['name'])}' data-in={p['in']}></label>"
        for p in operation.get("parameters", ())
    )
    if "requestBody" in operation:
        example = msgspec.json.format(msgspec.json.encode(_EXAMPLES.get(path, {})), indent=2)
        rows = example.count(b"\n") + 1
        inputs += f"<textarea rows={rows} spellcheck=false>{_text(example.decode())}</textarea>"
    return (
        f"<form data-path='{_text(path)}' data-method={method}>{inputs}"
        "<button>Try it</button><pre hidden></pre></form>"
    )


def _resolve(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = schema.get("$ref")
    if reference is None:
        return schema
    found: Mapping[str, Any] = document["components"]["schemas"][reference.rpartition("/")[2]]
    return found


def _kind(document: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """A type in words: ``integer, 0 to 20, or null``."""
    if "anyOf" in schema:
        return " or ".join(_kind(document, option) for option in schema["anyOf"])
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "enum" in schema:
        return " | ".join(str(value) for value in schema["enum"])
    words = str(schema.get("type", "any"))
    if words == "array" and "items" in schema:
        words = f"list of ({_kind(document, schema['items'])})"
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is not None or high is not None:
        words += f" {'' if low is None else f'{low:g}'}…{'' if high is None else f'{high:g}'}"
    return words


def _note(schema: Mapping[str, Any]) -> str:
    notes = [schema.get("description")]
    notes += [option.get("description") for option in schema.get("anyOf", ())]
    return next((str(note) for note in notes if note), "")


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)
