"""A scripted engine, ready-made, and the few things one does with an engine in tests."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from pyserve.backends.base import Backend
from pyserve.backends.scripted import ScriptedBackend
from pyserve.core.config import SchedulerConfig
from pyserve.core.events import ChoiceFinished, Embedding, FinishReason, Started, Token
from pyserve.core.spec import RequestSpec, SamplingParams
from pyserve.engine.engine import Engine, EngineConfig, open_engine
from pyserve.engine.stream import RequestMetrics, RequestStream

_ids = itertools.count()

_SCHEDULING = frozenset(RequestSpec.__dataclass_fields__) - {"sampling", "prompt"}


@asynccontextmanager
async def open_scripted_engine(
    backend: Backend | None = None,
    *,
    driver: Literal["thread", "inline"] = "inline",
    check: bool = True,
    prefix_cache: bool = True,
    **scheduler: Any,
) -> AsyncIterator[Engine]:
    """An engine on a :class:`~pyserve.backends.scripted.ScriptedBackend`, every invariant checked after
    every step. ``scheduler``: fields of :class:`~pyserve.core.config.SchedulerConfig` that differ from small
    defaults (64 blocks of 4 tokens, 8 sequences and 32 tokens a step, no batch window).
    """
    backend = backend or ScriptedBackend()
    small: dict[str, Any] = {
        "num_blocks": 64,
        "block_size": 4,
        "max_batch_tokens": 32,
        "max_batch_requests": 8,
        "context_length": min(128, backend.info.context_length),
        "window_max_s": 0.0,
    }
    config = EngineConfig(
        scheduler=SchedulerConfig(**{**small, **scheduler}),
        prefix_cache=prefix_cache,
        lag_interval_s=None,
        freeze_gc=False,
        check=check,
    )
    async with open_engine(backend, config, driver=driver) as engine:
        yield engine


def make_spec(prompt: Sequence[int] = (1, 2, 3), **fields: Any) -> RequestSpec:
    """A request with a fresh id; ``fields`` of :class:`~pyserve.core.spec.RequestSpec` and of its
    ``SamplingParams`` alike. Greedy, 8 tokens, unless told otherwise.
    """
    scheduling = {name: fields.pop(name) for name in list(fields) if name in _SCHEDULING}
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **fields})
    scheduling.setdefault("request_id", f"request-{next(_ids)}")
    return RequestSpec(prompt=tuple(prompt), sampling=sampling, **scheduling)


@dataclass(slots=True)
class Collected:
    """Everything a request gave: per choice its tokens and why it ended; and all that came with them."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    events: list[Started | Token | Embedding | ChoiceFinished] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def logprobs(self) -> list[float]:
        """Of every token in order of arrival, where they were asked for."""
        return [e.logprobs.logprob for e in self.events if isinstance(e, Token) and e.logprobs]

    @property
    def embedding(self) -> tuple[float, ...] | None:
        """Of an embedding request."""
        return next((e.values for e in self.events if isinstance(e, Embedding)), None)


async def drain_stream(stream: RequestStream) -> Collected:
    """Receives until the request is complete; raises its error where it fails."""
    collected = Collected()
    async for events in stream:
        collected.events += events
        for event in events:
            match event:
                case Token():
                    collected.tokens.setdefault(event.index, []).append(event.token)
                case ChoiceFinished():
                    collected.reasons[event.index] = event.reason
                case _:
                    pass
    collected.metrics = stream.metrics
    return collected


async def collect(engine: Engine, spec: RequestSpec) -> Collected:
    """Runs one request to its end; raises its error where it fails."""
    async with engine.request(spec) as stream:
        return await drain_stream(stream)
