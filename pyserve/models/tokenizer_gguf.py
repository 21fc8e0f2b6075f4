"""A tokenizer rebuilt from the metadata of a GGUF file (``tokenizer.ggml.*``).

Two kinds: ``gpt2`` is byte-level BPE with its merges and a named pre-tokenizer; ``llama`` is SentencePiece
BPE, whose merges follow from the scores of the pieces. Ids are those of the original tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from functools import partial
from typing import TypeVar

from tokenizers import AddedToken, Regex, models, normalizers
from tokenizers import Tokenizer as Backend

from pyserve.errors import ModelError
from pyserve.models.pretokenizers import splitting_of
from pyserve.models.tokenizer import TokenizerParts
from pyserve.models.vocabulary import (
    SPACE_MARK,
    BytesOf,
    byte_level_bytes,
    sentencepiece_bytes,
)

Metadata = Mapping[str, object]

T = TypeVar("T")


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Ends of a turn or a text: files often name only one of them in `eos_token_id`.
_ENDS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>",
     "<EOT>", "<|EOT|>", "<|END_OF_TURN_TOKEN|>", "<|endofturn|>", "<|return|>"}
)  # fmt: skip

_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # as the format spells it
    "mask_token": "mask_token_id",
}


def read_metadata(metadata: Metadata) -> TokenizerParts:
    """What the file says of its tokenizer. Raises ModelError on a kind that is not supported."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise ModelError("The GGUF file holds no tokenizer (tokenizer.ggml.model is missing).")
    reader = {"gpt2": _read_byte_level, "llama": _read_sentencepiece}.get(str(kind))
    if reader is None:
        raise ModelError(f"The GGUF file's tokenizer {kind!r} is not supported (gpt2, llama are).")
    try:
        return reader(metadata)
    except ModelError:
        raise
    except Exception as error:  # the library raises bare Exceptions on merges that do not fit
        raise ModelError(f"The GGUF file's tokenizer is damaged: {error}") from error


def _read_byte_level(metadata: Metadata) -> TokenizerParts:
    tokens = _tokens(metadata)
    splitting = splitting_of(metadata, len(tokens))
    merges = [_split_merge(merge) for merge in _strings(metadata, "tokenizer.ggml.merges")]
    vocab = {token: id_ for id_, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=splitting.ignore_merges))
    if splitting.normalizer is not None:
        backend.normalizer = splitting.normalizer()
    backend.pre_tokenizer = splitting.pre_tokenizer()
    _add_tokens(backend, metadata, tokens)
    return _parts(metadata, tokens, backend, byte_level_bytes, adds_bos=splitting.adds_bos)


def _split_merge(merge: str) -> tuple[str, str]:
    """The two sides. The left may itself start with a space in files that do not spell bytes."""
    left, _, right = merge[1:].partition(" ")
    return merge[:1] + left, right


def _read_sentencepiece(metadata: Metadata) -> TokenizerParts:
    tokens = _tokens(metadata)
    prefix_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    if not prefix_space:
        # User-defined pieces hold spaces where all others hold marks (Gemma's "  ").
        types = _types(metadata, len(tokens))
        user_defined = (id_ for id_, kind in enumerate(types) if kind == TokenType.USER_DEFINED)
        for id_ in user_defined:
            tokens[id_] = tokens[id_].replace(" ", SPACE_MARK)
    backend = Backend(_sentencepiece_model(metadata, tokens))
    backend.normalizer = _sentencepiece_normalizer(metadata, prefix_space)
    # Matched after spaces became marks, like SentencePiece does; but a normalizer that puts a space in
    # front would do so to the pieces as well.
    _add_tokens(backend, metadata, tokens, normalized=not prefix_space)
    return _parts(
        metadata, tokens, backend, sentencepiece_bytes, adds_bos=True, strips_space=prefix_space
    )


def _sentencepiece_normalizer(metadata: Metadata, prefix_space: bool) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if metadata.get("tokenizer.ggml.precompiled_charsmap") is not None:
        charsmap = _list(metadata, "tokenizer.ggml.precompiled_charsmap", int)
        steps.append(normalizers.Precompiled(bytes(value & 0xFF for value in charsmap)))
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces", False):
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if prefix_space:
        steps.append(normalizers.Prepend(SPACE_MARK))
    steps.append(normalizers.Replace(" ", SPACE_MARK))
    return normalizers.Sequence(steps)


def _sentencepiece_model(metadata: Metadata, tokens: Sequence[str]) -> models.BPE:
    """BPE with the merges that the pieces imply, best score first."""
    types = _types(metadata, len(tokens))
    vocab = {token: id_ for id_, token in enumerate(tokens)}
    usable = {
        t: id_ for t, id_ in vocab.items() if types[id_] in (TokenType.NORMAL, TokenType.UNUSED)
    }
    scores = _scores(metadata, len(tokens))
    ranked = [
        (-scores[id_], id_, usable[left], usable[right], left, right)
        for token, id_ in usable.items()
        for cut in range(1, len(token))
        if (left := token[:cut]) in usable and (right := token[cut:]) in usable
    ]
    ranked.sort()
    unknown = _token_id(metadata, "unknown_token_id", len(tokens))
    has_bytes = any(kind == TokenType.BYTE for kind in types)
    return models.BPE(
        vocab=vocab,
        merges=[(left, right) for *_, left, right in ranked],
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=has_bytes,
    )


def _add_tokens(
    backend: Backend, metadata: Metadata, tokens: Sequence[str], *, normalized: bool = False
) -> None:
    """Control tokens (never made of plain text) and user-defined ones (always matched whole).

    ``normalized``: user-defined ones are matched in the normalized text.
    """
    added = []
    for token, kind in zip(tokens, _types(metadata, len(tokens)), strict=True):
        if not token:
            continue
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            added.append(AddedToken(token, normalized=False, special=True))
        elif kind == TokenType.USER_DEFINED:
            added.append(AddedToken(token, normalized=normalized, special=False))
    backend.add_tokens(added)


def end_token_ids(metadata: Metadata) -> tuple[int, ...]:
    """Every id that ends a text or a turn: those that the metadata names, and control tokens spelled so."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        return ()
    named = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    ends = [id_ for id_ in named if isinstance(id_, int) and 0 <= id_ < len(tokens)]
    types = _types(metadata, len(tokens))
    ends += [
        id_
        for id_, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == TokenType.CONTROL and token in _ENDS
    ]
    return tuple(dict.fromkeys(ends))


def _parts(
    metadata: Metadata,
    tokens: Sequence[str],
    backend: Backend,
    bytes_of: BytesOf,
    *,
    adds_bos: bool,
    strips_space: bool = False,
) -> TokenizerParts:
    token_id = partial(_token_id, metadata, count=len(tokens))
    bos, eos = token_id("bos_token_id"), token_id("eos_token_id")
    prefix = metadata.get("tokenizer.ggml.add_bos_token", adds_bos) and bos is not None
    suffix = metadata.get("tokenizer.ggml.add_eos_token", False) and eos is not None
    template = metadata.get("tokenizer.chat_template")
    return TokenizerParts(
        backend=backend,
        bytes_of=bytes_of,
        prefix_ids=(bos,) if prefix and bos is not None else (),
        suffix_ids=(eos,) if suffix and eos is not None else (),
        strips_space=strips_space,
        bos_token_id=bos,
        eos_token_ids=end_token_ids(metadata),
        named={
            name: tokens[id_] for name, key in _NAMED.items() if (id_ := token_id(key)) is not None
        },
        chat_template=template if isinstance(template, str) else None,
    )


def _tokens(metadata: Metadata) -> list[str]:
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    # A few converters pad with the same spelling over and over; ids must stay, so later ones get a name.
    seen: set[str] = set()
    for id_, token in enumerate(tokens):
        if token in seen:
            tokens[id_] = f"<unused:{id_}>"
        seen.add(tokens[id_])
    return tokens


def _strings(metadata: Metadata, key: str) -> list[str]:
    values = _list(metadata, key, str)
    return [str(value) for value in values]


def _types(metadata: Metadata, count: int) -> list[int]:
    if metadata.get("tokenizer.ggml.token_type") is None:
        return [TokenType.NORMAL] * count
    values = _list(metadata, "tokenizer.ggml.token_type", int, count)
    return [int(value) for value in values]


def _scores(metadata: Metadata, count: int) -> list[float]:
    values = _list(metadata, "tokenizer.ggml.scores", float, count)
    return [float(value) for value in values]


def _list(metadata: Metadata, key: str, kind: type[T], count: int | None = None) -> list[T]:
    """A list of ``count`` values of one kind (floats may be whole numbers)."""
    values = metadata.get(key)
    if values is None:
        raise ModelError(f"The GGUF file lacks {key}.")
    kinds = (int, float) if kind is float else kind
    if not isinstance(values, list) or not all(isinstance(value, kinds) for value in values):
        raise ModelError(f"The GGUF file's {key} is no list of {kind.__name__}.")
    if count is not None and len(values) != count:
        raise ModelError(f"The GGUF file's {key} has {len(values)} values for {count} tokens.")
    return values


def _token_id(metadata: Metadata, key: str, count: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}")
    return value if isinstance(value, int) and 0 <= value < count else None
