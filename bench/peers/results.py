"""Medians, spreads and ratios of the records of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.table import Table

KEPT = (
    "completed", "failed", "duration", "output_throughput", "total_token_throughput",
    "median_ttft_ms", "p95_ttft_ms", "median_tpot_ms", "median_itl_ms", "p95_itl_ms", "p99_itl_ms",
    "pyserve_max_itl_ms", "median_e2el_ms", "pyserve_client_cpu_share",
)  # fmt: skip
QUIET_SHARE = 0.02

_COLUMNS = (
    ("out tok/s", "output_throughput", 1),
    ("ttft p50", "median_ttft_ms", 1),
    ("ttft p95", "p95_ttft_ms", 1),
    ("itl p50", "median_itl_ms", 1),
    ("itl p95", "p95_itl_ms", 1),
    ("itl max", "pyserve_max_itl_ms", 0),
    ("ready s", "ready_s", 1),
    ("MiB", "peak_rss_mib", 0),
)
_RATIOS = ("output_throughput", "median_ttft_ms", "median_itl_ms", "pyserve_max_itl_ms")


def record_of(figures: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a report: no lists, four significant digits are plenty."""
    return {
        name: round(figures[name], 3) if isinstance(figures[name], float) else figures[name]
        for name in KEPT
    }


def summary_of(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each load and side: median, low and high of each figure over the rounds, ours over each peer.

    ``ratios`` are the first side's medians over this side's; for times, less than 1 is better for the first.
    """
    rows: list[dict[str, Any]] = []
    for load in dict.fromkeys(record["load"] for record in records):
        first: dict[str, Any] | None = None
        for side in dict.fromkeys(record["side"] for record in records):
            runs = [r for r in records if (r["load"], r["side"]) == (load, side)]
            row = {"load": load, "side": side} | _figures(runs)
            first = first or row
            if "output_throughput" in row and "output_throughput" in first:
                row["ratios"] = {
                    name: round(first[name][0] / row[name][0], 3)
                    for name in _RATIOS
                    if row[name][0]
                }
            rows.append(row)
    return rows


def others_share(record: dict[str, Any]) -> float:
    """Of all processors' time, what neither side of the run took; above QUIET_SHARE it was disturbed."""
    return float(record["foreign_cpu_share"] + record["stolen_cpu_share"])


def _figures(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    whole = [run for run in runs if "error" not in run and run["completed"]]
    loud = sum(others_share(run) > QUIET_SHARE for run in whole)
    bad = sum(bool(run["errors"] or run["wrong_lengths"]) for run in whole)
    row: dict[str, Any] = {
        "runs": len(whole), "disturbed": loud, "faulty": len(runs) - len(whole) + bad,
    }  # fmt: skip
    for _, name, _ in _COLUMNS if whole else ():
        values = [run[name] for run in whole]
        row[name] = [round(v, 3) for v in (median(values), min(values), max(values))]
    return row


def load_table(load: str, summary: Sequence[dict[str, Any]]) -> Table:
    """One load's rows; ratios are those of the first row over each."""
    table = Table(title=f"{load}: median (low-high)", box=None)
    table.add_column("")
    for heading, _, _ in _COLUMNS:
        table.add_column(heading, justify="right")
    for heading in ("x tok/s", "x ttft", "x itl max", "notes"):
        table.add_column(heading, justify="right")
    for row in summary:
        if row["load"] == load:
            table.add_row(row["side"], *_cells(row))
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    if not row["runs"]:
        return ["failed"]
    cells = []
    for _, name, digits in _COLUMNS:
        middle, low, high = row[name]
        spread = f" ({low:.{digits}f}-{high:.{digits}f})" if name == "output_throughput" else ""
        cells.append(f"{middle:.{digits}f}{spread}")
    ratios = row.get("ratios", {})
    shown = ("output_throughput", "median_ttft_ms", "pyserve_max_itl_ms")
    cells += [f"{ratios[name]:.2f}" if name in ratios else "" for name in shown]
    notes = [f"{row['disturbed']} of {row['runs']} disturbed"] if row["disturbed"] else []
    notes += [f"{row['faulty']} faulty"] if row["faulty"] else []
    return [*cells, ", ".join(notes)]
