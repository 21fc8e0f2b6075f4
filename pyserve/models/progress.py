"""How far a download is, for whoever waits at the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn


class ProgressTask(Protocol):
    """One thing that takes a while, measured in bytes."""

    def update(self, done_bytes: int, total_bytes: int | None = None) -> None:
        """Sets how much is done, and how much there is where that is known."""


ProgressReporter = Callable[[str], AbstractContextManager[ProgressTask]]
"""Called with a description: gives the task, and ends its display on leaving. :func:`silent` and
:func:`rich_bar` are two; a test or a GUI may pass its own."""


class _Silent:
    def update(self, done_bytes: int, total_bytes: int | None = None) -> None:
        pass


@contextmanager
def silent(description: str) -> Iterator[ProgressTask]:
    """Shows nothing."""
    del description
    yield _Silent()


@contextmanager
def rich_bar(description: str) -> Iterator[ProgressTask]:
    """A progress bar on standard error; only its last state where that is not a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(description, total=None)

        class Bar:
            def update(self, done_bytes: int, total_bytes: int | None = None) -> None:
                progress.update(task, completed=done_bytes, total=total_bytes)

        yield Bar()
