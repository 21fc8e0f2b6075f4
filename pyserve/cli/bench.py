"""``pyserve bench``: measure a running server, ours or any other that speaks OpenAI's completions."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import trio
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pyserve.bench.compare import comparison, load_results, pace_of, plot
from pyserve.bench.load import LoadResult, Pace, Target, drive
from pyserve.bench.report import PERCENTILES, Description, report
from pyserve.bench.stream import Outcome
from pyserve.bench.workload import Work, english
from pyserve.bench.workloads import Tokenize
from pyserve.cli.bench_step import step
from pyserve.cli.bench_workload import Workload, workload_options
from pyserve.cli.client import Client
from pyserve.cli.options import NumbersType, client_options

TOKENIZE_CHARACTERS = 65536
SEED_STEP = 1_000_003  # between the runs of one command
_OUTPUT = click.Path(dir_okay=False, path_type=Path)


@click.group()
def bench() -> None:
    """Measure a running server, or the engine by itself."""


bench.add_command(step)


@bench.command()
@client_options
@workload_options
@click.option("--num-prompts", type=click.IntRange(1), default=48, show_default=True)
@click.option(
    "--max-concurrency",
    type=NumbersType(whole=True),
    default="16",
    show_default=True,
    help="Requests at once (closed loop); with --request-rate the bound of an open one. Several: a run each.",
)
@click.option(
    "--request-rate", type=NumbersType(whole=False), default="inf", help="Requests a second. [inf]"
)
@click.option(
    "--burstiness",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    help="Of arrivals: 1 is Poisson, less comes in bursts (gamma).",
)
@click.option("--num-warmups", type=click.IntRange(0), default=1, show_default=True)
@click.option(
    "--seed", default=0, show_default=True, help="A seed used twice meets a warm prefix cache."
)
@click.option("--model", help="Default: the first that the server lists.")
@click.option(
    "--tokenizer", help="Checkpoint whose tokenizer to use. Default: the server's /tokenize."
)
@click.option("--goodput", multiple=True, metavar="NAME:MS", help="Limit on ttft, tpot or e2el.")
@click.option("--label", help="Kept in the result.")
@click.option("--metadata", multiple=True, metavar="KEY=VALUE", help="Kept in the result.")
@click.option("--save", type=_OUTPUT, help="Write JSON: one result, or a list of several runs'.")
@click.option("--save-detailed", is_flag=True, help="With a line of figures for each request.")
@click.option(
    "--plot",
    "picture",
    type=_OUTPUT,
    help="Write a PNG: throughput and latency against concurrency, or rate.",
)
@click.option(
    "--compare",
    nargs=2,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="A.json B.json",
    help="Run nothing: two saved results side by side (and --plot of both).",
)
def serve(
    url: str,
    api_key: str | None,
    num_prompts: int,
    max_concurrency: tuple[int, ...],
    request_rate: tuple[float, ...],
    burstiness: float,
    num_warmups: int,
    seed: int,
    model: str | None,
    tokenizer: str | None,
    goodput: tuple[str, ...],
    label: str | None,
    metadata: tuple[str, ...],
    save: Path | None,
    save_detailed: bool,
    picture: Path | None,
    compare: tuple[Path, Path] | None,
    **workload: Any,
) -> None:
    """Stream completions from a server and report in the terms of "vllm bench serve".

    Prompts are English, cut to an exact number of tokens; temperature is 0 and the output length is
    forced with ignore_eos.
    """
    console = Console()
    if compare:
        _compare(console, compare, picture)
        return
    limits, kind = _limits(goodput), Workload(**workload)
    kind.check()
    about = {key: value for key, _, value in (item.partition("=") for item in metadata)}
    with Client(url, api_key or kind.first_key) as client:
        model = model or str(client.model()["id"])
        tokenize = _tokenize_with(client, model, tokenizer)
        tokens = [] if kind.dataset else _in_pieces(tokenize, english())
        target = Target(
            url.rstrip("/") + "/v1/completions",
            model,
            {"Authorization": f"Bearer {api_key}"} if api_key else {},
            {"temperature": 0.0, "ignore_eos": True},
        )
        runs = []
        for pace in _paces(max_concurrency, request_rate, burstiness, seed):
            work = kind.make(tokens, tokenize, num_warmups + num_prompts, pace.seed)
            result = _run(console, target, work[:num_warmups], work[num_warmups:], pace)
            date = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
            described = Description(date, model, tokenizer or model, label, about, limits)
            runs.append(
                report(result, pace, described, detailed=save_detailed)
                | {
                    "pyserve_workload": kind.workload,
                    "pyserve_blocks_owned_after": client.blocks_owned(),
                }
            )
            console.print(_table(runs[-1]))
            if runs[-1]["pyserve_groups"]:
                console.print(_group_table(runs[-1]["pyserve_groups"]))
            _show_errors(console, result)
    if save is not None:
        save.write_text(
            json.dumps(runs[0] if len(runs) == 1 else runs, indent=1) + "\n", encoding="utf-8"
        )
    if picture is not None:
        plot({label or model: runs}, picture)
    if not all(run["completed"] for run in runs):
        raise SystemExit(1)


def _paces(
    concurrencies: tuple[int, ...], rates: tuple[float, ...], burstiness: float, seed: int
) -> Iterator[Pace]:
    """One for each concurrency or each rate, with prompts of its own."""
    if len(concurrencies) > 1 and len(rates) > 1:
        raise click.UsageError("several values of --max-concurrency or of --request-rate, not both")
    pairs = itertools.product(concurrencies, rates)
    for number, (concurrency, rate) in enumerate(pairs):
        yield Pace(concurrency, rate, burstiness, seed + SEED_STEP * number)


def _compare(console: Console, paths: tuple[Path, Path], picture: Path | None) -> None:
    try:
        runs = [load_results(path) for path in paths]
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--compare") from error
    names = [path.stem for path in paths]
    if names[0] == names[1]:
        names = [str(path) for path in paths]
    pairs = [(a, b) for a in runs[0] for b in runs[1] if pace_of(a) == pace_of(b)]
    if not pairs and len(runs[0]) == len(runs[1]) == 1:
        pairs = [(runs[0][0], runs[1][0])]
    if not pairs:
        raise click.BadParameter("no two runs at the same pace", param_hint="--compare")
    for a, b in pairs:
        console.print(comparison(names[0], a, names[1], b))
    if picture is not None:
        plot(dict(zip(names, runs, strict=True)), picture)


def _run(
    console: Console, target: Target, warmups: list[Work], work: list[Work], pace: Pace
) -> LoadResult:
    async def run(on_done: Callable[[Outcome], None]) -> LoadResult:
        await drive(target, warmups, Pace(concurrency=pace.concurrency), lambda _: None)
        return await drive(target, work, pace, on_done)

    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("requests", total=len(work))
        return trio.run(run, lambda _: progress.advance(task))


def _tokenize_with(client: Client, model: str, checkpoint: str | None) -> Tokenize:
    """By the checkpoint's tokenizer where one is named, else by the server's."""
    if checkpoint is None:
        return lambda text: client.tokenize(model, text)
    from pyserve.models.load import open_checkpoint

    tokenizer = open_checkpoint(checkpoint).tokenizer
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def _in_pieces(tokenize: Tokenize, text: str) -> list[int]:
    tokens: list[int] = []
    for start in range(0, len(text), TOKENIZE_CHARACTERS):
        tokens += tokenize(text[start : start + TOKENIZE_CHARACTERS])
    return tokens


def _limits(goodput: tuple[str, ...]) -> dict[str, float]:
    limits = {}
    for item in goodput:
        name, _, value = item.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            name = ""
        if name not in ("ttft", "tpot", "e2el"):
            raise click.BadParameter(f"expected ttft:MS, tpot:MS or e2el:MS, not {item!r}")
    return limits


def _table(figures: dict[str, Any]) -> Table:
    table = Table(title=f"{figures['model_id']}, {figures['max_concurrency']} at once", box=None)
    for heading in ("", "mean", *(f"p{p}" for p in PERCENTILES)):
        table.add_column(heading, justify="left" if not heading else "right")
    for name in ("ttft", "tpot", "itl", "e2el"):
        shown = [figures[f"mean_{name}_ms"], *(figures[f"p{p}_{name}_ms"] for p in PERCENTILES)]
        table.add_row(f"{name} ms", *(f"{value:.1f}" for value in shown))
    table.add_section()
    for text, value in (
        ("output tokens/s", f"{figures['output_throughput']:.1f}"),
        ("total tokens/s", f"{figures['total_token_throughput']:.1f}"),
        ("requests/s", f"{figures['request_throughput']:.2f}"),
        ("completed", f"{figures['completed']} of {figures['num_prompts']}"),
        ("duration s", f"{figures['duration']:.1f}"),
        ("client CPU", f"{figures['pyserve_client_cpu_share']:.0%}"),
    ):
        table.add_row(text, value)
    for fate in ("rejected", "expired", "cancelled", "left", "refused"):
        if figures[f"pyserve_{fate}"]:
            table.add_row(fate, str(figures[f"pyserve_{fate}"]))
    if figures["failed"]:
        table.add_row("failed", str(figures["failed"]))
    if figures["pyserve_blocks_owned_after"] is not None:
        table.add_row("KV blocks owned after", str(figures["pyserve_blocks_owned_after"]))
    return table


def _group_table(groups: dict[str, dict[str, Any]]) -> Table:
    table = Table(box=None)
    for heading in ("group", "offered", "completed", "other", "output share", "ttft ms", "tpot ms"):
        table.add_column(heading, justify="left" if heading in ("group", "other") else "right")
    for name, group in groups.items():
        fates = ("left", "refused", "rejected", "expired", "cancelled", "failed")
        other = ", ".join(f"{group[fate]} {fate}" for fate in fates if group.get(fate))
        medians = (group["median_ttft_ms"], group["median_tpot_ms"])
        table.add_row(
            name, str(group["offered"]), str(group.get("completed", 0)), other,
            f"{group['output_share']:.3f}", *("-" if m is None else f"{m:.1f}" for m in medians),
        )  # fmt: skip
    return table


def _show_errors(console: Console, result: LoadResult) -> None:
    errors = sorted({outcome.error for outcome in result.outcomes if outcome.error})
    for error in errors[:5]:
        console.print(f"[red]{error}[/red]")
