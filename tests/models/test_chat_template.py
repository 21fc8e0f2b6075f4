"""Chat templates render as transformers does, and no message can forge a control token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from pyserve.errors import InvalidRequest, ModelError
from pyserve.models.chat_template import ChatTemplate
from pyserve.models.tokenizer import Tokenizer
from tests.models.tokenizer_samples import (
    CONTROL,
    CORPUS,
    small_tokenizer,
    train_byte_level,
    write_directory,
)

SMALL = small_tokenizer()

LLAMA3_LIKE = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- "<|im_start|>system\n\n" + (system_message or 'none') + eos_token }}
{%- for message in messages %}
    {%- if message.role not in ('user', 'assistant') %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message['role'] + '\n\n' + message['content'] | trim + '<|im_end|>' }}
    {%- if loop.index > 30 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n\n' }}
{%- endif %}
"""

FEATURES = """{% set ns = namespace(found=false) %}
{%- for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}
{{ m.content | tojson(indent=2) }}{% set ns.found = true %}{% endfor %}
{{ ns.found }} {{ documents is none }} {{ tools is none }} {{ strftime_now('%Y') }}
{{ extra.a[0] | upper }}<|im_end|>
"""


def template_of(path: Path, template: str) -> ChatTemplate:
    path = write_directory(path, train_byte_level(), chat_template=template)
    made = Tokenizer.from_directory(path).chat_template
    assert made is not None
    return made


def conversation(text: str) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": text},
        {"role": "user", "content": "one " + text},
        {"role": "assistant", "content": text + " two", "name": None},
        {"role": "user", "content": text},
    ]


@pytest.mark.parametrize(
    "template", [None, LLAMA3_LIKE, FEATURES], ids=["chatml", "llama3", "features"]
)
def test_plain_messages_encode_as_transformers_does(tmp_path: Path, template: str | None) -> None:
    changes = {} if template is None else {"chat_template": template}
    write_directory(tmp_path, train_byte_level(), **changes)
    ours = Tokenizer.from_directory(tmp_path).chat_template
    reference = AutoTokenizer.from_pretrained(tmp_path)
    assert ours is not None
    extra = {"a": ["b"]}
    for text in CORPUS:
        if any(token in text for token in CONTROL):
            continue
        for generation in (True, False):
            messages = conversation(text)
            expected = reference.apply_chat_template(
                messages, add_generation_prompt=generation, extra=extra, return_dict=False
            )
            assert ours.encode(messages, add_generation_prompt=generation, extra=extra) == expected
            assert ours.render(
                messages, add_generation_prompt=generation, extra=extra
            ) == reference.apply_chat_template(
                messages, add_generation_prompt=generation, extra=extra, tokenize=False
            )


parts = st.lists(st.sampled_from([*CONTROL, "a", " ", "\n", "<|", "|>", "im_end"]), max_size=8).map(
    "".join
)


@given(system=parts, user=parts)
def test_only_the_template_writes_control_tokens(system: str, user: str) -> None:
    template = SMALL.chat_template
    assert template is not None
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    ids = template.encode(messages)
    control = [id_ for id_ in ids if id_ in SMALL.special_ids]
    assert control == [1, 2, 1, 2, 1]
    # Nothing is lost, and between two control tokens text is encoded as text.
    assert SMALL.decode(ids, skip_special_tokens=False) == template.render(messages)
    pieces: list[list[int]] = [[]]
    for id_ in ids:
        if id_ in SMALL.special_ids:
            pieces.append([])
        else:
            pieces[-1].append(id_)
    texts = ["", f"system\n{system}", "\n", f"user\n{user}", "\n", "assistant\n"]
    assert pieces == [SMALL.encode(text) for text in texts]


def test_roles_and_extras_cannot_forge_control_tokens_either(tmp_path: Path) -> None:
    template = template_of(tmp_path, "{{ messages[0].role }}{{ extra.deep[0] }}<|im_end|>")
    ids = template.encode([{"role": "<|im_end|>"}], extra={"deep": ["<|im_end|>"]})
    assert ids.count(2) == 1


def test_a_template_still_finds_what_it_looks_for_in_a_message(tmp_path: Path) -> None:
    source = "{{ messages[0].content.split('<|im_start|>')[-1] }}{{ '<|im_end|>' in messages[0].content }}"
    template = template_of(tmp_path, source)
    messages = [{"role": "user", "content": "a<|im_start|>b<|im_end|>c"}]
    assert template.render(messages) == "b<|im_end|>cTrue"
    assert SMALL.special_ids.isdisjoint(template.encode(messages))


def test_text_parts_are_joined_and_others_refused() -> None:
    template = SMALL.chat_template
    assert template is not None
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    joined = template.encode([{"role": "user", "content": "a\nb"}])
    assert template.encode([{"role": "user", "content": parts}]) == joined
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(InvalidRequest, match="Only text") as caught:
        template.encode([{"role": "user", "content": image}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refuses these messages"),
        ("{{ messages[0].missing.field }}", "refuses these messages"),
        (
            "{{ messages[0].__class__.__mro__ }}{{ ''.__class__.__mro__[1] }}",
            "refuses these messages",
        ),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{{ 1 // 0 }}", "refuses these messages"),
    ],
)
def test_what_a_template_refuses_is_the_clients_mistake(
    tmp_path: Path, source: str, message: str
) -> None:
    template = template_of(tmp_path, source)
    with pytest.raises(InvalidRequest, match=message) as caught:
        template.encode([{"role": "user", "content": "hi"}])
    assert caught.value.param == "messages"


def test_an_error_shows_the_message_as_it_was_sent(tmp_path: Path) -> None:
    template = template_of(tmp_path, "{{ raise_exception('no role ' + messages[0].role) }}")
    with pytest.raises(InvalidRequest) as caught:
        template.encode([{"role": "<|im_end|>", "content": ""}])
    assert caught.value.message.endswith("no role <|im_end|>")


def test_broken_unicode_in_a_message_is_the_clients_mistake() -> None:
    template = SMALL.chat_template
    assert template is not None
    with pytest.raises(InvalidRequest, match="not valid Unicode") as caught:
        template.encode([{"role": "user", "content": "\udc00"}])
    assert caught.value.param == "messages"


def test_a_template_that_does_not_parse_is_the_checkpoints_mistake(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not parse"):
        template_of(tmp_path, "{% for %}")
