"""Saved results side by side, and as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from pyserve.errors import PyserveError

FIGURES = (
    ("output tokens/s", "output_throughput"),
    ("requests/s", "request_throughput"),
    ("ttft ms, median", "median_ttft_ms"),
    ("ttft ms, p99", "p99_ttft_ms"),
    ("tpot ms, median", "median_tpot_ms"),
    ("itl ms, median", "median_itl_ms"),
    ("itl ms, p99", "p99_itl_ms"),
    ("longest gap ms", "pyserve_max_itl_ms"),
    ("e2el ms, median", "median_e2el_ms"),
)


def load_results(path: Path) -> list[dict[str, Any]]:
    """The runs that ``--save`` wrote: one, or several in a list. Raises ValueError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    runs = value if isinstance(value, list) else [value]
    if not runs or not all(isinstance(run, dict) and "output_throughput" in run for run in runs):
        raise ValueError(f"{path} is no result of pyserve bench serve or vllm bench serve")
    return runs


def pace_of(run: Mapping[str, Any]) -> tuple[str, float | None]:
    """What a run was driven by: requests a second where that is finite, else how many at once."""
    rate = run.get("request_rate", "inf")
    if rate not in ("inf", float("inf")):
        return "requests/s", float(rate)
    return "at once", run.get("max_concurrency")


def comparison(name_a: str, a: Mapping[str, Any], name_b: str, b: Mapping[str, Any]) -> Table:
    """Both runs' figures and A / B; figures that one side lacks are left out."""
    label, pace = pace_of(a)
    table = Table(title=f"{pace} {label}", box=None)
    for heading in ("", name_a, name_b, "A / B"):
        table.add_column(heading, justify="right" if heading else "left")
    for text, key in FIGURES:
        x, y = a.get(key), b.get(key)
        if isinstance(x, int | float) and isinstance(y, int | float):
            table.add_row(text, f"{x:.1f}", f"{y:.1f}", f"{x / y:.2f}" if y else "-")
    return table


def plot(series: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Throughput and latencies of each series of runs against concurrency or rate, as a PNG.

    Raises :class:`~pyserve.errors.PyserveError` where matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise PyserveError("--plot needs matplotlib: pip install 'pyserve[bench]'") from error
    mpl.use("Agg")
    from matplotlib import pyplot

    panels = (
        ("output tokens/s", (("", "output_throughput"),)),
        ("first token, ms", (("median", "median_ttft_ms"), ("p95", "p95_ttft_ms"))),
        ("gap between tokens, ms", (("median", "median_itl_ms"), ("p95", "p95_itl_ms"))),
    )
    figure, axes = pyplot.subplots(1, len(panels), figsize=(12, 3.6), layout="constrained")
    for axis, (title, lines) in zip(axes, panels, strict=True):
        for number, (name, runs) in enumerate(series.items()):
            for style, (kind, key) in zip(("-", "--"), lines, strict=False):
                points = sorted((pace_of(run)[1] or 0.0, run[key]) for run in runs if key in run)
                axis.plot(
                    [x for x, _ in points], [y for _, y in points], style, marker="o",
                    color=f"C{number}", label=" ".join(filter(None, (name, kind))),
                )  # fmt: skip
        axis.set_title(title)
        axis.set_xlabel(pace_of(next(iter(series.values()))[0])[0])
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
