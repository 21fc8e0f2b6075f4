"""The drawing body by several lanes under ThreadSanitizer: what is shared is read and written in turn."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_lanes_do_not_race(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    program = tmp_path / "races"
    flags = ["-std=c++20", "-O1", "-g", "-fsanitize=thread", "-ffp-contract=off", "-pthread"]
    source = Path(__file__).with_name("races.cpp")
    built = subprocess.run(
        [compiler, *flags, "-I", str(ROOT / "csrc"), str(source), "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    if "tsan" in built.stderr and built.returncode:
        pytest.skip("no ThreadSanitizer")
    assert built.returncode == 0, built.stderr
    results = []
    for lanes in (1, 4, 7):
        run = subprocess.run(
            [program, str(lanes)], capture_output=True, text=True, check=False, timeout=60
        )
        assert run.returncode == 0, run.stderr
        results.append(run.stdout)
    assert results[1:] == results[:1] * 2
