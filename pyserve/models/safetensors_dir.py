"""A Hugging Face directory as a checkpoint: config.json, safetensors (one or several), tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pyserve.errors import ModelError
from pyserve.models.architectures import find_huggingface
from pyserve.models.architectures.weights import plan_weights
from pyserve.models.checkpoint import Checkpoint
from pyserve.models.fields import Fields
from pyserve.models.source import StoredTensor

if TYPE_CHECKING:
    from pyserve.models.tokenizer import Tokenizer

INDEX = "model.safetensors.index.json"
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def open_directory(path: Path, name: str | None = None) -> Checkpoint:
    """Opens a directory as ``save_pretrained`` writes it; ``name`` defaults to the directory's.

    Raises ModelError where a file is missing or damaged, the weights are pickled or quantised in a way that
    is not supported, or the architecture is not.
    """
    where = str(path)
    fields = read_config(path)
    if fields.has("quantization_config"):
        method = Fields(fields.mapping("quantization_config") or {}, where).raw("quant_method")
        raise ModelError(
            f"{where}: weights quantised with {method} are not supported; a GGUF file of the model may be"
        )
    architecture = find_huggingface(fields.text("model_type"), where)
    try:
        config = architecture.huggingface.read_config(fields)
    except (ValueError, ArithmeticError) as error:  # numbers that do not fit together
        raise ModelError(f"{where}: {error}") from error
    source = SafetensorsFiles(path)
    weights = plan_weights(
        architecture.huggingface.rules,
        ((_without(key, architecture.huggingface.prefixes), key) for key in source.files),
        config,
        ignored=architecture.huggingface.ignored,
        where=where,
    )
    source.check(weight.key for weight in weights)

    def make_tokenizer() -> Tokenizer:
        from pyserve.models.tokenizer import Tokenizer

        return Tokenizer.from_directory(path)

    return Checkpoint(name or path.resolve().name, path, config, weights, source, make_tokenizer)


def read_config(path: Path) -> Fields:
    """config.json of a directory, with generation_config.json's end tokens as ``generation_eos_token_id``."""
    values = dict(_read_json(path / "config.json"))
    generation = path / "generation_config.json"
    if generation.is_file():
        values["generation_eos_token_id"] = _read_json(generation).get("eos_token_id")
    return Fields(values, str(path / "config.json"))


def _read_json(path: Path) -> Mapping[str, object]:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} should hold a JSON object")
    return values


def _without(key: str, prefixes: tuple[str, ...]) -> str:
    for prefix in prefixes:
        if key.startswith(prefix):
            return key[len(prefix) :]
    return key


class SafetensorsFiles:
    """The tensors of a directory's safetensors files; ``files`` says which one has which.

    Opened and mapped on construction. Raises ModelError where there are none, or one is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self._opened: dict[Path, Any] = {}
        self.files: dict[str, Path] = {}
        for file in self._names(path):
            with _readable(file):
                handle: Any = safe_open(file, framework="pt")
                self._opened[file] = handle
                self.files.update(dict.fromkeys(handle.keys(), file))

    def stored(self, name: str) -> StoredTensor:
        """The header's word on a tensor."""
        file = self.files[name]
        with _readable(file):
            part = self._opened[file].get_slice(name)
            shape, dtype = tuple(part.get_shape()), str(part.get_dtype())
        tensor = StoredTensor(shape, dtype, 0)
        return StoredTensor(shape, dtype, tensor.num_elements * _ELEMENT_BYTES.get(dtype, 1))

    def load(self, name: str) -> Tensor:
        """The tensor; float64 comes as float32."""
        file = self.files[name]
        with _readable(file):
            tensor: Tensor = self._opened[file].get_tensor(name)
        return tensor.float() if tensor.dtype == torch.float64 else tensor

    def load_blocks(self, name: str) -> Tensor:
        """Raises ValueError: nothing here is quantised."""
        raise ValueError(f"{name} is {self.stored(name).dtype}, which has no blocks")

    def release(self, name: str) -> None:
        """Nothing: tensors are copies."""

    def check(self, names: Iterator[str]) -> None:
        """Raises ModelError where a tensor is of a type that the decoder does not take."""
        for name in names:
            dtype = self.stored(name).dtype
            if dtype not in _ELEMENT_BYTES:
                raise ModelError(
                    f"{self.files[name]}: {name} is {dtype}, which is not supported"
                    f" ({', '.join(_ELEMENT_BYTES)} are)"
                )

    @staticmethod
    def _names(path: Path) -> list[Path]:
        index = path / INDEX
        if index.is_file():
            weight_map = Fields(_read_json(index), str(index)).mapping("weight_map") or {}
            names = sorted({str(name) for name in weight_map.values()})
            if any(Path(name).name != name for name in names):
                raise ModelError(f"{index} names files outside its directory")
            missing = [name for name in names if not (path / name).is_file()]
            if missing:
                raise ModelError(f"{path} is incomplete: {', '.join(missing)} missing")
            return [path / name for name in names]
        if (path / "model.safetensors").is_file():
            return [path / "model.safetensors"]
        pickles = sorted(file.name for pattern in PICKLE_PATTERNS for file in path.glob(pattern))
        if pickles:
            raise ModelError(refuse_pickle(f"{path} ({pickles[0]})"))
        raise ModelError(f"{path} has no weights: neither {INDEX} nor model.safetensors")


def refuse_pickle(what: str) -> str:
    """Why pickled weights are not read, and what to do instead."""
    return (
        f"{what}: pickled weights are refused, because loading them runs whatever code they carry. Take the"
        " model's safetensors or GGUF version, or convert it once where you trust it:"
        " AutoModelForCausalLM.from_pretrained(...).save_pretrained(directory)"
    )


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}; is the download complete?") from error
