"""A body becomes a struct, or an error that names the field at fault.

Three kinds of field: those of the struct, whose types and ranges msgspec checks; those that are known from
OpenAI or vLLM and not supported here, which are refused unless they hold a value that asks for nothing; and
unknown ones, which are accepted and reported back (``X-Pyserve-Ignored-Fields``). A field that only another
endpoint has (``stream`` in a job, ``max_completion_tokens`` of a completion) counts as not supported.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from pyserve.errors import InvalidRequest
from pyserve.http.errors import Unsupported
from pyserve.http.schema import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    JobRequest,
    Scheduling,
)

T = TypeVar("T", bound=msgspec.Struct)

# Known and not supported: the values that ask for nothing and so are accepted.
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "beam_width": (),
    "callback_url": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "parallel_tool_calls": (),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
_UNSUPPORTED_IN_MESSAGE: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "function_call": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}
_WORK = (ChatRequest, CompletionRequest, EmbeddingRequest, JobRequest)
_EXPLAINED_BYTES = 2**16  # a larger body that is no JSON is not looked into to say where
_PATH = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")
_MISSING = re.compile(r"missing required field `([^`]+)`")


def _names(model: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(model))


_FOREIGN: Mapping[type[msgspec.Struct], frozenset[str]] = {
    model: frozenset[str]().union(*(_names(other) for other in _WORK)) - _names(model)
    for model in _WORK
}


def parse(body: bytes, model: type[T]) -> tuple[T, tuple[str, ...]]:
    """The struct, and the dotted names of the fields that were ignored.

    Raises :class:`~pyserve.errors.InvalidRequest` with ``param`` for everything a body can do wrong.
    """
    raw = decode_object(body)
    refuse_unsupported(raw, model)
    parsed = convert(raw, model)
    return parsed, tuple(dict.fromkeys(_unknown(raw, parsed, "")))


def decode_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object; raises InvalidRequest where it is not one."""
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _explain(body)
        raise InvalidRequest(f"the body is not valid JSON: {_PATH.sub('', str(error))}") from None
    if not isinstance(raw, dict):
        raise InvalidRequest("the body must be a JSON object")
    return raw


def _explain(body: bytes) -> None:
    """Raises InvalidRequest naming the field, where what is wrong is one value: no number, or no Unicode."""
    if len(body) > _EXPLAINED_BYTES:
        return
    try:
        raw = json.loads(body)  # takes NaN, numbers beyond a float, and unpaired surrogates
        for path, value in _leaves(raw):
            if isinstance(value, float) and not math.isfinite(value):
                raise InvalidRequest("a number must be finite", param=path[:256] or None)
            if isinstance(value, str) and not _is_unicode(value):
                message = "text must be valid Unicode: this has an unpaired surrogate"
                raise InvalidRequest(message, param=path[:256] or None)
    except (ValueError, RecursionError):
        return


def _leaves(raw: object) -> Iterator[tuple[str, object]]:
    """Every value in ``raw`` that is no list and no object, and every key, with the path to it."""
    todo: list[tuple[str, object]] = [("", raw)]
    while todo:
        path, value = todo.pop()
        if isinstance(value, dict):
            todo += ((path, key) for key in value)
            todo += ((f"{path}.{key}" if path else key, item) for key, item in value.items())
        elif isinstance(value, list):
            todo += ((f"{path}[{index}]", item) for index, item in enumerate(value))
        else:
            yield path, value


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def convert(raw: Mapping[str, Any], model: type[T]) -> T:
    """``raw`` checked against ``model``; raises InvalidRequest naming the field."""
    try:
        return msgspec.convert(raw, model)
    except msgspec.ValidationError as error:
        message = str(error)
        raise InvalidRequest(_PATH.sub("", message), param=_param(message)) from None


def _param(message: str) -> str | None:
    path = _PATH.search(message)
    prefix = path.group(1).replace("[...]", "") if path else ""
    missing = _MISSING.search(message)
    if missing:
        return f"{prefix}.{missing.group(1)}" if prefix else missing.group(1)
    return prefix or None


def refuse_unsupported(raw: Mapping[str, Any], model: type[msgspec.Struct]) -> None:
    """Raises :class:`Unsupported` for a field that is known, not supported, and asks for something."""
    _refuse(raw, _UNSUPPORTED, "")
    best_of = raw.get("best_of")
    if best_of is not None and best_of != (raw.get("n") or 1):
        raise Unsupported("best_of other than n is not supported", param="best_of")
    messages = raw.get("messages")
    known = _names(model)
    if issubclass(model, Scheduling):
        for name in raw.keys() & _FOREIGN[model]:
            if raw[name] is not None and raw[name] is not False:
                raise Unsupported(f"{name} is not a field of this endpoint", param=name)
    if isinstance(messages, list) and "messages" in known:
        for index, message in enumerate(messages):
            if isinstance(message, dict):
                _refuse_in_message(message, f"messages[{index}].")


def _refuse_in_message(message: Mapping[str, Any], prefix: str) -> None:
    _refuse(message, _UNSUPPORTED_IN_MESSAGE, prefix)
    if message.get("role") in ("tool", "function"):
        raise Unsupported("tool messages are not supported", param=f"{prefix}role")
    content = message.get("content")
    if content is None and message.get("role") in ("system", "developer", "user"):
        raise InvalidRequest("a message needs content", param=f"{prefix}content")
    for index, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict) and isinstance(kind := part.get("type"), str):
            if kind != "text":
                where = f"{prefix}content[{index}].type"
                raise Unsupported(f"content parts of type {kind!r} are not supported", param=where)
            if not isinstance(part.get("text"), str):
                where = f"{prefix}content[{index}].text"
                raise InvalidRequest("a text part needs a string `text`", param=where)


def _refuse(raw: Mapping[str, Any], table: Mapping[str, tuple[object, ...]], prefix: str) -> None:
    for name in raw.keys() & table.keys():
        value = raw[name]
        if value is not None and not any(_same(value, allowed) for allowed in table[name]):
            raise Unsupported(f"{name} is not supported", param=prefix + name)


def _same(value: object, allowed: object) -> bool:
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _unknown(raw: object, parsed: object, prefix: str) -> Iterator[str]:
    """Names in ``raw`` that no struct field took, depth first."""
    if isinstance(parsed, msgspec.Struct) and isinstance(raw, dict):
        fields = {field.encode_name: field.name for field in msgspec.structs.fields(parsed)}
        for name, value in raw.items():
            if name in fields:
                yield from _unknown(value, getattr(parsed, fields[name]), f"{prefix}{name}.")
            elif prefix or not (name in _UNSUPPORTED or name == "best_of"):
                yield prefix + name
    elif isinstance(parsed, list) and parsed and isinstance(parsed[0], msgspec.Struct):
        for index, (value, item) in enumerate(zip(raw, parsed, strict=True)):  # type: ignore[call-overload]
            yield from _unknown(value, item, f"{prefix[:-1]}[{index}].")
