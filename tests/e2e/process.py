"""``pyserve serve`` as a process of its own, as an operator starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

DEADLINE_S = 120.0
SMALL = ("--port", "0", "--log-format", "json", "--kv-memory", "128MiB", "--context-length", "1024")


class Server:
    """The process and what it has logged; ``ready`` is the line that says where it answers."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        self.ready = self.wait_for("ready")

    @property
    def url(self) -> str:
        return self.ready["urls"][0]

    def wait_for(self, event: str) -> dict[str, Any]:
        """Read the log up to the line with ``event``."""
        assert self.process.stderr is not None
        for text in self.process.stderr:
            if text.startswith("{"):
                self.lines.append(json.loads(text))
                if self.lines[-1].get("event", "").startswith(event):
                    return self.lines[-1]
        raise AssertionError(f"ended without {event!r}: {self.lines}")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """The exit code, with the rest of the log read."""
        assert self.process.stderr is not None
        self.lines += [json.loads(text) for text in self.process.stderr if text.startswith("{")]
        return self.process.wait(DEADLINE_S)


def start(*arguments: str, **environ: str) -> subprocess.Popen[str]:
    """``pyserve serve`` with ``arguments``, its log on a pipe."""
    return subprocess.Popen(
        [sys.executable, "-m", "pyserve", "serve", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environ},
    )


@contextmanager
def running(*arguments: str, **environ: str) -> Iterator[Server]:
    """A server with the default model and a small cache; killed at the end where it still runs."""
    process = start(*SMALL, *arguments, **environ)
    try:
        yield Server(process)
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()
