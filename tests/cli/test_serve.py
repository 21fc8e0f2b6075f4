"""What ``pyserve serve`` tells the person who starts it, and its exit codes."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pyserve import loading, server
from pyserve.backends.base import ModelInfo
from pyserve.cli.main import pyserve
from pyserve.memory import KvPlan

INFO = ModelInfo("tiny", 64, 1000, 8, (1,), "float32", "Q8_0", 1_500_000, 3 << 20, 16)


@pytest.fixture(autouse=True)
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("PYSERVE_PORT", "0")
    tokenizer: Any = SimpleNamespace(eos_token_ids=())
    backend: Any = SimpleNamespace(info=INFO, close=lambda: None)
    kv = KvPlan(num_blocks=10, block_size=16, block_bytes=256, context_length=160)
    made = loading.Loaded(backend, tokenizer, "llama", "avx2", 2, kv, 1.25)
    monkeypatch.setattr(loading, "load_model", lambda settings: made)


def run(monkeypatch: pytest.MonkeyPatch, error: BaseException | None, *arguments: str) -> Result:
    async def serve(loaded: Any, settings: Any, keys: Any, on_started: Any) -> None:
        on_started(server.Started(loaded, ["http://127.0.0.1:1"]))
        if error is not None:
            raise error

    monkeypatch.setattr(server, "serve", serve)
    return CliRunner().invoke(pyserve, ["serve", *arguments])


def test_taken_port_is_seen_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(settings: Any) -> loading.Loaded:
        raise AssertionError("loaded for nothing")

    monkeypatch.setattr(loading, "load_model", load)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run(monkeypatch, None, "--port", str(taken.getsockname()[1]))
    assert result.exit_code == 1
    assert "cannot listen" in result.stderr


def test_banner_says_what_was_loaded_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, None, "--log-format", "console")
    assert result.exit_code == 0
    lines = {line[:8].strip(): line[8:].strip() for line in result.stderr.splitlines()}
    assert lines["model"] == "tiny: llama, 2M parameters, stored as Q8_0, loaded in 1.2 s"
    assert lines["weights"] == "3MiB in float32; avx2, 2 threads"
    assert lines["KV cache"] == "2.5KiB in float32: 10 blocks, 160 tokens; context 160"
    assert lines["URL"].startswith("http://127.0.0.1:1 ")


def test_start_is_one_json_line_for_a_log_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, None, "--log-format", "json")
    assert '"event":"ready"' in result.stderr.replace('": "', '":"')
    assert '"kv_blocks":10' in result.stderr


def test_what_the_user_can_mend_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    error = BaseExceptionGroup("", [ExceptionGroup("", [OSError(98, "Address already in use")])])
    result = run(monkeypatch, error)
    assert result.exit_code == 1
    assert "cannot listen: Address already in use" in result.stderr
    assert "Traceback" not in result.stderr


def test_crash_is_logged_and_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ExceptionGroup("", [OSError("side effect"), RuntimeError("broken invariant")])
    result = run(monkeypatch, error, "--log-format", "json")
    assert result.exit_code == 1
    assert "the server has crashed" in result.stderr
    assert "broken invariant" in result.stderr
