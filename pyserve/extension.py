"""The compiled extension ``pyserve._C``: found, compared with the installed torch, and only then loaded.

An extension that was never built, or was built for another torch, would otherwise fail with a missing
module or a symbol nobody knows. The build writes what it used into the file as text
(``csrc/build_info.cpp``), which is read here without loading it.
"""

from __future__ import annotations

import mmap
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from pathlib import Path
from types import ModuleType

_PACKAGE = Path(__file__).parent
_MARK = re.compile(rb"pyserve-build torch=([0-9][^\s;]*) cuda=([0-9]+|none);")
_REBUILD = "pip install -e ."


@dataclass(frozen=True, slots=True)
class BuildInfo:
    """What the extension was built with: torch's version, and CUDA's ("13.0"; None: without CUDA)."""

    torch: str
    cuda: str | None


def build_info() -> BuildInfo:
    """Read from the built file, without loading it.

    Raises ImportError where it was never built for this Python, or holds no build text.
    """
    path = _built_file(_PACKAGE)
    if path is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise ImportError(
            f"pyserve's compiled extension is not built for Python {version}"
            f" (no _C{EXTENSION_SUFFIXES[0]} in {_PACKAGE}). Build it: {_REBUILD}"
        )
    return _read(path)


def check() -> None:
    """Raise ImportError, saying what to do, unless the built extension fits the installed torch."""
    built = build_info()
    try:
        installed = metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise ImportError(f"torch is not installed; pyserve needs {built.torch}") from None
    if _public(installed) != _public(built.torch):
        raise ImportError(
            f"pyserve's extension was built for torch {built.torch}, but torch {installed} is installed."
            f" Rebuild it: {_REBUILD}   (or: pip install torch=={_public(built.torch)})"
        )
    if built.cuda is not None and "+cpu" in installed:
        raise ImportError(
            f"pyserve's extension was built with CUDA {built.cuda}, but torch {installed} has none."
            f" Rebuild it: {_REBUILD}"
        )


def _built_file(folder: Path) -> Path | None:
    candidates = (folder / f"_C{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((path for path in candidates if path.exists()), None)


def _read(path: Path) -> BuildInfo:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = _MARK.search(content)
        if found is None:
            raise ImportError(f"{path} says nothing about its build. Rebuild it: {_REBUILD}")
        torch_version, cuda = found[1].decode(), found[2].decode()
    if cuda == "none":
        return BuildInfo(torch_version, None)
    return BuildInfo(torch_version, f"{int(cuda) // 1000}.{int(cuda) % 1000 // 10}")


def _public(version: str) -> str:
    """Without the local part: 2.13.0+cpu and 2.13.0+cu130 share one C++ interface."""
    return version.partition("+")[0]


class ExtensionGuard:
    """A finder that never finds: it checks ``pyserve._C`` and loads torch's libraries before the import."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Part of the finder protocol; ``path`` and ``target`` are not needed."""
        del path, target
        if fullname == "pyserve._C":
            check()
            import torch  # noqa: F401 (the extension links against libraries that this loads)
        return None


def install_guard() -> None:
    """Put the guard in front of the import system, once."""
    if not any(isinstance(finder, ExtensionGuard) for finder in sys.meta_path):
        sys.meta_path.insert(0, ExtensionGuard())
