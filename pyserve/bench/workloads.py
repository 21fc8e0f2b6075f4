"""The workloads of ``pyserve bench serve`` beside plain random prompts: recorded ones, and hostile ones.

Each takes or gives a list of :class:`~pyserve.bench.workload.Work`; the same seed gives the same work.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pyserve.bench.workload import Span, Work

POISON = "poison"
LEAVES = "leaves"
STAYS = "stays"

Tokenize = Callable[[str], list[int]]


def prefix_repetition(
    tokens: Sequence[int],
    count: int,
    prefixes: int,
    prefix_tokens: int,
    suffix_tokens: Span,
    output_tokens: Span,
    seed: int,
) -> list[Work]:
    """``count`` prompts, each one of ``prefixes`` beginnings in turn and an end of its own."""
    longest = max(prefix_tokens, suffix_tokens.high)
    if len(tokens) <= longest:
        raise ValueError(f"the text has {len(tokens)} tokens, a prompt's part {longest}")
    source = random.Random(seed)  # noqa: S311 (a workload, not a secret)

    def window(length: int) -> tuple[int, ...]:
        start = source.randrange(len(tokens) - length)
        return tuple(tokens[start : start + length])

    beginnings = [window(prefix_tokens) for _ in range(prefixes)]
    return [
        Work(
            beginnings[i % prefixes] + window(suffix_tokens.draw(source)),
            output_tokens.draw(source),
        )
        for i in range(count)
    ]


def sharegpt(path: Path, tokenize: Tokenize, count: int, seed: int) -> list[Work]:
    """First question and answer of ``count`` conversations: the answer's length is what is generated.

    The file is a JSON list of ``{"conversations": [{"from": ..., "value": ...}, ...]}``. Raises ValueError
    where it is not, or has no conversation of two turns.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        turns = [row["conversations"] for row in rows]
        pairs = [(turn[0]["value"], turn[1]["value"]) for turn in turns if len(turn) >= 2]
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not in ShareGPT's format: {error!r}") from error
    pairs = [(question, answer) for question, answer in pairs if question and answer]
    if not pairs:
        raise ValueError(f"{path} has no conversation of two turns")
    source = random.Random(seed)  # noqa: S311
    source.shuffle(pairs)
    chosen = [pairs[i % len(pairs)] for i in range(count)]
    return [
        Work(tuple(tokenize(question)), max(1, len(tokenize(answer))))
        for question, answer in chosen
    ]


def custom(
    path: Path, tokenize: Tokenize, count: int, output_tokens: Span, seed: int
) -> list[Work]:
    """``count`` lines of a JSONL file, in order and again from the start when they run out.

    A line is ``{"prompt": text or token ids, "output_tokens": n}``; without the latter ``output_tokens`` is
    drawn from. Raises ValueError naming the line.
    """
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path} is empty")
    source = random.Random(seed)  # noqa: S311
    work = []
    for i in range(count):
        number = i % len(lines)
        try:
            row = json.loads(lines[number])
            prompt = row["prompt"]
            ids = tokenize(prompt) if isinstance(prompt, str) else [int(id_) for id_ in prompt]
            wanted = int(row.get("output_tokens", 0)) or output_tokens.draw(source)
            if not ids or wanted < 1:
                raise ValueError("an empty prompt, or output_tokens below 1")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: line {number + 1}: {error!r}") from error
        work.append(Work(tuple(ids), wanted))
    return work


def with_tenants(work: Sequence[Work], tenants: Sequence[tuple[str, int]]) -> list[Work]:
    """The work dealt out to API keys: of each round, as many requests as a key's number says.

    A key that floods has a great number, a polite one a small one. Groups are named after the keys' last
    four characters.
    """
    deal = [key for key, number in tenants for _ in range(number)]
    return [
        replace(item, api_key=deal[i % len(deal)], group=f"...{deal[i % len(deal)][-4:]}")
        for i, item in enumerate(work)
    ]


def with_deadlines(work: Sequence[Work], timeout_ms: Span, seed: int) -> list[Work]:
    """The work with a ``timeout_ms`` each, drawn uniformly."""
    source = random.Random(seed + 2)  # noqa: S311
    return [
        replace(item, fields={**item.fields, "timeout_ms": timeout_ms.draw(source)})
        for item in work
    ]


def with_leavers(
    work: Sequence[Work], share: float, seed: int, *, stall_s: float = 0.0
) -> list[Work]:
    """A ``share`` of the clients goes away in mid-answer, after not having read for ``stall_s``."""
    source = random.Random(seed + 3)  # noqa: S311
    return [
        replace(
            item,
            group=LEAVES,
            leave_after=source.randint(1, max(1, item.output_tokens // 2)),
            stall_s=stall_s,
        )
        if source.random() < share
        else replace(item, group=STAYS)
        for item in work
    ]


_BAD: tuple[dict[str, object], ...] = (
    {"temperature": -1},
    {"max_tokens": -5},
    {"top_p": "much"},
    {"prompt": [-1]},
    {"stop": 7},
    {"n": 0},
)


def with_poison(work: Sequence[Work], share: float, seed: int) -> list[Work]:
    """A ``share`` of the requests is bad, each in one of several ways; the server should answer 400."""
    source = random.Random(seed + 4)  # noqa: S311
    return [
        replace(item, group=POISON, fields={**item.fields, **source.choice(_BAD)})
        if source.random() < share
        else replace(item, group="good")
        for item in work
    ]
