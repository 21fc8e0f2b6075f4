"""``pyserve serve``: load a model and serve it until a signal asks for the end."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import structlog
import trio
from rich.console import Console

from pyserve import __version__
from pyserve.cli.options import SectionedCommand, configuration_from, settings_options
from pyserve.config_values import format_size
from pyserve.errors import PyserveError

if TYPE_CHECKING:
    from pyserve.server import Started


@click.command(cls=SectionedCommand)
@settings_options()
def serve(config_file: Path | None, **flags: object) -> None:
    """Serve a model over HTTP, with OpenAI's interface.

    Without --model a small default (SmolLM2-135M-Instruct) is fetched once and kept. Every option can also
    be set as PYSERVE_NAME in the environment, or as a key of a TOML file; "pyserve config" shows the
    outcome.
    """
    settings = configuration_from(config_file, flags).settings
    _check_port(settings.host, settings.port)
    # Late: these import torch, which --help and a mistyped option should not wait for.
    from pyserve import server
    from pyserve.loading import load_model
    from pyserve.telemetry.logs import setup_logging

    log_format = server.log_format(settings)
    setup_logging(log_format, settings.log_level)
    keys = server.api_keys(settings)
    loaded = load_model(settings)
    announce = partial(_announce, Console(stderr=True, highlight=False), log_format)
    try:
        trio.run(server.serve, loaded, settings, keys, announce)
    except BaseExceptionGroup as group:
        leaves = list(_leaves(group))
        if all(_is_told(leaf) for leaf in leaves):
            raise _told(leaves[0]) from None
        structlog.get_logger("pyserve").critical("the server has crashed", exc_info=group)
        sys.exit(1)


def _check_port(host: str, port: int) -> None:
    """Fails now where the port is taken, not after a model has been loaded for nothing."""
    try:
        listener = socket.create_server((host, port), family=_family(host))
    except OSError as error:
        raise _told(error) from None
    listener.close()


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]


def _announce(console: Console, log_format: str, started: Started) -> None:
    """Say what was loaded and where it answers: a few lines for a person, one for a log collector."""
    loaded, info = started.loaded, started.loaded.backend.info
    if log_format == "json":
        structlog.get_logger("pyserve").info(
            "ready",
            urls=started.urls,
            model=info.name,
            architecture=loaded.architecture,
            dtype=info.dtype,
            quantization=info.quantization,
            kept_quantized=info.kept_quantized,
            weight_bytes=info.weight_bytes,
            kv_dtype=info.kv_dtype,
            kv_bytes=loaded.kv.bytes,
            kv_blocks=loaded.kv.num_blocks,
            context_length=loaded.kv.context_length,
            load_s=round(loaded.load_s, 2),
        )
        return
    for name, value in _banner(started):
        console.print(f"[bold]{name:<8}[/bold] {value}", soft_wrap=True)


def _banner(started: Started) -> Iterator[tuple[str, str]]:
    loaded, info = started.loaded, started.loaded.backend.info
    kv, url = loaded.kv, started.urls[0]
    kind = "not quantised" if info.quantization == "none" else f"stored as {info.quantization}"
    parameters = f"{info.num_parameters / 1e6:.0f}M"
    loading = f"loaded in {loaded.load_s:.1f} s"
    blocks = f"{kv.num_blocks} blocks, {kv.num_blocks * kv.block_size} tokens"
    yield "pyserve", __version__
    yield (
        "model",
        f"{info.name}: {loaded.architecture}, {parameters} parameters, {kind}, {loading}",
    )
    yield (
        "weights",
        f"{format_size(info.weight_bytes)} in {info.weights}; {loaded.isa}, {loaded.threads} threads",
    )
    yield (
        "KV cache",
        f"{format_size(kv.bytes)} in {info.kv_dtype}: {blocks}; context {kv.context_length}",
    )
    yield (
        "URL",
        f"{' '.join(started.urls)}   (OpenAI base URL: {url}/v1, documentation: {url}/docs)",
    )


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _is_told(error: BaseException) -> bool:
    """Whether one line says it all; a crash is a fault of ours, whose traceback somebody will need."""
    from pyserve.engine.driver import EngineCrashed

    return isinstance(error, PyserveError | OSError) and not isinstance(error, EngineCrashed)


def _told(error: BaseException) -> Exception:
    """One line for the user instead of a traceback."""
    if isinstance(error, OSError):
        return click.ClickException(f"cannot listen: {error.strerror or error}")
    assert isinstance(error, PyserveError)
    return error
