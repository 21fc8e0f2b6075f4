"""Every stage and op of a real step is an NVTX range, and is timed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import trio

from pyserve import _C
from tests.profile.steps import run_steps

ROOT = Path(__file__).parents[2]
OPS = ["angles", "embed", "norm", "qkv", "rotary", "attention", "o", "residual", "gate_up"]
OPS += ["activation", "down", "lm_head"]
STAGES = ["plan", "pack", "forward", "sample", "route", "hand_over"]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """(thread, path) of each range that a process with the listener opened."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("nvtx")
    library, log = folder / "listener.so", folder / "ranges"
    include = ROOT / "csrc/third_party/nvtx3"
    source = Path(__file__).with_name("listener.c")
    subprocess.run(
        [compiler, "-shared", "-fPIC", f"-I{include}", str(source), "-o", str(library)], check=True
    )
    environment = os.environ | {
        "NVTX_INJECTION64_PATH": str(library),
        "LISTENER_LOG": str(log),
        "PYTHONPATH": str(ROOT),
    }
    subprocess.run([sys.executable, "-m", "tests.profile.steps"], check=True, env=environment)
    lines = [line.split(" ", 1) for line in log.read_text().splitlines()]
    return [(thread, path.removeprefix("pyserve:")) for thread, path in lines]


def test_a_listener_sees_every_stage_and_op_where_it_belongs(
    opened: list[tuple[str, str]],
) -> None:
    paths = {path for _, path in opened}
    expected = {"step", *(f"step/{stage}" for stage in STAGES), "step/plan/select"}
    expected |= {f"step/forward/{op}" for op in OPS}
    assert expected <= paths
    assert any(path.endswith("/quantize") for path in paths)
    assert all(path.startswith("step") for path in paths)


def test_ranges_are_on_the_thread_of_the_step_loop_alone(opened: list[tuple[str, str]]) -> None:
    assert len({thread for thread, _ in opened}) == 1


def test_layers_repeat_their_ops(opened: list[tuple[str, str]]) -> None:
    paths = [path for _, path in opened]
    forwards = paths.count("step/forward")
    assert forwards >= 4
    # A chunk that ends before its prompt does asks nothing of the last layer but keys and values.
    assert paths.count("step/forward/qkv") >= 30 * forwards
    assert 29 * forwards < paths.count("step/forward/attention") <= 30 * forwards
    assert paths.count("step/forward/lm_head") == forwards


def test_times_of_the_parts_add_up_to_the_step() -> None:
    _C.profile_start()
    trio.run(run_steps, 1, 3)
    times = _C.profile_stop()
    assert {"step", *STAGES, *OPS} <= set(times)
    assert all(t.calls > 0 and 0 <= t.seconds <= t.total_seconds for t in times.values())
    parts = sum(t.seconds for t in times.values())
    assert parts == pytest.approx(times["step"].total_seconds, rel=1e-6)
    inside = sum(times[op].total_seconds for op in OPS)
    assert inside <= times["forward"].total_seconds


def test_costs_are_those_of_the_shape() -> None:
    _C.profile_start()
    trio.run(run_steps, 1, 3)
    times = _C.profile_stop()
    tokens = 40 + 2  # the last token of the output is not computed
    down = times["down"]
    # In the last layer, tokens whose logits nobody wants stop at their keys and values.
    operations = down.int_operations + down.float_operations + down.tile_operations
    assert operations == 2 * (29 * tokens + 3) * 576 * 1536
    pairs = 29 * tokens * (tokens + 1) / 2 + sum(range(40, 43))
    attention = times["attention"]
    assert attention.float_operations + attention.tile_operations == 4 * pairs * 576
    assert times["norm"].memory_bytes == 0


def test_nothing_is_timed_unless_asked() -> None:
    _C.profile_start()
    _C.profile_stop()
    with _C.Range("route"):
        pass
    assert _C.profile_stop() == {}


def test_a_range_that_was_open_already_is_not_counted() -> None:
    with _C.Range("step"):
        _C.profile_start()
        with _C.Range("plan"), _C.Range("select"):
            pass
    times = _C.profile_stop()
    assert set(times) == {"plan", "select"}
    assert times["plan"].total_seconds >= times["select"].total_seconds


def test_an_unknown_op_is_refused() -> None:
    with pytest.raises(ValueError, match="no op is called lunch"):
        _C.Range("lunch")
    assert "lm_head" in _C.profile_ops()
