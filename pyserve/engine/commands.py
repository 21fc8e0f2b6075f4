"""What the Trio side tells the step loop: small frozen messages, applied at the next step boundary."""

from __future__ import annotations

from dataclasses import dataclass

from pyserve.core.events import Event
from pyserve.core.spec import RequestSpec
from pyserve.errors import RequestError


@dataclass(frozen=True, slots=True)
class Submit:
    """A new request, admitted already. ``arrival_s`` is when it was opened, on the engine's clock."""

    spec: RequestSpec
    arrival_s: float


@dataclass(frozen=True, slots=True)
class Cancel:
    """Release this request at the next boundary; ``error`` is what its stream is told (None: Cancelled)."""

    request_id: str
    error: RequestError | None = None


@dataclass(frozen=True, slots=True)
class StopChoice:
    """Choice ``index`` has met a stop string: it finishes with reason "stop" at the next boundary."""

    request_id: str
    index: int


Command = Submit | Cancel | StopChoice


@dataclass(frozen=True, slots=True)
class Handover:
    """Everything that one step boundary tells the Trio side. ``at_s`` on the engine's clock."""

    at_s: float
    events: tuple[Event, ...]
