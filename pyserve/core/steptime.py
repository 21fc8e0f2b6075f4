"""How long a step takes: a linear model, fitted online, of what is in it.

    seconds = base + a * prefill tokens + b * decode sequences + c * attended tokens

where attended tokens are the pairs of a new token and one that it attends to. Coefficients are never
negative, old steps fade, and a step that took far longer than expected (a page fault, a busy neighbour)
counts for no more than twice what was expected. Beside it, the speeds that admission reckons with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

TERMS = 4
FADE = 0.99  # a step's weight falls by 1 % with every further step
OUTLIER = 2.0
FIT_ON_ASKING = 4  # steps since the last fit
TRUST_AFTER = 8  # steps before outliers are cut
REFIT_EVERY = 32  # steps at most, without anybody asking
# Before anything is measured: slow enough that the first long prompt cannot hold up the others for long.
PRIOR = (5e-3, 1e-3, 5e-4, 1e-7)


@dataclass(frozen=True, slots=True)
class StepTimeStatistics:
    """Seconds for each term, and the speeds of busy time (0: not measured yet).

    ``prefill_tokens_per_s`` is over steps with prefill in them, ``output_tokens_per_s`` over steps that
    decode.
    """

    base_s: float
    prefill_token_s: float
    decode_sequence_s: float
    attended_token_s: float
    steps: int
    prefill_tokens_per_s: float
    output_tokens_per_s: float

    def prompt_token_s(self, decode_sequences: int, max_prefill_s: float) -> float:
        """Seconds for one more prompt token beside ``decode_sequences``; 0 while nothing is measured.

        While anyone decodes, prefill gets no more than ``max_prefill_s`` of each step, and the rest of it is
        on top. Not from the measured speed: that of a few short prompts says nothing about a long one.
        """
        if not self.steps:
            return 0.0
        share = 1.0
        if decode_sequences:
            share += (self.base_s + decode_sequences * self.decode_sequence_s) / max_prefill_s
        return self.prefill_token_s * share


class Speed:
    """An amount per second of busy time, over the last hundred steps or so."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """One step more."""
        self._amount = self._amount * FADE + amount
        self._seconds = self._seconds * FADE + seconds

    @property
    def per_s(self) -> float:
        """0 where nothing has been measured."""
        return self._amount / self._seconds if self._seconds > 0 else 0.0


class StepTime:
    """Fits with every step observed; predicts, and says how much prefill fits a time."""

    def __init__(self) -> None:
        self._coefficients = list(PRIOR)
        # Faded sums of x x^T and x y over the steps.
        self._gram = [[0.0] * TERMS for _ in range(TERMS)]
        self._moment = [0.0] * TERMS
        self._steps = 0
        self._unfitted = 0

    @property
    def coefficients(self) -> Sequence[float]:
        """Seconds: base, prefill token, decode sequence, attended token."""
        if self._unfitted >= FIT_ON_ASKING:
            self._fit()
        return self._coefficients

    @property
    def steps(self) -> int:
        """How many have been observed."""
        return self._steps

    def observe(
        self, prefill_tokens: int, decode_sequences: int, attended_tokens: int, seconds: float
    ) -> None:
        """A step of that content took ``seconds``."""
        if not (seconds >= 0 and math.isfinite(seconds)):
            raise ValueError(f"a step cannot take {seconds} seconds")
        x = (1.0, float(prefill_tokens), float(decode_sequences), float(attended_tokens))
        if self._steps >= TRUST_AFTER:
            expected = sum(c * value for c, value in zip(self._coefficients, x, strict=True))
            seconds = min(seconds, OUTLIER * expected)
        self._steps += 1
        self._unfitted += 1
        for i, row in enumerate(self._gram):
            xi = x[i]
            for j in range(TERMS):
                row[j] = row[j] * FADE + xi * x[j]
            self._moment[i] = self._moment[i] * FADE + xi * seconds
        if self._steps <= TRUST_AFTER or self._unfitted >= REFIT_EVERY:
            self._fit()

    def predict(self, prefill_tokens: int, decode_sequences: int, attended_tokens: int) -> float:
        """Seconds that a step of that content takes."""
        x = (1.0, prefill_tokens, decode_sequences, attended_tokens)
        return sum(c * value for c, value in zip(self.coefficients, x, strict=True))

    def prefill_within(self, seconds: float, context: int) -> float:
        """How many prefill tokens at once, of a sequence with ``context`` computed ones, add ``seconds``.

        ``inf`` where the model knows of no cost.
        """
        # n tokens attend to n * context + n * n / 2: solve c/2 n^2 + (a + c context) n = seconds.
        _, prefill, _, attended = self.coefficients
        quadratic = attended / 2
        linear = prefill + attended * context
        if quadratic > 0:
            root = math.sqrt(linear * linear + 4 * quadratic * seconds)
            return 2 * seconds / (linear + root)
        return seconds / linear if linear > 0 else math.inf

    def _fit(self) -> None:
        """Non-negative least squares by coordinate descent, with a slight pull towards the last fit.

        The pull keeps apart what the steps so far do not tell apart. Each term is in units of its own mean
        square, so that it is equally slight for all.
        """
        self._unfitted = 0
        previous = list(self._coefficients)
        for _ in range(24):
            for i, row in enumerate(self._gram):
                if row[i] <= 0:
                    continue
                pull = 1e-3 * row[i]
                others = sum(row[j] * self._coefficients[j] for j in range(TERMS) if j != i)
                best = (self._moment[i] - others + pull * previous[i]) / (row[i] + pull)
                self._coefficients[i] = max(best, 0.0)
