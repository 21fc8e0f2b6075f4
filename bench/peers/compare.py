"""Ours against other servers, in turns: A B A B, same weights, prompts, lengths and threads.

``python bench/peers/compare.py --ours Q4_1 --peer llama:Q4_0 --peer openvino:int8 --load 1x8,16x48``: see
the README beside this file. Each round starts every side in turn, runs every load on it, and stops it. Runs
have prompts of their own, so no prefix cache helps. Ratios are of medians over the rounds.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import trio
from contenders import Contender, Setting, contender, version_of
from process import MachineTime, Running, ServerFailed, running
from results import QUIET_SHARE, load_table, others_share, record_of, summary_of
from rich.console import Console
from weights import DEFAULT_DIRECTORY, SHIPPED, weights_path

from pyserve.bench.load import LoadResult, Pace, Target, drive
from pyserve.bench.report import Description, report
from pyserve.bench.workload import Span, Work, english, random_work
from pyserve.models.load import open_checkpoint

RESULTS = Path(__file__).parents[1] / "results"
ENVIRONMENTS = Path("~/.cache/pyserve/peer-envs").expanduser()
DEFAULT_LOADS = "1x8,16x48,64x128,ttft512"
PROMPT_TOKENS, OUTPUT_TOKENS = Span(16, 512), Span(16, 256)


@dataclass(frozen=True)
class Load:
    """``CLIENTSxREQUESTS`` of the standard lengths, or ``ttftN``: one client, prompts of N tokens."""

    name: str
    clients: int
    requests: int
    prompt_tokens: Span = PROMPT_TOKENS
    output_tokens: Span = OUTPUT_TOKENS

    @classmethod
    def parse(cls, text: str) -> Load:
        """Raises ValueError."""
        if text.startswith("ttft"):
            return cls(text, 1, 8, Span.parse(text.removeprefix("ttft")), Span(16, 16))
        clients, _, requests = text.partition("x")
        load = cls(text, int(clients), int(requests))
        if not 1 <= load.clients <= load.requests:
            raise ValueError(f"expected CLIENTSxREQUESTS or ttftN, not {text!r}")
        return load

    def scaled(self, scale: float) -> Load:
        """With fewer requests, but never fewer than clients."""
        return replace(self, requests=max(self.clients, round(self.requests * scale)))


@dataclass(frozen=True)
class Plan:
    """What is run, and how."""

    sides: Sequence[str]
    loads: Sequence[Load]
    rounds: int
    seed: int
    limit_s: float
    tokens: Sequence[int]
    setting: Setting
    ours_options: str


def run_all(plan: Plan, logs: Path, told: Callable[[str], None]) -> list[dict[str, Any]]:
    """Every record, in the order of the runs; a side that fails gives a record with ``error``."""
    records: list[dict[str, Any]] = []
    for number in range(plan.rounds):
        for side in plan.sides:
            options = plan.ours_options if ":" not in side else ""
            for loads in _batches(contender(side, plan.setting, options), plan.loads):
                setting = replace(plan.setting, slots=max(load.clients for load in loads))
                built = contender(side, setting, options)
                log = logs / f"{number}-{side.replace(':', '-')}-{loads[0].name}.log"
                for record in _one_start(built, plan, loads, number, log):
                    records.append(record)
                    told(_line(record))
    return records


def _batches(side: Contender, loads: Sequence[Load]) -> list[Sequence[Load]]:
    return [[load] for load in loads] if side.fresh_per_load else [loads]


def _one_start(
    side: Contender, plan: Plan, loads: Sequence[Load], number: int, log: Path
) -> list[dict[str, Any]]:
    """Start one side once and run ``loads`` on it."""
    records: list[dict[str, Any]] = []
    head = {"round": number, "side": side.name}
    try:
        with running(side, plan.setting.port, log) as server:
            server.settle()
            for load in loads:
                seed = plan.seed + 1000 * number + 10 * plan.loads.index(load)
                figures = _measure(side, server, plan, load, seed)
                records.append(head | {"load": load.name} | figures)
    except (ServerFailed, OSError) as error:
        records += [
            head | {"load": load.name, "error": str(error)} for load in loads[len(records) :]
        ]
    return records


def _measure(side: Contender, server: Running, plan: Plan, load: Load, seed: int) -> dict[str, Any]:
    # The same seed for all sides of a round: the same prompts. The warm-up's are others.
    work = random_work(plan.tokens, load.requests, load.prompt_tokens, load.output_tokens, seed)
    warmup = random_work(plan.tokens, load.clients, load.prompt_tokens, Span(8, 8), seed + 5)
    target = Target(
        server.url + "/v1/completions", side.served, {}, {"temperature": 0.0, "ignore_eos": True}
    )
    pace = Pace(load.clients, limit_s=plan.limit_s)

    async def both() -> tuple[LoadResult, dict[str, float]]:
        await drive(target, warmup, pace, lambda _: None)
        machine, served_s, client_s = MachineTime.now(), server.cpu_s(), time.process_time()
        started = time.monotonic()
        result = await drive(target, work, pace, lambda _: None)
        wall = (time.monotonic() - started) * (os.cpu_count() or 1)
        now = MachineTime.now()
        client, mine = time.process_time() - client_s, server.cpu_s() - served_s
        shares = {
            "foreign_cpu_share": max(0.0, now.busy - machine.busy - mine - client) / wall,
            "stolen_cpu_share": (now.stolen - machine.stolen) / wall,
            "server_cpu_share": mine / wall,
        }
        return result, shares

    result, shares = trio.run(both)
    about = Description("", side.served, side.served)
    return (
        record_of(report(result, pace, about))
        | shares
        | {
            "ready_s": server.ready_s,
            "peak_rss_mib": server.peak_rss_mib(),
            "wrong_lengths": _wrong_lengths(work, result),
            "seed": seed,
            "errors": sorted({outcome.error for outcome in result.outcomes if outcome.error})[:3],
        }
    )


def _wrong_lengths(work: Sequence[Work], result: LoadResult) -> int:
    return sum(
        (outcome.prompt_tokens, outcome.output_tokens) != (len(item.prompt), item.output_tokens)
        for item, outcome in zip(work, result.outcomes, strict=True)
        if outcome.ok
    )


def _line(record: dict[str, Any]) -> str:
    head = f"round {record['round']} {record['side']:<16} {record['load']:<9}"
    if "error" in record:
        return f"{head} FAILED: {record['error']}"
    text = (
        f"{head} {record['output_throughput']:7.1f} tok/s  itl p50 {record['median_itl_ms']:6.1f} "
        f"max {record['pyserve_max_itl_ms']:7.0f}  ttft p50 {record['median_ttft_ms']:7.1f} ms  "
        f"{record['completed']} in {record['duration']:.1f} s"
    )
    if others_share(record) > QUIET_SHARE:
        text += f"  [others {others_share(record):.1%}]"
    if record["wrong_lengths"] or record["errors"]:
        text += f"  [{record['wrong_lengths']} wrong lengths; {record['errors']}]"
    return text


def _machine() -> dict[str, Any]:
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="ascii").splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {"cpu": model, "cores": os.cpu_count(), "kernel": platform.release()}


def _sides(ours: Sequence[str], peers: Sequence[str]) -> list[str]:
    for name in ours:
        if ":" in name:
            raise click.BadParameter(
                f"expected weights such as Q4_1, not {name!r}", param_hint="--ours"
            )
    for name in peers:
        if ":" not in name:
            raise click.BadParameter(f"expected PEER:WEIGHTS, not {name!r}", param_hint="--peer")
    return [*ours, *peers]


@click.command(context_settings={"show_default": True})
@click.option(
    "--ours", multiple=True, default=["Q4_1"], help="Weights that ours serves; repeatable."
)
@click.option(
    "--ours-options", default="", help='More for "pyserve serve", such as "--kv-dtype int8".'
)
@click.option("--peer", "peers", multiple=True, metavar="PEER:WEIGHTS", help="Repeatable.")
@click.option(
    "--load", "loads", default=DEFAULT_LOADS, help="CLIENTSxREQUESTS or ttftN, by commas."
)
@click.option("--rounds", type=click.IntRange(1), default=2)
@click.option("--scale", type=click.FloatRange(0, min_open=True), default=1.0, help="Of requests.")
@click.option("--seed", type=int, help="Default: from the clock.")
@click.option("--limit-s", type=float, default=600.0, help="One run longer than this is given up.")
@click.option("--threads", type=click.IntRange(1), default=os.cpu_count())
@click.option("--port", type=int, default=8765)
@click.option("--weights", type=click.Path(path_type=Path), default=DEFAULT_DIRECTORY)
@click.option(
    "--environments", type=click.Path(path_type=Path), default=ENVIRONMENTS,
    help="Directory with the peers' environments: llama, vllm, openvino.",
)  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), help="JSON; default: in bench/results.")
def main(
    ours: tuple[str, ...],
    ours_options: str,
    peers: tuple[str, ...],
    loads: str,
    rounds: int,
    scale: float,
    seed: int | None,
    limit_s: float,
    threads: int,
    port: int,
    weights: Path,
    environments: Path,
    out: Path | None,
) -> None:
    """Compare servers in turns and print ratios."""
    console = Console(width=150)
    sides = _sides(ours, peers)
    try:
        parsed = [Load.parse(text).scaled(scale) for text in loads.split(",")]
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--load") from error
    setting = Setting(weights, environments, threads, port, max(load.clients for load in parsed))
    try:
        versions = {side: version_of(contender(side, setting)) for side in sides}
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    seed = int(time.time()) * 10_000 % 2**31 if seed is None else seed
    tokenizer = open_checkpoint(str(weights_path(weights, SHIPPED))).tokenizer
    tokens = tokenizer.encode(english(), add_special_tokens=False)
    plan = Plan(sides, parsed, rounds, seed, limit_s, tokens, setting, ours_options)
    logs = Path(tempfile.mkdtemp(prefix="pyserve-peers-"))
    console.print(f"logs in {logs}", highlight=False)
    records = run_all(plan, logs, lambda text: console.print(text, markup=False, highlight=False))
    date = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    summary = summary_of(records)
    for load in parsed:
        console.print(load_table(load.name, summary))
    result = {
        "date": date,
        "machine": _machine(),
        "threads": threads,
        "scale": scale,
        "seed": seed,
        "ours_options": ours_options,
        "versions": versions,
        "summary": summary,
        "records": records,
    }
    target = out or RESULTS / f"{date}-peers.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    console.print(f"written to {target}", highlight=False)


if __name__ == "__main__":
    main()
