"""Accepting connections: all that wait at once, and never an end of it for want of file descriptors.

Trio's own ``serve_listeners`` accepts one connection in a turn of its loop. While the loop is busy with a
thousand streams a turn takes long, and a burst of new clients would queue for seconds.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Callable

import structlog
import trio

_BURST = 16  # connections taken in one turn of the loop: each brings milliseconds of work
_EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS))
_EXHAUSTED_WAIT_S = 0.1
_log = structlog.get_logger("pyserve.http")

Take = Callable[[trio.SocketStream], None]


async def accept_all(listener: trio.SocketListener, take: Take) -> None:
    """Gives every connection to ``take``, in order, until cancelled; closes ``listener`` then."""
    async with listener:
        with socket.socket(fileno=os.dup(listener.socket.fileno())) as raw:
            raw.setblocking(False)
            while True:
                await trio.lowlevel.wait_readable(raw)
                for _ in range(_BURST):
                    try:
                        connection, _address = raw.accept()
                    except BlockingIOError:
                        break
                    except (
                        OSError
                    ) as error:  # mostly of that one connection: gone before it was taken
                        if error.errno in _EXHAUSTED:
                            _log.error("cannot accept a connection", error=repr(error))
                            await trio.sleep(_EXHAUSTED_WAIT_S)
                        break
                    take(trio.SocketStream(trio.socket.from_stdlib_socket(connection)))


def allow_files(count: int) -> None:
    """Raises this process's limit of open files to ``count``, or as near as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
