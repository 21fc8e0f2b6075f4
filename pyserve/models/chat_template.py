"""Chat templates: a model's own Jinja template, in a sandbox, with what ``transformers`` offers it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pyserve.errors import InvalidRequest, ModelError
from pyserve.models.guard import GuardedEncoder

Message = Mapping[str, Any]


class ChatTemplate:
    """Renders messages into the prompt that the model was trained on.

    Raises ModelError where the template itself does not parse.
    """

    def __init__(self, source: str, *, named: Mapping[str, str], guard: GuardedEncoder) -> None:
        self.source = source
        self._named = dict(named)
        self._guard = guard
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"The checkpoint's chat template does not parse: {error}") from error

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **extras: Any
    ) -> str:
        """The prompt as text. Raises InvalidRequest (``messages``) where the template refuses them."""
        marked = self._render(messages, add_generation_prompt, extras)
        return self._guard.unmark(marked)

    def encode(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **extras: Any
    ) -> list[int]:
        """The prompt as token ids; control tokens spelled in messages or ``extras`` are text.

        Raises InvalidRequest (``messages``) where the template refuses them.
        """
        marked = self._render(messages, add_generation_prompt, extras)
        try:
            return self._guard.encode_marked(marked)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param="messages") from error

    def _render(
        self, messages: Sequence[Message], add_generation_prompt: bool, extras: Mapping[str, Any]
    ) -> str:
        variables = {"tools": None, "documents": None} | self._named | self._guard.mark(extras)
        try:
            return self._template.render(
                variables,
                messages=[self._guard.mark(_plain(message)) for message in messages],
                add_generation_prompt=add_generation_prompt,
            )
        # A template is a program fed with whatever the client sent: it may raise anything.
        except Exception as error:
            reason = self._guard.unmark(str(error))
            raise InvalidRequest(
                f"The model's chat template refuses these messages: {reason}", param="messages"
            ) from error


def _plain(message: Message) -> dict[str, Any]:
    """Without absent (None) fields; text parts joined by newlines, which is what text templates expect."""
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, list | tuple):
        texts = [
            part if isinstance(part, str) else part["text"] for part in content if _is_text(part)
        ]
        if len(texts) != len(content):
            raise InvalidRequest("Only text content parts are supported.", param="messages")
        plain["content"] = "\n".join(texts)
    return plain


def _is_text(part: Any) -> bool:
    return isinstance(part, str) or (
        isinstance(part, Mapping)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    )


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}``: marks the assistant's part for training; here only its content matters."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_content", [])
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(lineno)

    def _content(self, caller: jinja2.runtime.Macro) -> str:
        return caller()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # prompts are not HTML
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes HTML characters, which would end up in the prompt.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
