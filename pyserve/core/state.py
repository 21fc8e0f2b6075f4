"""Every change of a sequence's state, in one table; there is no other place that changes it.

A sequence is one choice of a request: its prompt and what has been sampled after it. ``WAITING`` means in
line (perhaps with KV blocks left over from before a preemption), ``PREFILL`` running with more than its
last token to compute, ``DECODE`` running with just that. The four last ones are final: nothing is held.
"""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType


class State(StrEnum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"
    EXPIRED = "expired"

    @property
    def running(self) -> bool:
        """In the running batch."""
        return self is State.PREFILL or self is State.DECODE

    @property
    def final(self) -> bool:
        """Over, and everything it held is free."""
        return not TRANSITIONS[self]


class Signal(StrEnum):
    """What can happen to a sequence, always at a step boundary."""

    ADMIT = "admit"  # chosen from the line for the first time, or again
    PREFILLED = "prefilled"  # its first token, or the first after a preemption, was sampled
    PREEMPT = "preempt"  # lost blocks to a better-ranked sequence
    FINISH = "finish"  # a stop token, a stop string, its length; an embedding's only step
    CANCEL = "cancel"
    FAIL = "fail"
    EXPIRE = "expire"


class IllegalTransition(RuntimeError):
    """A bug: this cannot happen to a sequence in that state."""


_ENDS = {
    Signal.FINISH: State.FINISHED,
    Signal.CANCEL: State.CANCELLED,
    Signal.FAIL: State.FAILED,
    Signal.EXPIRE: State.EXPIRED,
}
TRANSITIONS = MappingProxyType(
    {
        State.WAITING: {Signal.ADMIT: State.PREFILL, **_ENDS},
        State.PREFILL: {Signal.PREFILLED: State.DECODE, Signal.PREEMPT: State.WAITING, **_ENDS},
        State.DECODE: {Signal.PREEMPT: State.WAITING, **_ENDS},
        State.FINISHED: {},
        State.CANCELLED: {},
        State.FAILED: {},
        State.EXPIRED: {},
    }
)


def next_state(state: State, signal: Signal) -> State:
    """The state after ``signal``. Raises :class:`IllegalTransition` where the table has none."""
    try:
        return TRANSITIONS[state][signal]
    except KeyError:
        raise IllegalTransition(f"{signal} cannot happen to a {state} sequence") from None
