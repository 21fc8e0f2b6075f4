"""What every endpoint shares: the engine, the tokenizer, keys, metrics, and whether we are closing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from pyserve.http.auth import KeyRing
from pyserve.http.interfaces import AssemblerFactory, EngineLike, TokenizerLike
from pyserve.telemetry.load import LoadSnapshot
from pyserve.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class BuildInfo:
    """What this server was built for: the kernels' ISA in use, CUDA or not, torch's version."""

    isa: str = "unknown"
    cuda: bool = False
    torch: str = "unknown"


@dataclass(slots=True, eq=False)
class ServerState:
    """Made once by whoever composes the server. ``shutdown`` is set to ask for a graceful end.

    ``context_length``: the most tokens, prompt and output, that one sequence may have here; less than the
    model's own where the KV cache holds less.
    """

    engine: EngineLike
    tokenizer: TokenizerLike
    assembler: AssemblerFactory
    keys: KeyRing
    metrics: Metrics
    context_length: int
    snapshot: Callable[[], LoadSnapshot]
    build: BuildInfo = field(default_factory=BuildInfo)
    shutdown: trio.Event = field(default_factory=trio.Event)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model(self) -> str:
        """The name that clients know the model by."""
        return self.engine.info.name
