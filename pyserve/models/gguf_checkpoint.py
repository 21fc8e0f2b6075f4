"""A GGUF file as a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pyserve.errors import ModelError
from pyserve.models.architectures import GGUFHeader, find_gguf
from pyserve.models.architectures.base import first_of
from pyserve.models.architectures.weights import plan_weights
from pyserve.models.checkpoint import Checkpoint
from pyserve.models.fields import Fields
from pyserve.models.gguf import GGUFFile
from pyserve.models.tokenizer_gguf import end_token_ids

if TYPE_CHECKING:
    from pyserve.models.tokenizer import Tokenizer


def open_gguf(path: Path, name: str | None = None) -> Checkpoint:
    """Opens a GGUF file; ``name`` defaults to the file's, without its ending.

    Raises ModelError where it is damaged, one part of several, or of an unsupported architecture.
    """
    file = GGUFFile(path)
    where = str(path)
    if Fields(file.metadata, where).integer("split.count", 1) > 1:
        raise ModelError(
            f"{path} is one part of a split GGUF; join the parts first: llama-gguf-split --merge"
        )
    architecture = find_gguf(Fields(file.metadata, where).text("general.architecture"), where)
    try:
        config = architecture.gguf.read_config(_header(file))
    except (ValueError, ArithmeticError) as error:  # numbers that do not fit together
        raise ModelError(f"{path}: {error}") from error
    weights = plan_weights(
        architecture.gguf.rules,
        ((key, key) for key in file.tensors),
        config,
        ignored=architecture.gguf.ignored,
        where=where,
    )

    def make_tokenizer() -> Tokenizer:
        from pyserve.models.tokenizer import Tokenizer

        return Tokenizer.from_gguf(file.metadata)

    return Checkpoint(name or path.stem, path, config, weights, file, make_tokenizer)


def _header(file: GGUFFile) -> GGUFHeader:
    where = str(file.path)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{where} lacks token_embd.weight")
    name = Fields(file.metadata, where).text("general.architecture")
    factors: tuple[float, ...] | None = None
    if "rope_freqs.weight" in file.tensors:
        factors = tuple(file.load("rope_freqs.weight").flatten().tolist())
    return GGUFHeader(
        fields=Fields(file.metadata, where, f"{name}."),
        bos_token_id=first_of(
            Fields(file.metadata, where, "tokenizer.ggml.").token_ids("bos_token_id")
        ),
        eos_token_ids=end_token_ids(file.metadata),
        vocab_size=embedding.shape[0],
        rope_factors=factors,
        tied="output.weight" not in file.tensors,
    )
