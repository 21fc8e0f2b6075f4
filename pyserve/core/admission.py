"""Who is let in: bounded by count and by tokens, by what can ever fit, and by what can still be in time.

Runs on the side that accepts requests, before anything is held; the scheduler never refuses for load.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyserve.core.config import SchedulerConfig
from pyserve.core.spec import RequestSpec, SamplingParams, Task
from pyserve.errors import ContextLengthExceeded, DeadlineExceeded, InvalidRequest, QueueFull

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 600.0
# Logits are divided by it: much less, and they are no numbers any more.
MIN_REPETITION_PENALTY = 0.01
_FLOAT32_MAX = 3.4e38


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What waits and how fast the line moves, 0 where not measured yet.

    ``waiting_requests`` and ``waiting_tokens`` (prompt tokens not yet computed) are accepted and not
    started. ``prompt_token_s``: seconds that one more prompt token takes beside what runs, by the step-time
    model. ``slot_s``: seconds until one of a full batch has all its tokens, by the same model; 0 while
    the batch has room.
    """

    waiting_requests: int = 0
    waiting_tokens: int = 0
    prompt_token_s: float = 0.0
    slot_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AdmissionStatistics:
    """Counters; each request offered is in exactly one of them."""

    admitted: int
    refused_invalid: int
    refused_full: int
    refused_deadline: int


def check_fits(spec: RequestSpec, config: SchedulerConfig) -> None:
    """Raises where the request can never be served, however idle the engine is.

    :class:`~pyserve.errors.InvalidRequest` for values without meaning,
    :class:`~pyserve.errors.ContextLengthExceeded` for more tokens than the context or the KV cache holds.
    """
    if not spec.prompt:
        raise InvalidRequest("the prompt is empty", param="prompt")
    if not spec.weight > 0:
        raise InvalidRequest("weight must be positive", param="weight")
    if spec.n < 1:
        raise InvalidRequest("n must be at least 1", param="n")
    if spec.task is Task.GENERATE:
        check_sampling(spec.sampling)
    output = 0
    if spec.task is Task.GENERATE:
        output = spec.sampling.max_tokens
        if output < 1:
            raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
    elif spec.n > 1:
        raise InvalidRequest("an embedding has one result: n must be 1", param="n")
    total = len(spec.prompt) + output
    most = config.max_sequence_tokens
    if spec.task is Task.EMBED:  # nothing is sampled, so the last token needs KV too
        most = min(config.context_length, config.num_blocks * config.block_size)
    if total <= most:
        return
    where = (
        "the context length served here"
        if total > config.context_length
        else "what the KV cache of this server holds for one request"
    )
    raise ContextLengthExceeded(
        f"{len(spec.prompt)} prompt tokens and up to {output} output tokens are {total} together,"
        f" more than {where}: {most}",
        param="max_tokens" if len(spec.prompt) < most else "prompt",
    )


def check_sampling(params: SamplingParams) -> None:
    """Raises :class:`~pyserve.errors.InvalidRequest` for what the sampler, all float32, would refuse.

    It is told of a request in the middle of a step's planning: a refusal there would be everybody's fault.
    """
    number, positive = "a finite number", "a finite number that is not negative"
    for name, usable, wanted in (
        ("temperature", _finite(params.temperature) and params.temperature >= 0, positive),
        ("top_p", 0 <= params.top_p <= 1, "from 0 to 1"),
        ("top_k", 0 <= params.top_k < 2**63, "0 (off) or more"),
        ("min_p", 0 <= params.min_p <= 1, "from 0 to 1"),
        ("frequency_penalty", _finite(params.frequency_penalty), number),
        ("presence_penalty", _finite(params.presence_penalty), number),
        (
            "repetition_penalty",
            _finite(params.repetition_penalty)
            and params.repetition_penalty >= MIN_REPETITION_PENALTY,
            f"a finite number of at least {MIN_REPETITION_PENALTY}",
        ),
        ("min_tokens", 0 <= params.min_tokens < 2**63, "0 or more"),
        ("logprobs", params.logprobs is None or 0 <= params.logprobs < 2**31, "0 or more"),
        ("stop_token_ids", all(map(_is_token, params.stop_token_ids)), "token ids"),
        (
            "logit_bias",
            all(_is_token(token) and _finite(bias) for token, bias in params.logit_bias),
            "finite numbers for token ids",
        ),
    ):
        if not usable:
            raise InvalidRequest(f"{name} must be {wanted}", param=name)


def _finite(value: float) -> bool:
    return abs(value) <= _FLOAT32_MAX  # False for NaN


def _is_token(token: int) -> bool:
    return 0 <= token < 2**31


class Admission:
    """Decides about each request as it arrives. Sans-IO: ``now`` and ``load`` are given."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._admitted = 0
        self._invalid = 0
        self._full = 0
        self._deadline = 0

    def admit(self, spec: RequestSpec, now: float, load: Load) -> None:
        """Returns if the request may join the line; holds nothing.

        Raises what :func:`check_fits` does; :class:`~pyserve.errors.QueueFull`, with ``retry_after_s`` by the
        work ahead, where the line is at its limit; :class:`~pyserve.errors.DeadlineExceeded` where
        the deadline has passed or cannot be met at the measured speed.
        """
        try:
            check_fits(spec, self._config)
        except InvalidRequest:
            self._invalid += 1
            raise
        try:
            self._check_full(spec, load)
        except QueueFull:
            self._full += 1
            raise
        try:
            self._check_deadline(spec, now, load)
        except DeadlineExceeded:
            self._deadline += 1
            raise
        self._admitted += 1

    def statistics(self) -> AdmissionStatistics:
        """A snapshot."""
        return AdmissionStatistics(self._admitted, self._invalid, self._full, self._deadline)

    def _check_full(self, spec: RequestSpec, load: Load) -> None:
        config = self._config
        requests_over = load.waiting_requests + 1 - config.max_waiting_requests
        # A prompt that is longer than the whole limit may still wait alone.
        tokens_over = load.waiting_tokens + len(spec.prompt) - config.max_waiting_tokens
        if load.waiting_requests == 0:
            tokens_over = 0
        if requests_over <= 0 and tokens_over <= 0:
            return
        # A place is free when so many prompt tokens at the head of the line have been computed.
        per_request = load.waiting_tokens / max(load.waiting_requests, 1)
        tokens_ahead = max(requests_over * per_request, tokens_over)
        wait_s = load.slot_s + tokens_ahead * load.prompt_token_s
        limit = (
            f"{config.max_waiting_requests} requests"
            if requests_over > 0
            else f"{config.max_waiting_tokens} prompt tokens"
        )
        raise QueueFull(
            f"the waiting line is full ({limit}); retry later",
            retry_after_s=min(max(wait_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S),
        )

    def _check_deadline(self, spec: RequestSpec, now: float, load: Load) -> None:
        if spec.deadline_s is None:
            return
        left_s = spec.deadline_s - now
        if left_s <= 0:
            raise DeadlineExceeded("timeout_ms has passed already", param="timeout_ms")
        start_s = predicted_start_s(spec, load)
        if start_s > left_s:
            raise DeadlineExceeded(
                f"timeout_ms cannot be met: about {start_s:#.2g} s to the first token at the present load",
                param="timeout_ms",
                retry_after_s=min(max(start_s - left_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S),
            )


def predicted_start_s(spec: RequestSpec, load: Load) -> float:
    """Seconds to the request's first token at the measured speed; 0 where nothing is measured.

    What waits goes first, unless the request has a priority above the default: then it is assumed to
    overtake everybody, for a request that *can* be in time must not be refused.
    """
    ahead = load.waiting_tokens if spec.priority <= 0 else 0
    return (ahead + len(spec.prompt)) * load.prompt_token_s
