"""The HTTP layer's state from the real engine and tokenizer."""

from __future__ import annotations

from functools import partial

from pyserve.engine.engine import Engine
from pyserve.engine.text import TextAssembler
from pyserve.http.auth import KeyRing
from pyserve.http.state import BuildInfo, ServerState
from pyserve.models.tokenizer import Tokenizer
from pyserve.telemetry.engine import engine_samples, load_snapshot
from pyserve.telemetry.metrics import Metrics


def server_state(
    engine: Engine,
    tokenizer: Tokenizer,
    keys: KeyRing,
    *,
    build: BuildInfo | None = None,
    vllm_metrics: bool = True,
) -> ServerState:
    """The state of a server in front of an open engine."""
    metrics = Metrics(engine.info.name, vllm_aliases=vllm_metrics)
    metrics.add_source(partial(engine_samples, engine))
    return ServerState(
        engine=engine,
        tokenizer=tokenizer,
        assembler=TextAssembler,
        keys=keys,
        metrics=metrics,
        context_length=engine.config.scheduler.max_sequence_tokens,
        snapshot=partial(load_snapshot, engine),
        build=build or BuildInfo(),
    )
