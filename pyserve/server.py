"""The whole server from its settings: checkpoint, back-end, engine, HTTP, and the signals that end it.

The engine and HTTP live in our own nursery: a crash of either ends the process instead of leaving half a
server that goes on answering.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import structlog
import torch
import trio

from pyserve.config import Settings
from pyserve.core.config import SchedulerConfig
from pyserve.engine.engine import EngineConfig, open_engine
from pyserve.extension import build_info
from pyserve.http.auth import KeyRing
from pyserve.http.compose import server_state
from pyserve.http.config import HttpConfig
from pyserve.http.server import refuse_exposure, serve_http
from pyserve.http.state import BuildInfo
from pyserve.loading import Loaded

_log = structlog.get_logger("pyserve")


@dataclass(frozen=True)
class Started:
    """What a start-up came to: shown to whoever started it. ``urls`` are those listened on."""

    loaded: Loaded
    urls: list[str]


async def serve(
    loaded: Loaded, settings: Settings, keys: KeyRing, on_started: Callable[[Started], None]
) -> None:
    """Serve until a signal asks for the end, then drain and return; raises what crashed.

    The first SIGTERM or SIGINT drains, the second ends at once.
    """
    async with (
        open_engine(loaded.backend, engine_config(settings, loaded)) as engine,
        trio.open_nursery() as outer,
    ):
        built = build_info()
        build = BuildInfo(loaded.isa, built.cuda is not None, str(torch.__version__))
        state = server_state(
            engine, loaded.tokenizer, keys, build=build, vllm_metrics=settings.vllm_metrics
        )
        await outer.start(_watch_signals, state.shutdown, outer.cancel_scope)
        async with trio.open_nursery() as inner:
            urls = await inner.start(serve_http, state, http_config(settings))
            on_started(Started(loaded, urls))
        outer.cancel_scope.cancel()
    _log.info("stopped")


def engine_config(settings: Settings, loaded: Loaded) -> EngineConfig:
    """The engine's part of the settings. A token that either model or tokenizer calls the end is one."""
    kv, eos = loaded.kv, (*loaded.backend.info.eos_token_ids, *loaded.tokenizer.eos_token_ids)
    return EngineConfig(
        SchedulerConfig(
            num_blocks=kv.num_blocks,
            eos_token_ids=tuple(dict.fromkeys(eos)),
            block_size=kv.block_size,
            context_length=kv.context_length,
            max_batch_tokens=settings.max_batch_tokens,
            max_batch_requests=settings.max_batch_requests,
            max_prefill_s=settings.max_prefill_ms / 1e3,
            max_waiting_requests=settings.max_waiting_requests,
            max_waiting_tokens=settings.max_waiting_tokens,
            window_min_s=settings.window_min_ms / 1e3,
            window_max_s=settings.window_max_ms / 1e3,
            ageing_s=settings.ageing_s,
        ),
        prefix_cache=settings.prefix_cache,
    )


def http_config(settings: Settings) -> HttpConfig:
    """HTTP's part of the settings."""
    return HttpConfig(
        host=settings.host,
        port=settings.port,
        allow_remote=settings.allow_remote,
        body_limit=settings.body_limit,
        body_timeout_s=settings.body_timeout_s,
        write_timeout_s=settings.write_timeout_s,
        header_timeout_s=settings.header_timeout_s,
        keep_alive_s=settings.keep_alive_s,
        max_connections=settings.max_connections,
        max_prompts=settings.max_prompts,
        max_jobs=settings.max_jobs,
        job_bytes=settings.job_memory,
        job_ttl_s=settings.job_ttl_s,
        idempotency_ttl_s=settings.idempotency_ttl_s,
        drain_timeout_s=settings.drain_timeout_s,
    )


def api_keys(settings: Settings) -> KeyRing:
    """The keys of ``api_keys_file``; an empty ring without one.

    Raises :class:`~pyserve.errors.PyserveError` where the settings would leave the server open to others.
    """
    keys = KeyRing.from_file(settings.api_keys_file) if settings.api_keys_file else KeyRing()
    refuse_exposure(keys, http_config(settings))
    return keys


def log_format(settings: Settings) -> Literal["console", "json"]:
    """``auto`` is console where standard error is a terminal."""
    match settings.log_format:
        case "console" | "json" as chosen:
            return chosen
        case _:
            return "console" if sys.stderr.isatty() else "json"


async def _watch_signals(
    shutdown: trio.Event,
    everything: trio.CancelScope,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for number in signals:
            name = signal.Signals(number).name
            if shutdown.is_set():
                _log.warning("ending at once", signal=name)
                everything.cancel()
                return
            _log.info("shutting down: finishing what runs", signal=name)
            shutdown.set()
