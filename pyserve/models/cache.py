"""Where downloaded models are kept, and how two processes share that place."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyserve.errors import ModelError


def cache_directory() -> Path:
    """``PYSERVE_CACHE``, or ``pyserve`` in ``XDG_CACHE_HOME`` or ``~/.cache``. May not exist yet."""
    own = os.environ.get("PYSERVE_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "pyserve"


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Holds ``directory`` (made if absent) for this process alone; waits while another one does.

    The lock is the kernel's and dies with its process. Raises ModelError where the directory is not writable.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / ".lock").open("wb")
    except OSError as error:
        raise ModelError(
            f"the model cache {directory} cannot be written to ({error.strerror});"
            " PYSERVE_CACHE sets another place"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
