"""How much prefill a step may hold beside those who decode, so that their tokens keep coming.

Prompts of ordinary length share up to ``max_prefill_s`` of each step. A *long* prompt, one that would fill
several such steps by itself, is taken in at a walk instead: in each step it adds less than what the step
takes without it, so that nobody's gap between two tokens grows beyond twice the usual one for as long as it
lasts. It gets nearly half of the time that way, and shorter prompts pass it by.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from pyserve.core.config import SchedulerConfig
from pyserve.core.sequence import Sequence
from pyserve.core.steptime import StepTime

LONG_STEPS = 5.0
"""A prompt is long that takes so many times ``max_prefill_s``."""
WALK = 0.7
"""What long prompts may add to a step, as a share of the step without them; the rest is for misjudging it."""


@dataclass(slots=True)
class Room:
    """Prefill tokens that are left in a step: ``left`` in all, ``walk`` of them for prompts longer than
    ``long``. ``tokens`` is what there was.
    """

    tokens: int
    walk: int = 0
    long: float = float("inf")
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.tokens

    def take(self, remaining: int, length: int, least: int = 0) -> int:
        """Takes tokens for a sequence with ``remaining`` to compute, ``length`` when it was admitted."""
        tokens = min(remaining, max(self.left, 0))
        if length > self.long:
            tokens = min(tokens, max(self.walk, least))
            self.walk -= tokens
        self.left -= tokens
        return tokens


class PrefillPace:
    """Judges by the step-time model."""

    def __init__(self, config: SchedulerConfig, steptime: StepTime) -> None:
        self._config = config
        self._steptime = steptime

    def room(self, running: Tokens[Sequence], remaining: Tokens[int], most: int) -> Room:
        """For a step in which some of ``running`` decode, and at most ``most`` tokens are prefill.

        Reckoned for the longest contexts that are prefilling: the dearest tokens. At least a block in all,
        and one token of a long prompt.
        """
        config, steptime = self._config, self._steptime
        long = steptime.prefill_within(LONG_STEPS * config.max_prefill_s, 0)
        context = walk_context = decoding = attended = 0
        for sequence, tokens in zip(running, remaining, strict=True):
            if tokens == 1:
                decoding += 1
                attended += sequence.length
            elif sequence.admitted_tokens > long:
                walk_context = max(walk_context, sequence.computed)
            else:
                context = max(context, sequence.computed)
        usual_s = steptime.predict(0, decoding, attended)
        budget = steptime.prefill_within(config.max_prefill_s, context)
        walk = steptime.prefill_within(WALK * usual_s, walk_context)
        return Room(
            tokens=int(min(max(budget, config.block_size), most)),
            walk=int(min(max(walk, 1), most)),
            long=long,
        )
