"""``pyserve bench serve`` as it is typed: against canned answers, and over saved results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pyserve.cli.main import pyserve

RUN = {
    "request_rate": "inf", "max_concurrency": 4, "output_throughput": 100.0, "median_ttft_ms": 20.0,
    "p95_ttft_ms": 30.0, "median_itl_ms": 5.0, "p95_itl_ms": 9.0,
}  # fmt: skip


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(pyserve, ["bench", "serve", *arguments])


def saved(path: Path, *runs: dict) -> str:
    path.write_text(json.dumps(runs[0] if len(runs) == 1 else list(runs)))
    return str(path)


def test_compare_prints_ratios_and_plots_both(tmp_path: Path) -> None:
    a = saved(tmp_path / "a.json", RUN, RUN | {"max_concurrency": 16, "output_throughput": 300.0})
    b = saved(tmp_path / "b.json", RUN | {"output_throughput": 40.0, "median_ttft_ms": 80.0})
    picture = tmp_path / "out.png"
    result = bench("--compare", a, b, "--plot", str(picture))
    assert result.exit_code == 0, result.output
    assert "4 at once" in result.output
    assert "2.50" in result.output  # 100 / 40
    assert "0.25" in result.output  # 20 / 80
    assert "16 at once" not in result.output  # b has no such run
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "message"), [("[]", "no result"), ("{}", "no result"), ("{", "Expecting")]
)
def test_compare_names_the_file_that_is_no_result(tmp_path: Path, text: str, message: str) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text(text)
    result = bench("--compare", saved(tmp_path / "a.json", RUN), str(bad))
    assert result.exit_code == 2
    assert "bad.json" in result.output
    assert message in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "sharegpt"], "needs --dataset"),
        (["--dataset", __file__], "takes no --dataset"),
        (["--workload", "tenants"], "needs --tenant"),
        (["--tenant", "sk-a:1"], "takes no --tenant"),
        (["--workload", "tenants", "--tenant", "sk-a"], "KEY:NUMBER"),
        (["--max-concurrency", "1,0"], "--max-concurrency"),
        (["--max-concurrency", "1,x"], "--max-concurrency"),
        (["--request-rate", "-1"], "--request-rate"),
        (["--goodput", "speed:1"], "ttft:MS"),
        (["--fault-share", "2"], "--fault-share"),
    ],
)
def test_bad_options_are_named_before_anything_is_sent(arguments: list[str], message: str) -> None:
    result = bench(*arguments)
    assert result.exit_code == 2
    assert message in result.output
