"""``pyserve bench``: measure a running server, ours or any other that speaks OpenAI's completions."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import trio
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pyserve.bench.load import LoadResult, Pace, Target, drive
from pyserve.bench.report import PERCENTILES, Description, report
from pyserve.bench.stream import Outcome
from pyserve.bench.workload import Span, Work, english, random_work
from pyserve.cli.bench_step import step
from pyserve.cli.client import Client
from pyserve.cli.options import client_options

TOKENIZE_CHARACTERS = 65536


class SpanType(click.ParamType[Span]):
    """``N`` or ``LOW:HIGH``."""

    name = "N|LOW:HIGH"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Span:
        """Parse, or fail with the usage."""
        if isinstance(value, Span):
            return value
        try:
            return Span.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.group()
def bench() -> None:
    """Measure a running server, or the engine by itself."""


bench.add_command(step)


@bench.command()
@client_options
@click.option("--num-prompts", type=click.IntRange(1), default=48, show_default=True)
@click.option(
    "--max-concurrency", type=click.IntRange(1), default=16, show_default=True,
    help="Requests at once (closed loop); with --request-rate the bound of an open one.",
)  # fmt: skip
@click.option("--request-rate", type=float, default=float("inf"), help="Requests a second. [inf]")
@click.option(
    "--burstiness", type=click.FloatRange(0, min_open=True), default=1.0, help="1: Poisson."
)
@click.option("--input-len", type=SpanType(), default="16:512", show_default=True, help="Tokens.")
@click.option("--output-len", type=SpanType(), default="16:256", show_default=True, help="Tokens.")
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
@click.option("--save", type=click.Path(dir_okay=False, path_type=Path), help="Write JSON.")
@click.option("--save-detailed", is_flag=True, help="With a line of figures for each request.")
def serve(
    url: str,
    api_key: str | None,
    num_prompts: int,
    max_concurrency: int,
    request_rate: float,
    burstiness: float,
    input_len: Span,
    output_len: Span,
    num_warmups: int,
    seed: int,
    model: str | None,
    tokenizer: str | None,
    goodput: tuple[str, ...],
    label: str | None,
    metadata: tuple[str, ...],
    save: Path | None,
    save_detailed: bool,
) -> None:
    """Stream completions from a server and report in the terms of "vllm bench serve".

    Prompts are English, cut to an exact number of tokens; temperature is 0 and the output length is
    forced with ignore_eos.
    """
    console = Console()
    with Client(url, api_key) as client:
        model = model or str(client.model()["id"])
        tokens = _local_tokens(tokenizer) if tokenizer else _server_tokens(client, model)
    work = random_work(tokens, num_warmups + num_prompts, input_len, output_len, seed)
    target = Target(
        url.rstrip("/") + "/v1/completions",
        model,
        {"Authorization": f"Bearer {api_key}"} if api_key else {},
        {"temperature": 0.0, "ignore_eos": True},
    )
    pace = Pace(max_concurrency, request_rate, burstiness, seed)
    result = _run(console, target, work[:num_warmups], work[num_warmups:], pace)
    about = Description(
        datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        model,
        tokenizer or model,
        label,
        dict(item.split("=", 1) for item in metadata),
        _limits(goodput),
    )
    figures = report(result, pace, about, detailed=save_detailed)
    console.print(_table(figures))
    _show_errors(console, result)
    if save is not None:
        save.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if not figures["completed"]:
        raise SystemExit(1)


def _run(
    console: Console, target: Target, warmups: list[Work], work: list[Work], pace: Pace
) -> LoadResult:
    async def run(on_done: Callable[[Outcome], None]) -> LoadResult:
        await drive(target, warmups, Pace(concurrency=pace.concurrency), lambda _: None)
        return await drive(target, work, pace, on_done)

    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("requests", total=len(work))
        return trio.run(run, lambda _: progress.advance(task))


def _server_tokens(client: Client, model: str) -> list[int]:
    text = english()
    tokens: list[int] = []
    for start in range(0, len(text), TOKENIZE_CHARACTERS):
        piece = text[start : start + TOKENIZE_CHARACTERS]
        tokens += client.tokenize(model, piece)
    return tokens


def _local_tokens(checkpoint: str) -> list[int]:
    from pyserve.models.load import open_checkpoint

    return open_checkpoint(checkpoint).tokenizer.encode(english(), add_special_tokens=False)


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
    for fate in ("rejected", "expired", "cancelled"):
        if figures[f"pyserve_{fate}"]:
            table.add_row(fate, str(figures[f"pyserve_{fate}"]))
    if figures["failed"]:
        table.add_row("failed", str(figures["failed"]))
    return table


def _show_errors(console: Console, result: LoadResult) -> None:
    errors = sorted({outcome.error for outcome in result.outcomes if outcome.error})
    for error in errors[:5]:
        console.print(f"[red]{error}[/red]")
