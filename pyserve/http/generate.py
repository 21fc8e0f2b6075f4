"""Running work: engine events become text deltas, one callback a batch of them.

Everything a generation holds is inside one structured scope: engine requests are opened first (all or none
are admitted), and leaving for any reason cancels what is left of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import trio

from pyserve.core.events import ChoiceFinished, FinishReason, Started, Token
from pyserve.errors import RequestError
from pyserve.http.interfaces import Assembler, StreamEvent, StreamLike, TextDeltaLike
from pyserve.http.shapes import PromptTokensDetails, Timings, Usage
from pyserve.http.state import ServerState
from pyserve.http.work import Work
from pyserve.telemetry.metrics import RequestObservation


@dataclass(frozen=True, slots=True)
class Delta:
    """News of one choice: text that can no longer change, the tokens it came from, perhaps the end.

    ``offsets[i]`` is where the text of ``tokens[i]`` starts in the choice's text, in characters.
    """

    index: int
    text: str
    tokens: tuple[Token, ...] = ()
    offsets: tuple[int, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A generation that ended well."""

    usage: Usage
    timings: Timings
    finish_reasons: tuple[str, ...]
    queue_s: float | None
    ttft_s: float | None


Emit = Callable[[list[Delta]], Awaitable[None]]


async def _nothing() -> None:
    pass


@dataclass(slots=True)
class _Choice:
    """One sequence's text so far. ``finished`` once its last delta is out."""

    index: int
    assembler: Assembler
    output_tokens: int = 0
    finish_reason: str | None = None
    last_token_s: float | None = None


@dataclass(slots=True)
class _Prompt:
    """One engine request of the work and its choices."""

    stream: StreamLike
    choices: list[_Choice]
    started: bool = False
    waiting: list[Delta] = field(default_factory=list)


async def generate(
    state: ServerState,
    work: Work,
    emit: Emit,
    *,
    admitted: Callable[[], Awaitable[None]] = _nothing,
    started: Callable[[], Awaitable[None]] = _nothing,
) -> Outcome:
    """Runs ``work``, awaiting ``emit`` with each batch of deltas; never two at once.

    ``admitted`` is awaited once the engine has taken all of it, ``started`` when the first of it leaves the
    waiting line. Raises the :class:`~pyserve.errors.RequestError` of whatever fails first.
    """
    try:
        async with AsyncExitStack() as stack:
            prompts = []
            for number, spec in enumerate(work.specs):
                stream = await stack.enter_async_context(state.engine.request(spec))
                choices = [_choice(state, work, number * spec.n + i) for i in range(spec.n)]
                prompts.append(_Prompt(stream, choices))
            await admitted()
            await _run(state, work, prompts, emit, started)
            return _outcome(state, work, prompts)
    except BaseException as error:
        state.metrics.request_broken("error" if isinstance(error, Exception) else "abort")
        raise


def _choice(state: ServerState, work: Work, index: int) -> _Choice:
    assembler = state.assembler(
        state.tokenizer,
        stop=work.stop or (),
        include_stop=work.include_stop,
        skip_special_tokens=work.skip_special_tokens,
        min_tokens=work.specs[0].sampling.min_tokens,
    )
    return _Choice(index, assembler)


async def _run(
    state: ServerState,
    work: Work,
    prompts: Sequence[_Prompt],
    emit: Emit,
    started: Callable[[], Awaitable[None]],
) -> None:
    pump = _Pump(state, work, emit, started)
    if len(prompts) == 1:
        await pump.run(prompts[0])
        return
    try:
        async with trio.open_nursery() as nursery:
            for prompt in prompts:
                nursery.start_soon(pump.run, prompt)
    except BaseExceptionGroup as group:
        failed, other = group.split(RequestError)
        if failed is None or other is not None:
            raise
        raise _first(failed) from None


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


class _Pump:
    """Moves events of each prompt's stream to ``emit``, one caller at a time."""

    def __init__(
        self,
        state: ServerState,
        work: Work,
        emit: Emit,
        started: Callable[[], Awaitable[None]],
    ) -> None:
        self._state = state
        self._work = work
        self._emit = emit
        self._started = started
        self._any_started = False
        self._lock = trio.Lock()

    async def run(self, prompt: _Prompt) -> None:
        """Until the stream ends; raises its error."""
        while True:
            try:
                events = await prompt.stream.receive()
            except trio.EndOfChannel:
                return
            if not self._any_started and any(isinstance(event, Started) for event in events):
                self._any_started = True
                await self._started()
            deltas = self._digest(prompt, events)
            if deltas:
                async with self._lock:
                    await self._emit(deltas)

    def _digest(self, prompt: _Prompt, events: Sequence[StreamEvent]) -> list[Delta]:
        """Deltas of one batch of events, at most one a choice, in order of choice."""
        tokens: dict[int, list[Token]] = {}
        ends: dict[int, ChoiceFinished] = {}
        for event in events:
            if isinstance(event, Token):
                tokens.setdefault(event.index, []).append(event)
            elif isinstance(event, ChoiceFinished):
                ends[event.index] = event
        now = self._state.engine.now()
        deltas = []
        for index in sorted(tokens.keys() | ends.keys()):
            choice = prompt.choices[index]
            if choice.finish_reason is None:
                delta = self._advance(prompt, choice, tokens.get(index, []), ends.get(index), now)
                if delta is not None:
                    deltas.append(delta)
        return deltas

    def _advance(
        self,
        prompt: _Prompt,
        choice: _Choice,
        tokens: list[Token],
        end: ChoiceFinished | None,
        now: float,
    ) -> Delta | None:
        self._observe_gap(choice, len(tokens), now)
        silent_stop = end is not None and end.stop_token is not None and not self._work.include_stop
        pieces: list[TextDeltaLike] = []
        for position, token in enumerate(tokens):
            choice.output_tokens += 1
            if silent_stop and position == len(tokens) - 1:
                break  # the stop token counts, its text is not part of the answer
            pieces.append(choice.assembler.push((token,)))
            if pieces[-1].stopped is not None:
                choice.finish_reason = "stop"
                if end is None:
                    prompt.stream.stop_choice(token.index)
                return _joined(choice.index, pieces, "stop", pieces[-1].stopped)
        if end is None:
            delta = _joined(choice.index, pieces)
            return delta if delta.text or delta.tokens else None
        pieces.append(choice.assembler.finish(end.reason))
        choice.finish_reason = end.reason.value
        return _joined(choice.index, pieces, end.reason.value, self._stop_reason(end))

    def _observe_gap(self, choice: _Choice, tokens: int, now: float) -> None:
        if tokens:
            if choice.last_token_s is not None:
                gap_s = (now - choice.last_token_s) / tokens
                for _ in range(tokens):
                    self._state.metrics.token_gap(gap_s)
            choice.last_token_s = now

    def _stop_reason(self, end: ChoiceFinished) -> int | None:
        wanted = self._work.specs[0].sampling.stop_token_ids
        return (
            end.stop_token if end.reason is FinishReason.STOP and end.stop_token in wanted else None
        )


def _joined(
    index: int,
    pieces: Sequence[TextDeltaLike],
    finish_reason: str | None = None,
    stop_reason: str | int | None = None,
) -> Delta:
    return Delta(
        index,
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.tokens),
        tuple(offset for piece in pieces for offset in piece.offsets),
        finish_reason,
        stop_reason,
    )


def _outcome(state: ServerState, work: Work, prompts: Sequence[_Prompt]) -> Outcome:
    output_tokens = sum(choice.output_tokens for prompt in prompts for choice in prompt.choices)
    reasons = tuple(
        choice.finish_reason or "stop" for prompt in prompts for choice in prompt.choices
    )
    metrics = [prompt.stream.metrics for prompt in prompts]
    for prompt, seen, spec in zip(prompts, metrics, work.specs, strict=True):
        state.metrics.request_ended(
            RequestObservation(
                prompt_tokens=len(spec.prompt),
                output_tokens=sum(choice.output_tokens for choice in prompt.choices),
                n=spec.n,
                max_tokens=spec.sampling.max_tokens,
                queue_s=seen.queue_s,
                prefill_s=seen.prefill_s,
                ttft_s=seen.ttft_s,
                total_s=seen.total_s,
                finish_reasons=tuple(choice.finish_reason or "stop" for choice in prompt.choices),
            )
        )
    slowest = max(metrics, key=lambda seen: seen.total_s or 0.0)
    choices = sum(spec.n for spec in work.specs)
    decode_s = None
    if slowest.total_s is not None and slowest.ttft_s is not None:
        decode_s = max(0.0, slowest.total_s - slowest.ttft_s)
    steps = output_tokens / choices - 1
    return Outcome(
        usage=Usage(
            work.prompt_tokens,
            output_tokens,
            work.prompt_tokens + output_tokens,
            PromptTokensDetails(sum(seen.cached_tokens for seen in metrics)),
        ),
        timings=Timings(
            queue_time_ms=_ms(slowest.queue_s),
            time_to_first_token_ms=_ms(slowest.prefill_s),
            generation_time_ms=_ms(decode_s),
            mean_itl_ms=_ms(decode_s / steps) if decode_s is not None and steps > 0 else None,
            total_time_ms=_ms(slowest.total_s),
            batch_size=max(seen.batch_size for seen in metrics),
        ),
        finish_reasons=reasons,
        queue_s=slowest.queue_s,
        ttft_s=slowest.ttft_s,
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
