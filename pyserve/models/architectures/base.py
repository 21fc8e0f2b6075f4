"""What an architecture tells the checkpoint readers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyserve.errors import ModelError
from pyserve.models.architectures.weights import Rule
from pyserve.models.config import DecoderConfig
from pyserve.models.fields import Fields


@dataclass(frozen=True)
class HuggingFaceFormat:
    """How an architecture looks in a Hugging Face directory.

    ``read_config`` turns config.json into a DecoderConfig. Tensor names lose the first of ``prefixes`` they
    begin with before ``rules`` are matched; those matching ``ignored`` (a regular expression) are skipped.
    """

    model_types: tuple[str, ...]
    read_config: Callable[[Fields], DecoderConfig]
    rules: tuple[Rule, ...]
    prefixes: tuple[str, ...] = ("model.",)
    ignored: str = r"rotary_emb\.inv_freq$"


@dataclass(frozen=True)
class GGUFHeader:
    """What a GGUF file says about its model besides the weights.

    ``fields`` reads the keys of the architecture ("block_count" for "llama.block_count"). ``rope_factors`` is
    the rope_freqs tensor, by which each frequency is divided, or None. ``tied`` when there is no
    output.weight.
    """

    fields: Fields
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    rope_factors: tuple[float, ...] | None
    tied: bool


@dataclass(frozen=True)
class GGUFFormat:
    """How an architecture looks in a GGUF file; ``names`` are values of general.architecture."""

    names: tuple[str, ...]
    read_config: Callable[[GGUFHeader], DecoderConfig]
    rules: tuple[Rule, ...]
    ignored: str = r"^rope_freqs\.weight$"


@dataclass(frozen=True)
class Architecture:
    """One decoder family; ``title`` is what people call it."""

    title: str
    huggingface: HuggingFaceFormat
    gguf: GGUFFormat


def refuse_unless(fields: Fields, key: str, value: object, default: object) -> None:
    """Raises ModelError where a setting is other than the one the forward pass computes."""
    found = fields.raw(key, default)
    if found != value:
        raise ModelError(f"{fields.where}: {key} = {found!r} is not supported (only {value!r} is)")


def end_of_text(fields: Fields) -> tuple[int, ...]:
    """Every id that ends a text: generation_config.json's first, then config.json's."""
    ids = fields.token_ids("generation_eos_token_id") + fields.token_ids("eos_token_id")
    return tuple(dict.fromkeys(ids))


def first_of(ids: tuple[int, ...]) -> int | None:
    """The first id, or None."""
    return ids[0] if ids else None
