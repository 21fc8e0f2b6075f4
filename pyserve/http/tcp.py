"""Hypercorn's connection handling with what it lacks: bounded and fast writes, bounded heads, no surprises.

Hypercorn shields ``send_all``, so a client that stops reading would hold its connection, and the server's
shutdown, for ever; here it is cut off after ``write_timeout_s``. A write first tries the socket directly and
waits only when it is full, which halves the cost of a server-sent event. An exception in one connection
ends that connection only.
"""

from __future__ import annotations

import os

import structlog
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ConnectionState, LifespanState
from hypercorn.utils import parse_socket_addr

from pyserve.http.config import HttpConfig
from pyserve.http.protocol import Protocol

_WRITE_SLICE = 2**16
_log = structlog.get_logger("pyserve.http")


class Connection(TCPServer):
    """One client's connection, from accept to close."""

    def __init__(
        self,
        app: AppWrapper,
        config: Config,
        limits: HttpConfig,
        context: WorkerContext,
        stream: trio.SocketStream,
    ) -> None:
        super().__init__(app, config, context, LifespanState(), stream)  # type: ignore[arg-type]
        self._limits = limits
        self._stream: trio.SocketStream = stream
        self._idle_scope: trio.CancelScope | None = None
        self._reading = trio.CancelScope()
        self._ahead = bytearray()  # read while the protocol was not ready for more

    async def run(self) -> None:
        """Serves the connection until either side closes it."""
        try:
            await self._serve()
        except* OSError:
            pass  # gone before it was set up
        except* Exception as group:
            _log.error("connection failed", error=repr(group.exceptions), exc_info=group)
        finally:
            with trio.CancelScope(shield=True):
                await self._close()

    async def abort(self) -> None:
        """Closes the socket at once; whoever reads or writes it stops."""
        self._reading.cancel()
        await trio.aclose_forcefully(self._stream)

    async def _serve(self) -> None:
        socket = self._stream.socket
        client = parse_socket_addr(socket.family, socket.getpeername())
        server = parse_socket_addr(socket.family, socket.getsockname())
        async with TaskGroup() as task_group:
            self._task_group = task_group
            self.protocol = Protocol(
                self.app,
                self.config,
                self.context,
                task_group,
                ConnectionState({}),
                False,
                client,
                server,
                self.protocol_send,
                read_ahead=self._read_ahead,
            )
            await self.protocol.initiate()
            await self.idle_task.restart(task_group, self._idle_timeout)
            with self._reading:
                await self._read_data()
            await self.protocol.handle(Closed())

    async def protocol_send(self, event: Event) -> None:
        """Writes bytes within the time-out, or passes on what else the protocol says."""
        if not isinstance(event, RawData):
            await super().protocol_send(event)
        elif not await self._write(event.data):
            await self._lost()

    async def _lost(self) -> None:
        """The client has gone: whoever works for it is told, and nothing more is read."""
        await self.protocol.handle(Closed())
        self._reading.cancel()

    async def _write(self, data: bytes) -> bool:
        """True once the kernel has taken all of ``data``; False where the client is lost."""
        if self.send_lock.locked():
            await self.send_lock.acquire()
        else:
            try:
                sent = os.write(self._stream.socket.fileno(), data)
            except BlockingIOError:
                sent = 0
            except OSError:
                return False
            if sent == len(data):
                return True
            data = data[sent:]
            self.send_lock.acquire_nowait()  # no checkpoint since the write: the order of bytes holds
        try:
            return await self._write_slowly(memoryview(data))
        finally:
            self.send_lock.release()

    async def _write_slowly(self, data: memoryview) -> bool:
        try:
            for start in range(0, len(data), _WRITE_SLICE):
                with trio.move_on_after(self._limits.write_timeout_s, shield=True) as timeout:
                    await self._stream.send_all(data[start : start + _WRITE_SLICE])
                if timeout.cancelled_caught:
                    _log.info("client does not read: cut off")
                    await self.abort()
                    return False
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return False
        return True

    async def _read_data(self) -> None:
        while True:
            data = await self._receive()
            if self._idle_scope is not None:  # the head of a request has begun
                deadline = trio.current_time() + self._limits.header_timeout_s
                self._idle_scope.deadline = min(self._idle_scope.deadline, deadline)
            await self.protocol.handle(RawData(data))
            if not data:
                break

    async def _receive(self) -> bytes:
        """More bytes, those read ahead first; empty at the end."""
        if self._ahead:
            data = bytes(self._ahead)
            self._ahead.clear()
            return data
        try:
            return bytes(await self._stream.receive_some(MAX_RECV))
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            return b""

    async def _read_ahead(self) -> None:
        """Reads what the protocol cannot take yet, up to a limit; notices where the client leaves."""
        while len(self._ahead) < MAX_RECV:
            try:
                data = await self._stream.receive_some(MAX_RECV)
            except (trio.ClosedResourceError, trio.BrokenResourceError):
                data = b""
            if not data:
                await self._lost()
                return
            self._ahead += data

    async def _idle_timeout(self) -> None:
        with trio.move_on_after(self.config.keep_alive_timeout) as self._idle_scope:
            try:
                await self.context.terminated.wait()
            finally:
                self._idle_scope = None
        with trio.CancelScope(shield=True):
            await self._initiate_server_close()
