"""``pyserve bench step``: its parts add up, and its costs are the model's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pyserve.backends.scripted import ScriptedBackend
from pyserve.bench.limits import Limits
from pyserve.bench.step import PRODUCTS, Case, StepBench
from pyserve.cli.main import pyserve

LIMITS = Limits(10e9, 100e9, 200e9, 800e9, 0, 2, "avx512")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(pyserve, ["bench", "step", *arguments], catch_exceptions=False)


def test_json_splits_the_default_models_steps(tmp_path: Path) -> None:
    saved = tmp_path / "step.json"
    arguments = ["--batch", "1,3", "--prefill", "40", "--context", "20", "--steps", "3"]
    result = run(*arguments, "--json", "--save", str(saved))
    figures = json.loads(result.output)
    assert json.loads(saved.read_text()) == figures
    assert [case["name"] for case in figures["cases"]] == ["batch 1", "batch 3", "prompt of 40"]
    for case in figures["cases"]:
        ops = {row["op"]: row for row in case["ops"]}
        assert {*PRODUCTS, "step", "plan", "select", "pack", "sample", "route"} <= set(ops)
        assert 0 < case["limit_ms"] == pytest.approx(sum(row["limit_ms"] for row in case["ops"]))
        assert 0 < case["overhead_share"] < 1
        assert 0 <= case["idle_share"] < 1
        tokens = case["prefill"] or case["batch"]
        # Of a prompt, only the last token goes through the last layer.
        rows = 29 * tokens + case["batch"]
        operations = sum(ops["down"][f"{kind}_operations"] for kind in ("float", "int", "tile"))
        assert operations == 2 * rows * 576 * 1536
        assert ops["lm_head"]["calls"] == 1


def test_tables_name_every_op() -> None:
    output = run("--batch", "2", "--prefill", "", "--context", "8", "--steps", "1").output
    assert "% of its limit:" in output
    assert "batch 2" in output
    assert "limits: " in output
    assert all(op in output for op in (*PRODUCTS, "other Python", "rotary"))


def test_a_backend_without_ops_is_split_into_stages() -> None:
    report = StepBench(ScriptedBackend(), LIMITS).run(Case(batch=2, context=5), 2)
    assert {"step", "plan", "pack", "sample"} <= {row.op for row in report.rows}
    assert report.overhead_share == 1
    assert report.tokens_per_s > 0


def test_all_sequences_decode_until_the_last_step_however_slowly_they_entered() -> None:
    bench = StepBench(ScriptedBackend(), LIMITS, max_batch_tokens=32)
    report = bench.run(Case(batch=8, context=100), 2)
    assert {"plan", "pack", "sample"} <= {row.op for row in report.rows}
    assert report.compute_ms > 0


def test_a_context_beyond_the_models_is_refused() -> None:
    backend = ScriptedBackend()
    with pytest.raises(ValueError, match="has a context of"):
        StepBench(backend, LIMITS).run(Case(context=backend.info.context_length), 1)


def test_wrong_numbers_are_named() -> None:
    result = run("--batch", "1,none")
    assert result.exit_code == 2
    assert "--batch" in result.output
