"""A server as a process: started in a session of its own, watched through /proc, ended by its id."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from contenders import Contender

_TICKS = os.sysconf("SC_CLK_TCK")
_POLL_S = 0.02
_STOP_S = 15.0
_SETTLED = 0.1  # of a core
_SETTLE_S = 60.0


class ServerFailed(Exception):
    """The server ended, or was not ready in time; the message has the end of its log."""


@dataclass(frozen=True)
class Running:
    """A ready server. ``ready_s`` is the time from exec until /health answered 200."""

    process: subprocess.Popen[bytes]
    url: str
    ready_s: float

    def members(self) -> Iterator[Path]:
        """The /proc directories of the processes in its session."""
        for path in Path("/proc").iterdir():
            if path.name.isdigit():
                with contextlib.suppress(OSError):
                    if os.getsid(int(path.name)) == self.process.pid:
                        yield path

    def cpu_s(self) -> float:
        """CPU time of all its processes so far, with that of children that have ended."""
        total = 0.0
        for path in self.members():
            with contextlib.suppress(OSError):
                fields = (path / "stat").read_text(encoding="latin-1").rpartition(")")[2].split()
                total += sum(map(int, fields[11:15])) / _TICKS
        return total

    def settle(self) -> None:
        """Waits until the server does little for a second, at most a minute: start-up may outlast ready."""
        until, before = time.monotonic() + _SETTLE_S, self.cpu_s()
        while time.monotonic() < until:
            time.sleep(1)
            now = self.cpu_s()
            if now - before < _SETTLED:
                return
            before = now

    def peak_rss_mib(self) -> float:
        """Sum of the peak resident sizes of its processes: pages that two of them share count twice."""
        total = 0
        for path in self.members():
            with contextlib.suppress(OSError):
                for line in (path / "status").read_text(encoding="latin-1").splitlines():
                    if line.startswith("VmHWM:"):
                        total += int(line.split()[1])
        return total / 1024


@contextlib.contextmanager
def running(side: Contender, port: int, log: Path) -> Iterator[Running]:
    """Start the server, wait until it is ready, and end it (with all its children) on the way out."""
    url = f"http://127.0.0.1:{port}"
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            side.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **side.environment},
            start_new_session=True,
        )
    try:
        _wait_ready(process, url + side.health, started + side.ready_s, log)
        yield Running(process, url, time.monotonic() - started)
    finally:
        _stop(process)


def _wait_ready(process: subprocess.Popen[bytes], url: str, until: float, log: Path) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < until:
        if process.poll() is not None:
            raise ServerFailed(f"ended with {process.returncode} before it was ready\n{_tail(log)}")
        with contextlib.suppress(OSError), direct.open(url, timeout=2) as answer:
            if answer.status == 200:
                return
        time.sleep(_POLL_S)
    raise ServerFailed(f"not ready in time\n{_tail(log)}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """TERM, then KILL, to the session's process group, which is ours alone."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
            if number == signal.SIGKILL:
                return
    process.wait(_STOP_S)


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"  | {line[:200]}" for line in lines[-12:])


@dataclass(frozen=True)
class MachineTime:
    """Seconds that all cores together were ``busy`` and ``stolen`` by the hypervisor since boot."""

    busy: float
    stolen: float

    @classmethod
    def now(cls) -> MachineTime:
        """Read /proc/stat."""
        line = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0]
        user, nice, system, _, _, irq, softirq, steal = map(int, line.split()[1:9])
        return cls((user + nice + system + irq + softirq) / _TICKS, steal / _TICKS)
