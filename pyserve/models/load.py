"""One entrance for every kind of checkpoint."""

from __future__ import annotations

from pathlib import Path

from pyserve.errors import ModelError
from pyserve.models.checkpoint import Checkpoint
from pyserve.models.default import DEFAULT_MODEL, fetch_default
from pyserve.models.gguf_checkpoint import open_gguf
from pyserve.models.hub_reference import parse_reference
from pyserve.models.progress import ProgressReporter, rich_bar
from pyserve.models.safetensors_dir import open_directory, refuse_pickle

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def open_checkpoint(ref: str | None, *, progress: ProgressReporter = rich_bar) -> Checkpoint:
    """Opens what ``ref`` names: a GGUF file, a Hugging Face directory, a hub id, or the default model.

    None, or the default model's own name, means the default model. A hub id is "owner/name",
    "owner/name@revision" or "owner/name/file.gguf". What is not on disk is downloaded, ``progress`` showing
    how far. Only headers are read here. Raises ModelError, with what to do, for whatever cannot be served.
    """
    if ref is None or ref == DEFAULT_MODEL.name:
        return open_gguf(fetch_default(progress), DEFAULT_MODEL.name)
    path = Path(ref).expanduser()
    if path.is_dir():
        return _open_directory(path)
    if path.is_file():
        return _open_file(path)
    reference = None if _is_path(ref) else parse_reference(ref)
    if reference is None:
        raise ModelError(f"{ref} does not exist")
    from pyserve.models.hub import fetch_from_hub

    fetched = fetch_from_hub(reference)
    if fetched.is_file():
        return open_gguf(fetched)
    return open_directory(fetched, reference.repo)


def _open_directory(path: Path) -> Checkpoint:
    if (path / "config.json").is_file():
        return open_directory(path)
    match sorted(path.glob("*.gguf")):
        case [only]:
            return open_gguf(only)
        case []:
            raise ModelError(f"{path} holds neither config.json nor a GGUF file")
        case several:
            names = ", ".join(file.name for file in several)
            raise ModelError(f"{path} holds several GGUF files; name one: {names}")


def _open_file(path: Path) -> Checkpoint:
    if path.suffix in _PICKLES:
        raise ModelError(refuse_pickle(str(path)))
    if path.suffix == ".safetensors":
        raise ModelError(
            f"{path} needs its config.json beside it: name the directory, {path.parent}"
        )
    return open_gguf(path)


def _is_path(ref: str) -> bool:
    """Whether a name that is not on disk was meant to be: it looks like no hub id."""
    is_local = ref.startswith((".", "/", "~")) or "\\" in ref
    return is_local or (ref.endswith((".gguf", *_PICKLES)) and ref.count("/") < 2)
