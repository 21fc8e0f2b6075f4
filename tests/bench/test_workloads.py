"""What is asked in each workload, and how its outcomes are told apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pyserve.bench.load import LoadResult, Pace, drive
from pyserve.bench.report import Description, fate, report
from pyserve.bench.stream import Outcome
from pyserve.bench.workload import Span, Work, random_work
from pyserve.bench.workloads import (
    LEAVES,
    POISON,
    custom,
    prefix_repetition,
    sharegpt,
    with_deadlines,
    with_leavers,
    with_poison,
    with_tenants,
)
from tests.bench.test_load import OK, USAGE, Server, events, serving, text

TOKENS = range(10_000)
WORK = random_work(TOKENS, 200, Span(4, 8), Span(2, 20), seed=5)


def letters(value: str) -> list[int]:
    return [ord(c) for c in value]


def test_prefixes_repeat_and_ends_do_not() -> None:
    work = prefix_repetition(TOKENS, 12, 3, 32, Span(4, 8), Span(5, 5), seed=1)
    beginnings = [item.prompt[:32] for item in work]
    assert beginnings[:3] * 4 == beginnings
    assert len(set(beginnings)) == 3
    assert len({item.prompt[32:] for item in work}) == 12
    assert {len(item.prompt) - 32 for item in work} <= set(range(4, 9))
    assert work == prefix_repetition(TOKENS, 12, 3, 32, Span(4, 8), Span(5, 5), seed=1)


def test_sharegpt_asks_the_first_question_for_as_much_as_the_answer(tmp_path: Path) -> None:
    path = tmp_path / "dataset.json"
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    path.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}]))
    assert sharegpt(path, letters, 2, seed=0) == [Work((104, 105), 5)] * 2
    path.write_text(json.dumps([{"conversations": turns[:1]}]))
    with pytest.raises(ValueError, match="no conversation of two turns"):
        sharegpt(path, letters, 1, seed=0)
    path.write_text("{}{")
    with pytest.raises(ValueError, match="ShareGPT"):
        sharegpt(path, letters, 1, seed=0)


def test_custom_takes_text_and_token_ids_and_names_a_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "work.jsonl"
    path.write_text('{"prompt": "a", "output_tokens": 3}\n\n{"prompt": [7, 8]}\n')
    work = custom(path, letters, 3, Span(9, 9), seed=0)
    assert work == [Work((97,), 3), Work((7, 8), 9), Work((97,), 3)]
    path.write_text('{"prompt": "a"}\n{"prompt": ""}\n')
    with pytest.raises(ValueError, match="line 2"):
        custom(path, letters, 2, Span(9, 9), seed=0)


def test_tenants_get_their_numbers_of_each_round() -> None:
    work = with_tenants(WORK, [("sk-flood", 3), ("sk-polite", 1)])
    assert [item.api_key for item in work[:5]] == ["sk-flood"] * 3 + ["sk-polite", "sk-flood"]
    assert {item.group for item in work} == {"...lood", "...lite"}


def test_deadlines_lie_in_their_span() -> None:
    limits = {item.fields["timeout_ms"] for item in with_deadlines(WORK, Span(100, 900), 0)}
    assert min(limits) >= 100
    assert max(limits) <= 900
    assert len(limits) > 50


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_that_share_misbehaves(share: float) -> None:
    leavers = [item for item in with_leavers(WORK, share, 0, stall_s=2.0) if item.group == LEAVES]
    poisoned = [item for item in with_poison(WORK, share, 0) if item.group == POISON]
    for chosen in (leavers, poisoned):
        assert abs(len(chosen) / len(WORK) - share) < 0.1
    assert all(1 <= item.leave_after <= item.output_tokens for item in leavers)
    assert all(item.stall_s == 2.0 for item in leavers)
    assert all(item.fields for item in poisoned)


async def test_client_leaves_in_mid_answer_on_purpose() -> None:
    server = Server([OK, *events(text("a"), text("b"), text("c"), USAGE), "data: [DONE]\n\n"])
    leaver = Work((1, 2, 3), 3, group=LEAVES, leave_after=2)
    async with serving(server) as target:
        result = await drive(target, [leaver], Pace(1), lambda _: None)
    outcome = result.outcomes[0]
    assert (outcome.left, outcome.ok, outcome.text, fate(outcome)) == (True, False, "ab", "left")


async def test_work_brings_its_own_key_and_fields() -> None:
    server = Server([OK, *events(text("a"), USAGE), "data: [DONE]\n\n"])
    work = [Work((1,), 2, api_key="sk-mine", fields={"timeout_ms": 77}), Work((1,), 2)]
    async with serving(server) as target:
        await drive(target, work, Pace(1), lambda _: None)
    first, second = server.requests
    assert b"Bearer sk-mine" in first
    assert b'"timeout_ms":77' in first
    assert b"Bearer k\r\n" in second


def test_groups_are_reported_apart() -> None:
    def outcome(group: str, **fields: object) -> Outcome:
        return Outcome(3, ttft_s=0.1, latency_s=0.3, output_tokens=4, group=group, **fields)

    outcomes = [
        outcome("good"),
        outcome("good"),
        outcome(POISON, error="temperature", status=400),
        outcome(POISON, error="oops", status=500),
    ]
    result = LoadResult(outcomes, 1.0, 0.1, None)
    figures = report(result, Pace(1), Description("", "m", "m"))
    assert (figures["pyserve_refused"], figures["failed"], figures["completed"]) == (1, 1, 2)
    groups = figures["pyserve_groups"]
    assert groups["good"] | {"completed": 2, "output_share": 1.0} == groups["good"]
    assert groups[POISON] | {"refused": 1, "failed": 1, "output_tokens": 0} == groups[POISON]
    assert groups["good"]["median_ttft_ms"] == pytest.approx(100)
