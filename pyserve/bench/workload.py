"""What is asked: prompts of real English, cut to exact token counts, and when each is sent."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Span:
    """Whole numbers drawn uniformly from ``[low, high]``."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Span:
        """``N`` or ``LOW:HIGH``; raises ValueError."""
        low, _, high = text.partition(":")
        span = cls(int(low), int(high or low))
        if not 1 <= span.low <= span.high:
            raise ValueError(f"expected 1 <= LOW <= HIGH, not {text!r}")
        return span

    def draw(self, source: random.Random) -> int:
        """One number."""
        return source.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


@dataclass(frozen=True, slots=True)
class Work:
    """One request: prompt token ids, and how many tokens to generate.

    ``group`` is reported apart; ``api_key`` replaces the run's; ``fields`` are more of the body. After
    ``leave_after`` pieces of content (None: never) the client reads nothing for ``stall_s`` and closes.
    """

    prompt: tuple[int, ...]
    output_tokens: int
    group: str = ""
    api_key: str | None = None
    fields: Mapping[str, object] = field(default_factory=dict)
    leave_after: int | None = None
    stall_s: float = 0.0


def english() -> str:
    """Some 400 kB of English that every CPython carries: the prose of its own language reference."""
    from pydoc_data.topics import topics

    return " ".join(" ".join(topics[name].split()) for name in sorted(topics))


def random_work(
    tokens: Sequence[int], count: int, prompt_tokens: Span, output_tokens: Span, seed: int
) -> list[Work]:
    """``count`` requests whose prompts are windows of ``tokens`` at random places.

    The same arguments give the same work. Raises ValueError where the text is shorter than a prompt.
    """
    if len(tokens) <= prompt_tokens.high:
        raise ValueError(f"the text has {len(tokens)} tokens, a prompt {prompt_tokens.high}")
    source = random.Random(seed)  # noqa: S311 (a workload, not a secret)
    work = []
    for _ in range(count):
        length = prompt_tokens.draw(source)
        start = source.randrange(len(tokens) - length)
        work.append(Work(tuple(tokens[start : start + length]), output_tokens.draw(source)))
    return work


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Seconds from the start at which each request arrives; all 0 for an infinite ``rate`` (requests/s).

    Gaps are gamma distributed with shape ``burstiness``: 1 is a Poisson process, less comes in bursts.
    """
    source = random.Random(seed + 1)  # noqa: S311
    now = 0.0
    for _ in range(count):
        yield now
        if rate != float("inf"):
            now += source.gammavariate(burstiness, 1.0 / (rate * burstiness))
