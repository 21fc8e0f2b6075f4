"""Serving: listen, hand each connection its task, and end gracefully when told.

The caller owns the nursery, so that a crash here ends the process instead of leaving half a server. The end
has four steps: accept nothing more and admit nothing more; let what runs finish, for ``drain_timeout_s``;
end what is left with an error that its client is told; close every connection.
"""

from __future__ import annotations

import ipaddress
import os
from contextlib import aclosing, suppress
from functools import partial

import structlog
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.worker_context import WorkerContext

from pyserve.errors import PyserveError, Unavailable
from pyserve.http.app import build_app
from pyserve.http.auth import KeyRing
from pyserve.http.config import HttpConfig
from pyserve.http.errors import error_body
from pyserve.http.listen import accept_all, allow_files
from pyserve.http.state import ServerState
from pyserve.http.tcp import Connection

_log = structlog.get_logger("pyserve.http")
_LAST_WORDS_S = 0.25
_OTHER_FILES = 256  # open beside the connections: weights, libraries, standard streams
_FULL = error_body(Unavailable("too many connections"))


async def serve_http(
    state: ServerState,
    config: HttpConfig,
    *,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serves until ``state.shutdown`` is set, then drains and returns; reports its URLs once it listens.

    Raises :class:`~pyserve.errors.PyserveError` where it would be open to others without API keys, and
    OSError where it cannot listen.
    """
    refuse_exposure(state.keys, config)
    allow_files(config.max_connections + _OTHER_FILES)
    listeners = await trio.open_tcp_listeners(config.port, host=config.host, backlog=config.backlog)
    async with trio.open_nursery() as nursery:
        app = await build_app(state, config, nursery)
        server = _Server(app, config)
        accepting = await nursery.start(server.accept, listeners)
        task_status.started([_url(listener) for listener in listeners])
        try:
            await state.shutdown.wait()
            accepting.cancel()
            await _drain(state, config)
            await server.close(config.close_timeout_s)
            nursery.cancel_scope.cancel()
        finally:  # cancelled: every handler is, too, and has this long to tell its client
            with trio.CancelScope(shield=True):
                await server.close(_LAST_WORDS_S)


async def _drain(state: ServerState, config: HttpConfig) -> None:
    engine = state.engine
    engine.begin_drain()
    if not await engine.drained(config.drain_timeout_s):
        _log.warning("drain timed out: ending what still runs")
        engine.cancel_all(Unavailable("the server is shutting down", retry_after_s=5.0))
        await engine.drained(config.close_timeout_s)


class _Server:
    """The live connections of one server."""

    def __init__(self, app: object, config: HttpConfig) -> None:
        self._app = ASGIWrapper(app)  # type: ignore[arg-type]
        self._limits = config
        self._hypercorn = _hypercorn_config(config)
        self._context = WorkerContext(None)
        self._live: set[Connection] = set()
        self._empty = trio.Event()

    async def accept(
        self,
        listeners: list[trio.SocketListener],
        *,
        task_status: trio.TaskStatus[trio.CancelScope] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Takes connections until the scope that it reports is cancelled; those it took go on."""
        async with trio.open_nursery() as connections:
            with trio.CancelScope() as scope:
                task_status.started(scope)
                take = partial(self._take, connections)
                async with trio.open_nursery() as accepting:
                    for listener in listeners:
                        accepting.start_soon(accept_all, listener, take)

    async def close(self, timeout_s: float) -> None:
        """Lets idle and finishing connections go, and aborts the rest after ``timeout_s``."""
        await self._context.terminated.set()
        with trio.move_on_after(timeout_s):
            while self._live:
                await self._empty.wait()
        for connection in list(self._live):
            await connection.abort()

    def _take(self, connections: trio.Nursery, stream: trio.SocketStream) -> None:
        if len(self._live) >= self._limits.max_connections:
            connections.start_soon(_refuse, stream)
            return
        connection = Connection(self._app, self._hypercorn, self._limits, self._context, stream)
        self._live.add(connection)
        connections.start_soon(self._run, connection)

    async def _run(self, connection: Connection) -> None:
        try:
            await connection.run()
        finally:
            self._live.discard(connection)
            if not self._live:
                self._empty.set()
                self._empty = trio.Event()


async def _refuse(stream: trio.SocketStream) -> None:
    head = (
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
        b"content-length: %d\r\nconnection: close\r\n\r\n" % len(_FULL)
    )
    async with aclosing(stream):
        with suppress(OSError):
            os.write(stream.socket.fileno(), head + _FULL)


def _hypercorn_config(config: HttpConfig) -> Config:
    hypercorn = Config()
    hypercorn.errorlog = None
    hypercorn.accesslog = None
    hypercorn.keep_alive_timeout = config.keep_alive_s
    hypercorn.keep_alive_max_requests = 10**9
    hypercorn.include_server_header = False
    return hypercorn


def refuse_exposure(keys: KeyRing, config: HttpConfig) -> None:
    """Raise :class:`~pyserve.errors.PyserveError` where anyone on the network could use the server."""
    if keys.keys or config.allow_remote or _is_loopback(config.host):
        return
    raise PyserveError(
        f"refusing to listen on {config.host} without API keys: give a key file, or set allow_remote"
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _url(listener: trio.SocketListener) -> str:
    host, port = listener.socket.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
