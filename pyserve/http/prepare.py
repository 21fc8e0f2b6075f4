"""From a checked body to work and the renderer of its answer, for every endpoint that generates."""

from __future__ import annotations

from msgspec import UnsetType

from pyserve.errors import InvalidRequest
from pyserve.http.auth import ApiKey
from pyserve.http.context import new_id
from pyserve.http.render import ChatRenderer, CompletionRenderer, Renderer
from pyserve.http.schema import ChatRequest, CompletionRequest, Generation, JobRequest
from pyserve.http.state import ServerState
from pyserve.http.work import Work, build_work, check_model, encode_chat, encode_prompts

Prepared = tuple[Work, Renderer]


async def prepare_completion(
    state: ServerState,
    key: ApiKey,
    body: CompletionRequest,
    *,
    arrival_s: float,
    max_prompts: int,
) -> Prepared:
    """Work of ``/v1/completions``."""
    check_model(state, body.model)
    prompts = await encode_prompts(
        state,
        body.prompt,
        "prompt",
        special=body.add_special_tokens is not False,
        limit=max_prompts,
    )
    if len(prompts) * (body.n or 1) > max_prompts:
        raise InvalidRequest(f"n times the prompts may be at most {max_prompts}", param="n")
    answer_id = new_id("cmpl")
    work = build_work(
        state,
        key,
        body,
        prompts,
        arrival_s=arrival_s,
        request_id=answer_id,
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        chat=False,
    )
    renderer = CompletionRenderer(
        state.tokenizer,
        answer_id,
        state.model,
        logprobs=body.logprobs,
        include_usage=include_usage(body),
    )
    return work, renderer


async def prepare_chat(
    state: ServerState, key: ApiKey, body: ChatRequest | JobRequest, *, arrival_s: float
) -> Prepared:
    """Work of ``/v1/chat/completions``, and of a job with messages."""
    check_model(state, body.model)
    assert not isinstance(body.messages, UnsetType)
    prompt = await encode_chat(
        state,
        body.messages,
        generation_prompt=body.add_generation_prompt is not False,
        extras=body.chat_template_kwargs,
    )
    answer_id = new_id("chatcmpl")
    wanted = bool(body.logprobs)
    work = build_work(
        state,
        key,
        body,
        [prompt],
        arrival_s=arrival_s,
        request_id=answer_id,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=chat_top_logprobs(body),
        chat=True,
    )
    usage = isinstance(body, Generation) and include_usage(body)
    renderer = ChatRenderer(
        state.tokenizer, answer_id, state.model, logprobs=wanted, include_usage=usage
    )
    return work, renderer


async def prepare_job(
    state: ServerState, key: ApiKey, body: JobRequest, *, arrival_s: float
) -> Prepared:
    """Work of a job: a chat where it has messages, else a completion."""
    has_prompt = not isinstance(body.prompt, UnsetType)
    has_messages = not isinstance(body.messages, UnsetType)
    if has_prompt == has_messages:
        raise InvalidRequest("give exactly one of prompt and messages", param="prompt")
    if isinstance(body.prompt, UnsetType):
        return await prepare_chat(state, key, body, arrival_s=arrival_s)
    check_model(state, body.model)
    prompts = await encode_prompts(state, body.prompt, "prompt", limit=1)
    answer_id = new_id("cmpl")
    logprobs = chat_top_logprobs(body)
    work = build_work(
        state,
        key,
        body,
        prompts,
        arrival_s=arrival_s,
        request_id=answer_id,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=logprobs,
        chat=False,
    )
    return work, CompletionRenderer(state.tokenizer, answer_id, state.model, logprobs=logprobs)


def chat_top_logprobs(body: ChatRequest | JobRequest) -> int | None:
    """How many top log-probabilities OpenAI's two chat fields ask for."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def include_usage(body: Generation) -> bool:
    """Whether the stream ends with a usage event; raises where that is asked of no stream."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    return body.stream_options is not None and bool(body.stream_options.include_usage)
