"""What clients get: msgspec structs in OpenAI's and vLLM's shapes, extensions as extra fields."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """How much of the prompt came from the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one answer, all prompts and choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class Timings(msgspec.Struct, frozen=True):
    """Where the time went, in milliseconds, under vLLM's names and with vLLM's meanings.

    ``queue_time_ms`` arrival to first scheduled; ``time_to_first_token_ms`` from there to the first token;
    ``generation_time_ms`` first to last token; ``mean_itl_ms`` that, per token after the first;
    ``total_time_ms`` and ``batch_size`` (the most sequences that shared a step) are ours.
    """

    queue_time_ms: float | None
    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    mean_itl_ms: float | None
    total_time_ms: float | None
    batch_size: int


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """OpenAI's completion style, parallel lists."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    """One completion. ``stop_reason`` is the stop string or token id that ended it (vLLM's)."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``POST /v1/completions``."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metrics: Timings | None = None


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the likeliest tokens at a position."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct, frozen=True):
    """The chosen token at a position, and the likeliest ones."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """OpenAI's chat style, one object a token."""

    content: list[TokenLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """What the model said."""

    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One chat answer. ``stop_reason`` is the stop string or token id that ended it (vLLM's)."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None = None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``POST /v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: Timings | None = None


class EmbeddingItem(msgspec.Struct, frozen=True, kw_only=True):
    """One embedding: floats, or base64 of little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, frozen=True):
    """Tokens of an embedding request."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``POST /v1/embeddings``."""

    object: Literal["list"] = "list"
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's model object; context length, quantisation and size as extra fields."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "pyserve"
    root: str
    max_model_len: int
    context_length: int
    quantization: str
    dtype: str
    num_parameters: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``GET /v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokenized(msgspec.Struct, frozen=True):
    """Answer of ``POST /tokenize``, vLLM's."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, frozen=True):
    """Answer of ``POST /detokenize``, vLLM's."""

    prompt: str


Readiness = Literal["ok", "draining", "unavailable"]


class Alive(msgspec.Struct, frozen=True):
    """Answer of ``/livez`` and ``/readyz``."""

    status: Readiness


class Health(msgspec.Struct, frozen=True):
    """Answer of ``/health``. ``throttled``: new requests are being refused now."""

    status: Readiness
    requests_running: int
    requests_waiting: int
    tokens_waiting: int
    kv_cache_usage_ratio: float
    throttled: bool


class Build(msgspec.Struct, frozen=True):
    """What this server was built for."""

    isa: str
    cuda: bool
    torch: str
    python: str


class Version(msgspec.Struct, frozen=True):
    """Answer of ``/version``."""

    version: str
    model: str
    build: Build


JobState = Literal["queued", "running", "succeeded", "failed", "cancelled", "expired"]


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """A job as its owner sees it; times are Unix seconds. ``position`` counts the queued jobs before it
    (None in lists, and once it runs).
    """

    request_id: str
    id: str
    object: Literal["job"] = "job"
    status: JobState
    priority: int
    position: int | None
    created_at: float
    started_at: float | None
    finished_at: float | None
    output_tokens: int
    batch_size: int | None
    metadata: dict[str, Any] | None
    result: dict[str, Any] | None
    error: dict[str, Any] | None


class JobList(msgspec.Struct, frozen=True, kw_only=True):
    """One page of jobs, newest first; ``after=last_id`` gives the next."""

    object: Literal["list"] = "list"
    data: list[JobView]
    has_more: bool
    first_id: str | None
    last_id: str | None
