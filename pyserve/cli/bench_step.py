"""``pyserve bench step``: the engine without HTTP, split into stages and ops, beside the machine's limits."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from pyserve.cli.options import NumbersType, SectionedCommand, configuration_from, settings_options

if TYPE_CHECKING:
    from pyserve.bench.step import Row, StepReport

NAMES = {"step": "other Python", "forward": "forward, the rest"}


@click.command(cls=SectionedCommand)
@settings_options("Model", "Memory")
@click.option(
    "--batch",
    type=NumbersType(whole=True, empty=True),
    default="1,4,16,64",
    show_default=True,
    help="Sequences that decode together.",
)
@click.option("--context", type=click.IntRange(1), default=256, show_default=True, help="Tokens.")
@click.option(
    "--prefill",
    type=NumbersType(whole=True, empty=True),
    default="512",
    show_default=True,
    help='Prompts to take in, in tokens; "" for none.',
)
@click.option("--steps", type=click.IntRange(1), default=30, show_default=True)
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--save", type=click.Path(dir_okay=False, path_type=Path), help="Write JSON.")
def step(
    config_file: Path | None,
    batch: tuple[int, ...],
    context: int,
    prefill: tuple[int, ...],
    steps: int,
    temperature: float,
    as_json: bool,
    save: Path | None,
    **flags: object,
) -> None:
    """Time the engine's steps and what they are made of, without HTTP.

    Every op is shown with how near it comes to what this machine's memory and arithmetic, measured first,
    would allow. Nothing else should run meanwhile.
    """
    settings = configuration_from(config_file, flags).settings
    from pyserve import _C
    from pyserve.bench.limits import measure_limits
    from pyserve.bench.step import Case, StepBench
    from pyserve.loading import load_model

    cases = [Case(batch=number, context=context) for number in batch]
    cases += [Case(prefill=number) for number in prefill]
    loaded = load_model(settings)
    gc.collect()
    gc.freeze()  # as the engine does
    info = loaded.backend.info
    isa = loaded.isa if loaded.isa in _C.supported_isas() else ""
    limits = measure_limits(info.weight_bytes, isa)
    bench = StepBench(
        loaded.backend,
        limits,
        block_size=loaded.kv.block_size,
        max_batch_tokens=settings.max_batch_tokens,
        temperature=temperature,
    )
    reports = [bench.run(case, steps) for case in cases]
    figures = {
        "model": info.name,
        "weights": info.weights,
        "weight_bytes": info.weight_bytes,
        "steps": steps,
        "limits": limits.as_dict(),
        "cases": [report.as_dict() for report in reports],
    }
    text = json.dumps(figures, indent=1)
    if save is not None:
        save.write_text(text + "\n", encoding="utf-8")
    if as_json:
        click.echo(text)
        return
    console = Console()
    console.print(f"{info.name}, {info.weights}: {info.weight_bytes / 1e6:.0f} MB of weights")
    console.print(f"limits: {limits}", highlight=False)
    console.print("\nA step, or a whole prompt:", _summary(reports))
    console.print("\nEach op's own ms, its share of the step, and % of its limit:")
    side_by_side = max(1, (console.width - 18) // 24)
    for first in range(0, len(reports), side_by_side):
        console.print(_ops(reports[first : first + side_by_side]))


def _summary(reports: list[StepReport]) -> Table:
    headings = ["", "\nmedian ms", "\np95 ms", "\ntokens/s", "\nlimit ms", "% of\nlimit"]
    table = _table([*headings, "no\nproduct", "threads\nidle"])
    for report in reports:
        table.add_row(
            report.case.name,
            f"{report.median_ms:.2f}",
            f"{report.p95_ms:.2f}",
            f"{report.tokens_per_s:.0f}",
            f"{report.limit_ms:.2f}",
            f"{report.percent_of_limit:.0f}",
            f"{report.overhead_share:.1%}",
            f"{report.idle_share:.1%}",
        )
    return table


def _ops(reports: list[StepReport]) -> Table:
    from pyserve._C import profile_ops

    headings = [heading for r in reports for heading in (f"{r.case.name}\nms", "\nstep", "\nlimit")]
    table = _table(["", *headings])
    columns = [{row.op: row for row in report.rows} for report in reports]
    for op in profile_ops():
        if any(op in column for column in columns):
            cells = [
                cell
                for report, column in zip(reports, columns, strict=True)
                for cell in _cells(column.get(op), report)
            ]
            table.add_row(NAMES.get(op, op), *cells)
    return table


def _cells(row: Row | None, report: StepReport) -> tuple[str, str, str]:
    if row is None:
        return "", "", ""
    percent = row.percent_of_limit
    share = row.ms / report.timed_ms
    return f"{row.ms:.3f}", f"{share:.1%}", "" if percent is None else f"{percent:.0f}"


def _table(headings: list[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    return table
