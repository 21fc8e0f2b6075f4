"""Bars of output tokens/s, side by side, from results of ``compare.py``.

``python bench/peers/chart.py --out docs/peers.png bench/results/*-peers.json``: medians over the runs of a
side in all files, of ours in the newest that has them (the undisturbed ones where there are any), one group
of bars a load. Needs the ``bench`` extra.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
import matplotlib as mpl
from results import QUIET_SHARE, others_share

mpl.use("Agg")
from matplotlib import pyplot

TITLES = {"1x8": "1 client", "16x48": "16 clients", "64x128": "64 clients"}


def throughput(records: Sequence[dict[str, Any]]) -> float:
    """Median of the undisturbed runs, or of all where others disturbed each of them."""
    quiet = [record for record in records if others_share(record) <= QUIET_SHARE]
    return median(record["output_throughput"] for record in quiet or records)


@click.command()
@click.argument("results", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The PNG.")
def main(results: tuple[Path, ...], out: Path) -> None:
    """Draw RESULTS."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    files = [json.loads(path.read_text(encoding="utf-8")) for path in results]
    for file in sorted(files, key=lambda file: file["date"]):
        mine: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for record in file["records"]:
            if record["load"] in TITLES and "output_throughput" in record:
                mine.setdefault((record["side"], record["load"]), []).append(record)
        for key, records in mine.items():
            earlier = [] if key[0].startswith("ours") else runs.get(key, [])
            runs[key] = earlier + records
    found = {key: throughput(records) for key, records in runs.items()}
    sides = sorted(
        {side for side, _ in found}, key=lambda side: (not side.startswith("ours"), side)
    )
    figure, axes = pyplot.subplots(1, len(TITLES), figsize=(11, 3.2), layout="constrained")
    for axis, (load, title) in zip(axes, TITLES.items(), strict=True):
        shown = [side for side in sides if (side, load) in found]
        values = [found[side, load] for side in shown]
        colours = ["C0" if side.startswith("ours") else "C7" for side in shown]
        bars = axis.barh(shown, values, color=colours)
        axis.bar_label(bars, fmt="%.0f", padding=2, fontsize="small")
        axis.set_title(f"{title}, output tokens/s", fontsize="medium")
        axis.invert_yaxis()
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main()
