"""What clients may send: msgspec structs, one per body, whose constraints are also the OpenAPI document.

Optional fields accept null, as OpenAI's clients send it. Fields that are known but not supported are not
here: :mod:`pyserve.http.validate` refuses them by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

PositiveInt = Annotated[int, Meta(ge=1, le=2**31 - 1)]
NonNegativeInt = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a streamed answer."""

    include_usage: bool | None = None


class Scheduling(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that every request for work accepts."""

    model: str | None = None
    user: str | None = None
    priority: (
        Annotated[
            int,
            Meta(
                ge=-(2**31),
                le=2**31 - 1,
                description="Higher runs first (vLLM's is the other way); ageing keeps low ones alive.",
            ),
        ]
        | None
    ) = None
    timeout_ms: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=2**31 - 1,
                description="Deadline from arrival, milliseconds: refused or expired with 504, never late.",
            ),
        ]
        | None
    ) = None
    metadata: Annotated[dict[str, Any], Meta(description="Echoed in jobs.")] | None = None
    cache_salt: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=256,
                description="Keeps this request's prefix-cache entries apart from others of the same key.",
            ),
        ]
        | None
    ) = None


class Sampling(Scheduling, frozen=True, kw_only=True):
    """How tokens are drawn and where generation ends."""

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stop: str | Annotated[list[str], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    min_tokens: NonNegativeInt | None = None
    ignore_eos: bool | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Meta(ge=-100.0, le=100.0)]], Meta(max_length=1024)]
        | None
    ) = None


class Generation(Sampling, frozen=True, kw_only=True):
    """Sampling fields with OpenAI's stream fields."""

    max_tokens: PositiveInt | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionRequest(Generation, frozen=True, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    add_special_tokens: bool | None = None


class TextPart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a message's content; only text is served."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One chat message; ``developer`` is read as ``system``."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    name: str | None = None


class ChatRequest(Generation, frozen=True, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class EmbeddingRequest(Scheduling, frozen=True, kw_only=True):
    """Body of ``POST /v1/embeddings``."""

    input: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: PositiveInt | None = None


class JobRequest(Sampling, frozen=True, kw_only=True):
    """Body of ``POST /submit`` and ``POST /v1/jobs``: exactly one of ``prompt`` and ``messages``."""

    prompt: str | Annotated[list[TokenId], Meta(min_length=1)] | UnsetType = UNSET
    messages: Annotated[list[Message], Meta(min_length=1)] | UnsetType = UNSET
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``POST /tokenize``, vLLM's: exactly one of ``prompt`` and ``messages``."""

    model: str | None = None
    prompt: str | UnsetType = UNSET
    messages: Annotated[list[Message], Meta(min_length=1)] | UnsetType = UNSET
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``POST /detokenize``, vLLM's."""

    model: str | None = None
    tokens: list[TokenId]
