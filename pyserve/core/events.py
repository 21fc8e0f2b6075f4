"""What a step tells the outside: frozen messages, one list a step, from the scheduler to each request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pyserve.errors import RequestError


class FinishReason(StrEnum):
    """Why a sequence ended well (an error is a :class:`Failed` event instead)."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural, of the raw logits) at one position: the chosen token and the top few."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """First scheduled: it left the waiting line. ``queue_s`` seconds in line."""

    request_id: str
    queue_s: float
    cached_tokens: int


@dataclass(slots=True)
class Token:
    """One sampled token of choice ``index``. ``batch_size`` sequences shared the step.

    Not frozen, only because those take three times as long to make, and these are made between two steps.
    """

    request_id: str
    index: int
    token: int
    logprobs: TokenLogprobs | None
    batch_size: int


@dataclass(frozen=True, slots=True)
class Embedding:
    """The pooled hidden state (last token's, after the final norm), float32, length hidden_size."""

    request_id: str
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """Choice ``index`` is complete. The last token may be a stop token: it was sent as a Token too."""

    request_id: str
    index: int
    reason: FinishReason
    stop_token: int | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """All choices are complete and everything the request held is free again."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended in an error (expired, poison, cancelled); everything it held is free again."""

    request_id: str
    error: RequestError


Event = Started | Token | Embedding | ChoiceFinished | Finished | Failed
