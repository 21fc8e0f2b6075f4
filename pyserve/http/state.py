"""What every endpoint shares: the engine, the tokenizer, keys, metrics, and whether we are closing."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import trio

from pyserve.http.auth import KeyRing
from pyserve.http.interfaces import Assembler, AssemblerFactory, EngineLike, TokenizerLike
from pyserve.telemetry.metrics import Metrics

__all__ = ["Assembler", "ServerState"]


@dataclass(slots=True, eq=False)
class ServerState:
    """Made once by whoever composes the server. ``shutdown`` is set to ask for a graceful end."""

    engine: EngineLike
    tokenizer: TokenizerLike
    assembler: AssemblerFactory
    keys: KeyRing
    metrics: Metrics
    shutdown: trio.Event = field(default_factory=trio.Event)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model(self) -> str:
        """The name that clients know the model by."""
        return self.engine.info.name
