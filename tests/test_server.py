"""The composition: settings reach the rooms that use them, signals and crashes reach the process."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from pyserve import server
from pyserve.backends.scripted import ScriptedBackend
from pyserve.config import Settings
from pyserve.core.scheduler import Scheduler
from pyserve.engine.driver import EngineCrashed
from pyserve.errors import PyserveError
from pyserve.http.auth import KeyRing
from pyserve.loading import Loaded
from pyserve.memory import KvPlan
from tests.http.fakes import CharTokenizer

SETTINGS = Settings(port=0)


class Tokenizer(CharTokenizer):
    eos_token_ids = (3, 1)

    def detokenizer(self, **options: object) -> None:
        """Nothing in these tests gets as far as text."""


def loaded(**changes: Any) -> Loaded:
    tokenizer: Any = Tokenizer()
    return Loaded(
        backend=ScriptedBackend(eos_token_ids=(1, 2), **changes),
        tokenizer=tokenizer,
        architecture="scripted",
        isa="none",
        threads=1,
        kv=KvPlan(num_blocks=64, block_size=16, block_bytes=1, context_length=1000),
        load_s=0.0,
    )


def test_scheduling_options_reach_the_scheduler() -> None:
    settings = replace(
        SETTINGS, max_batch_tokens=99, max_batch_requests=9, max_waiting_requests=8, window_min_ms=1.0,
        window_max_ms=2.0, max_prefill_ms=30.0, max_waiting_tokens=7, ageing_s=6.0, prefix_cache=False,
    )  # fmt: skip
    config = server.engine_config(settings, loaded())
    scheduler = config.scheduler
    assert (scheduler.num_blocks, scheduler.block_size, scheduler.context_length) == (64, 16, 1000)
    assert (scheduler.max_batch_tokens, scheduler.max_batch_requests) == (99, 9)
    assert (scheduler.max_waiting_requests, scheduler.max_waiting_tokens) == (8, 7)
    assert (scheduler.window_min_s, scheduler.window_max_s) == (0.001, 0.002)
    assert (scheduler.max_prefill_s, scheduler.ageing_s) == (0.03, 6.0)
    assert not config.prefix_cache


def test_a_token_that_model_or_tokenizer_calls_the_end_is_one() -> None:
    assert server.engine_config(SETTINGS, loaded()).scheduler.eos_token_ids == (1, 2, 3)


def test_http_options_reach_http() -> None:
    settings = replace(
        SETTINGS, host="::1", allow_remote=True, body_limit=5, body_timeout_s=4.0, write_timeout_s=3.0,
        keep_alive_s=2.0, header_timeout_s=6.0, max_connections=7, max_prompts=8, max_jobs=9,
        job_memory=10, job_ttl_s=11.0, idempotency_ttl_s=12.0, drain_timeout_s=1.0,
    )  # fmt: skip
    config = server.http_config(settings)
    assert (config.host, config.port, config.allow_remote, config.body_limit) == ("::1", 0, True, 5)
    assert (config.body_timeout_s, config.write_timeout_s) == (4.0, 3.0)
    assert (config.keep_alive_s, config.drain_timeout_s) == (2.0, 1.0)
    assert (config.header_timeout_s, config.max_connections, config.max_prompts) == (6.0, 7, 8)
    assert (config.max_jobs, config.job_bytes, config.job_ttl_s) == (9, 10, 11.0)
    assert config.idempotency_ttl_s == 12.0


def test_log_format_is_console_only_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert server.log_format(SETTINGS) == "json"
    assert server.log_format(replace(SETTINGS, log_format="console")) == "console"


def test_open_to_others_needs_keys_or_a_word(tmp_path: Path) -> None:
    remote = replace(SETTINGS, host="0.0.0.0")
    with pytest.raises(PyserveError, match="without API keys"):
        server.api_keys(remote)
    assert server.api_keys(replace(remote, allow_remote=True)).keys == ()
    file = tmp_path / "keys.toml"
    file.write_text(f'[[keys]]\nname = "a"\nsha256 = "{"0" * 63}1"\n')
    assert [key.name for key in server.api_keys(replace(remote, api_keys_file=file)).keys] == ["a"]


async def test_signal_ends_the_server_and_gives_the_backend_back() -> None:
    made = loaded()
    urls: list[str] = []

    def on_started(started: server.Started) -> None:
        urls.extend(started.urls)
        signal.raise_signal(signal.SIGTERM)

    await server.serve(made, SETTINGS, KeyRing(), on_started)
    assert made.backend.closed
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{urls[0]}/livez")


async def test_crash_of_the_engine_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(*args: object) -> None:
        raise RuntimeError("broken invariant")

    monkeypatch.setattr(Scheduler, "plan", plan)
    made = loaded()
    started = trio.Event()
    urls: list[str] = []

    def on_started(start: server.Started) -> None:
        urls.extend(start.urls)
        started.set()

    async def ask() -> None:
        await started.wait()
        async with httpx.AsyncClient() as client:
            answer = await client.post(f"{urls[0]}/v1/completions", json={"prompt": [5, 6]})
        assert answer.status_code == 503

    with pytest.RaisesGroup(EngineCrashed, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await server.serve(made, SETTINGS, KeyRing(), on_started)
    assert made.backend.closed


async def test_address_in_use_is_an_os_error() -> None:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    with pytest.RaisesGroup(pytest.RaisesExc(OSError), flatten_subgroups=True):
        await server.serve(loaded(), replace(SETTINGS, port=port), KeyRing(), lambda _: None)
    await listeners[0].aclose()


def test_start_imports_no_hub_client() -> None:
    program = "import sys, pyserve.server; print('huggingface_hub' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
