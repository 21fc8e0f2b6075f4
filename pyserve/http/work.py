"""A checked body becomes work for the engine: token ids, sampling, scheduling, and how text is assembled."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import trio

from pyserve.core.spec import RequestSpec, SamplingParams
from pyserve.engine.stop_strings import StopStrings
from pyserve.errors import ContextLengthExceeded, InvalidRequest
from pyserve.http.auth import ApiKey
from pyserve.http.errors import ModelNotFound, Unsupported
from pyserve.http.schema import Message, Sampling, Scheduling
from pyserve.http.state import ServerState

T = TypeVar("T")

# One way to write each number, so that no key is there twice.
_NUMERAL = re.compile("0|[1-9][0-9]{0,9}")
_THREAD_CHARS = 4096  # beyond this, tokenising would hold the loop for milliseconds
_COMPLETION_MAX_TOKENS = 16  # OpenAI's default for completions
# Arguments of a template that are not the client's to set.
_RESERVED_EXTRAS = frozenset(("self", "messages", "add_generation_prompt"))
_tokenizer_threads = trio.CapacityLimiter(2)


@dataclass(frozen=True, slots=True)
class Work:
    """One or more engine requests that make one answer. Choice ``p * n + i`` is sequence i of prompt p."""

    specs: tuple[RequestSpec, ...]
    stop: StopStrings | None = None
    include_stop: bool = False
    skip_special_tokens: bool = True

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(spec.prompt) for spec in self.specs)

    @property
    def most_tokens(self) -> int:
        """The most tokens, prompt and output, that this may come to: what rate limits reserve."""
        return self.prompt_tokens + sum(spec.n * spec.sampling.max_tokens for spec in self.specs)

    @property
    def logprobs(self) -> int | None:
        """How many top log-probabilities were asked for (None: none at all)."""
        return self.specs[0].sampling.logprobs


def check_model(state: ServerState, model: str | None) -> None:
    """Raises :class:`ModelNotFound` where the body names another model than the one served."""
    if model is not None and model != state.model:
        raise ModelNotFound(
            f"the model {model[:128]!r} is not served here; {state.model!r} is", param="model"
        )


async def encode_prompts(
    state: ServerState,
    prompt: str | Sequence[Any],
    field: str,
    *,
    special: bool = True,
    limit: int,
    output: int = 1,
) -> list[list[int]]:
    """Token ids of every prompt in ``prompt``: a string, ids, a list of strings, or a list of id lists.

    The context must have room for each and ``output`` tokens more.
    """
    prompts: list[Any] = [prompt]
    if isinstance(prompt, list) and not isinstance(prompt[0], int):
        prompts = prompt
    if len(prompts) > limit:
        raise InvalidRequest(f"at most {limit} prompts in one request", param=field)
    if not all(isinstance(item, str) or _are_ids(item) for item in prompts):
        raise InvalidRequest("strings and token ids must not be mixed", param=field)

    def encode() -> list[list[int]]:
        text_ids = state.tokenizer.encode
        return [
            text_ids(item, add_special_tokens=special) if isinstance(item, str) else item
            for item in prompts
        ]

    encoded = await off_loop(encode, sum(len(item) for item in prompts if isinstance(item, str)))
    for ids in encoded:
        _check_ids(state, ids, field, output)
    return encoded


def _are_ids(item: object) -> bool:
    return isinstance(item, list) and all(isinstance(token, int) for token in item)


async def encode_chat(
    state: ServerState,
    messages: Sequence[Message],
    *,
    generation_prompt: bool = True,
    extras: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation, through the model's own chat template."""
    template = state.tokenizer.chat_template
    if template is None:
        raise Unsupported("this model has no chat template; use /v1/completions", param="messages")
    if reserved := sorted(_RESERVED_EXTRAS & (extras or {}).keys()):
        raise InvalidRequest(
            f"chat_template_kwargs may not set {', '.join(reserved)}", param="chat_template_kwargs"
        )
    plain = [_plain(message) for message in messages]
    size = sum(len(message["content"]) for message in plain)

    def encode() -> list[int]:
        return template.encode(plain, add_generation_prompt=generation_prompt, **(extras or {}))

    try:
        ids = await off_loop(encode, size)
    except (ValueError, TypeError) as error:  # the template refused the conversation
        raise InvalidRequest(f"the chat template: {error}", param="messages") from None
    _check_ids(state, ids, "messages")
    return ids


def _plain(message: Message) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text or "" for part in content)
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": content or ""}
    if message.name is not None:
        plain["name"] = message.name
    return plain


async def off_loop(function: Callable[[], T], size: int) -> T:
    """Runs ``function`` in a thread where ``size`` characters make it slow, else here."""
    if size <= _THREAD_CHARS:
        return function()
    return await trio.to_thread.run_sync(
        function, limiter=_tokenizer_threads, abandon_on_cancel=True
    )


def _check_ids(state: ServerState, ids: Sequence[int], field: str, output: int = 1) -> None:
    if not ids:
        raise InvalidRequest(f"{field} must not be empty", param=field)
    if max(ids) >= state.engine.info.vocab_size:
        size = state.engine.info.vocab_size
        raise InvalidRequest(f"token id {max(ids)} is beyond the vocabulary of {size}", param=field)
    if len(ids) + output > state.context_length:
        included = ", output included" if output else ""
        raise ContextLengthExceeded(
            f"the prompt has {len(ids)} tokens, the context length served here is "
            f"{state.context_length} tokens{included}",
            param=field,
        )


def sampling_params(
    state: ServerState, body: Sampling, *, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    """The engine's sampling parameters, a seed drawn where the client gave none."""
    ids = tuple(body.stop_token_ids or ())
    size = state.engine.info.vocab_size
    if ids and max(ids) >= size:
        raise InvalidRequest(
            f"token id {max(ids)} is beyond the vocabulary of {size}", param="stop_token_ids"
        )
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens is beyond max_tokens ({max_tokens})", param="min_tokens")
    return SamplingParams(
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        seed=secrets.randbits(63) if body.seed is None else body.seed & 0xFFFF_FFFF_FFFF_FFFF,
        logit_bias=_logit_bias(body.logit_bias or {}, size),
        logprobs=logprobs,
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=ids,
    )


def _logit_bias(bias: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs = []
    for text, value in bias.items():
        token = int(text) if _NUMERAL.fullmatch(text) else -1
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"logit_bias key {text[:32]!r} is no token id of this model", param="logit_bias"
            )
        pairs.append((token, value))
    return tuple(pairs)


def stop_strings(body: Sampling) -> StopStrings | None:
    """The stop strings, none of them empty; None where there are none."""
    stop = (
        ()
        if body.stop is None
        else (body.stop,)
        if isinstance(body.stop, str)
        else tuple(body.stop)
    )
    if not all(stop):
        raise InvalidRequest("a stop string must not be empty", param="stop")
    if any(len(text) > 1024 for text in stop):
        raise InvalidRequest("a stop string may have at most 1024 characters", param="stop")
    return StopStrings(stop) if stop else None


def build_work(
    state: ServerState,
    key: ApiKey,
    body: Sampling,
    prompts: Sequence[Sequence[int]],
    *,
    arrival_s: float,
    request_id: str,
    max_tokens: int | None,
    logprobs: int | None,
    chat: bool,
) -> Work:
    """The engine requests of one body. ``max_tokens`` None means OpenAI's default of the endpoint."""
    n = body.n or 1
    shared = scheduling(state, key, body, arrival_s)
    specs: list[RequestSpec] = []
    sampling: SamplingParams | None = None
    for index, prompt in enumerate(prompts):
        room = state.context_length - len(prompt)
        default = room if chat else min(_COMPLETION_MAX_TOKENS, room)
        most = max_tokens or default
        if sampling is None or sampling.max_tokens != most:
            sampling = sampling_params(state, body, max_tokens=most, logprobs=logprobs)
        elif body.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(63))
        suffix = "" if len(prompts) == 1 else f"-{index}"
        specs.append(
            RequestSpec(
                request_id=request_id + suffix,
                prompt=tuple(prompt),
                sampling=sampling,
                n=n,
                **shared,
            )
        )
    return Work(
        specs=tuple(specs),
        stop=stop_strings(body),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=_or(body.skip_special_tokens, True),
    )


def scheduling(
    state: ServerState, key: ApiKey, body: Scheduling, arrival_s: float
) -> dict[str, Any]:
    """The scheduling fields of a RequestSpec: priority, deadline, tenant, fair share, cache salt.

    ``arrival_s``, on the engine's clock, is when the request had arrived: the deadline counts from there.
    """
    deadline_s = None if body.timeout_ms is None else arrival_s + body.timeout_ms / 1e3
    return {
        "priority": body.priority or 0,
        "deadline_s": deadline_s,
        "tenant": key.name if state.keys.keys else "",
        "weight": key.weight if math.isfinite(key.weight) else 1.0,
        "cache_salt": key.cache_salt(body.cache_salt),
    }


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
