"""The compiled extension is refused, with what to do, before a wrong one can be loaded."""

from __future__ import annotations

from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from pyserve import extension


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the built file; only its text is read."""
    monkeypatch.setattr(extension, "_PACKAGE", tmp_path)
    return tmp_path / f"_C{EXTENSION_SUFFIXES[0]}"


def torch_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: {"torch": version}[name])


def test_built_extension_names_the_torch_that_is_installed() -> None:
    built = extension.build_info().torch
    assert built == metadata.version("torch").partition("+")[0]
    extension.check()


def test_missing_extension_says_how_to_build_it(built: Path) -> None:
    with pytest.raises(ImportError, match=r"not built for Python .*pip install -e"):
        extension.check()


def test_other_torch_is_refused_by_both_versions(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built.write_bytes(b"\x7fELF...pyserve-build torch=2.12.1 cuda=none;...")
    torch_version(monkeypatch, "2.13.0+cpu")
    with pytest.raises(ImportError, match=r"built for torch 2\.12\.1, but torch 2\.13\.0\+cpu"):
        extension.check()


def test_local_part_of_the_version_does_not_matter_without_cuda(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built.write_bytes(b"pyserve-build torch=2.13.0 cuda=none;")
    for version in ("2.13.0", "2.13.0+cpu", "2.13.0+cu130"):
        torch_version(monkeypatch, version)
        extension.check()


def test_cuda_extension_needs_a_cuda_torch(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built.write_bytes(b"pyserve-build torch=2.13.0 cuda=13000;")
    assert extension.build_info() == extension.BuildInfo("2.13.0", "13.0")
    torch_version(monkeypatch, "2.13.0+cpu")
    with pytest.raises(ImportError, match=r"with CUDA 13\.0"):
        extension.check()


def test_file_without_build_text_is_refused(built: Path) -> None:
    built.write_bytes(b"not an extension")
    with pytest.raises(ImportError, match="says nothing about its build"):
        extension.check()


def test_guard_checks_only_the_extension(built: Path) -> None:
    assert extension.ExtensionGuard.find_spec("pyserve.errors") is None
    with pytest.raises(ImportError, match="not built"):
        extension.ExtensionGuard.find_spec("pyserve._C")


def test_guard_is_installed_once() -> None:
    import sys

    extension.install_guard()
    assert sum(isinstance(f, extension.ExtensionGuard) for f in sys.meta_path) == 1
