"""Text to token ids and back, on the ``tokenizers`` library.

A :class:`Tokenizer` comes from a Hugging Face directory (``tokenizer.json``) or is rebuilt from the
metadata of a GGUF file; both readers hand over a :class:`TokenizerParts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer as Backend

from pyserve.errors import InvalidRequest
from pyserve.models.chat_template import ChatTemplate
from pyserve.models.detokenizer import IncrementalDetokenizer
from pyserve.models.guard import GuardedEncoder, encode_text
from pyserve.models.vocabulary import BytesOf, byte_level_bytes


@dataclass(frozen=True)
class TokenizerParts:
    """What a checkpoint says about its tokenizer.

    ``backend`` has the model, the added tokens, normalizer and pre-tokenizer. ``bytes_of`` reads the
    vocabulary's spelling. ``prefix_ids`` and ``suffix_ids`` are what ``add_special_tokens`` adds.
    ``strips_space``: encoding puts a space before the text, decoding takes it away. ``named`` holds the
    special tokens that templates know by name (``bos_token``, ``eos_token``, ...), as text.
    """

    backend: Backend
    bytes_of: BytesOf
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    strips_space: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    named: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None


class Tokenizer:
    """Encodes and decodes; safe to use from several threads.

    ``vocab_size`` is the highest id plus one (a model's logits may be wider, padded). ``special_ids`` are
    control tokens: never made from plain text, and without text when decoding skips them.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        backend = parts.backend
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._bytes_of = parts.bytes_of
        self._prefix, self._suffix = list(parts.prefix_ids), list(parts.suffix_ids)
        self._strips_space = parts.strips_space
        self._added = backend.get_added_tokens_decoder()
        self.bos_token_id = parts.bos_token_id
        self.eos_token_ids = parts.eos_token_ids
        self.special_ids = frozenset(id_ for id_, token in self._added.items() if token.special)
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._pieces: list[bytes | str | None] = [None] * self.vocab_size
        self._guard = GuardedEncoder(backend)
        self.chat_template = (
            None
            if parts.chat_template is None
            else ChatTemplate(parts.chat_template, named=parts.named, guard=self._guard)
        )

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """From a Hugging Face directory. Raises ModelError where it has no ``tokenizer.json``."""
        from pyserve.models.tokenizer_directory import read_directory

        return cls(read_directory(path))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """From a GGUF file's metadata (``tokenizer.ggml.*``). Raises ModelError on an unknown kind."""
        from pyserve.models.tokenizer_gguf import read_metadata

        return cls(read_metadata(metadata))

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Token ids of ``text``.

        ``add_special_tokens`` adds what the model was trained to see around a text (mostly BOS).
        ``parse_special`` reads control tokens spelled in ``text`` as control; otherwise they are text.
        Raises InvalidRequest for text that is not Unicode (an unpaired surrogate).
        """
        ids = encode_text(self._backend, text) if parse_special else self._guard.encode(text)
        return self._prefix + ids + self._suffix if add_special_tokens else ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``, with U+FFFD for bytes that are no UTF-8. Raises InvalidRequest on unknown ids."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        texts = []
        for id_ in ids:
            if not 0 <= id_ < self.vocab_size:
                raise InvalidRequest(
                    f"Token id {id_} is not in the vocabulary (0 to {self.vocab_size - 1}).",
                    param="tokens",
                )
            texts.append(detokenizer.push(id_))
        return "".join(texts) + detokenizer.finish()

    def detokenizer(
        self, *, skip_special_tokens: bool = True, continues: bool = False
    ) -> IncrementalDetokenizer:
        """An incremental decoder; ``continues`` for text that follows a prompt, whose spaces all count."""
        return IncrementalDetokenizer(
            self._piece,
            skipped=self.special_ids if skip_special_tokens else frozenset(),
            strip_space=self._strips_space and not continues,
        )

    def token_bytes(self, id_: int) -> bytes:
        """The bytes that a token stands for (a control token: its spelling; an unknown id: none)."""
        piece = self._piece(id_)
        return piece.encode() if isinstance(piece, str) else piece

    def token_text(self, id_: int) -> str:
        """A token for people: its text, or ``bytes:\\xe2\\x82`` where it is no whole characters."""
        piece = self._piece(id_)
        if isinstance(piece, str):
            return piece
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def token_id(self, spelling: str) -> int | None:
        """Id of the token that the vocabulary spells like this, None where there is none."""
        return self._backend.token_to_id(spelling)

    def _piece(self, id_: int) -> bytes | str:
        if not 0 <= id_ < self.vocab_size:
            return ""  # sampled from a padded row of the output layer
        piece = self._pieces[id_]
        if piece is None:
            piece = self._pieces[id_] = self._read_piece(id_)
        return piece

    def _read_piece(self, id_: int) -> bytes | str:
        added = self._added.get(id_)
        if added is not None and self._bytes_of is byte_level_bytes:
            return added.content  # spelled as it reads, not in the byte alphabet
        spelling = self._backend.id_to_token(id_)
        if spelling is None:  # a hole in the vocabulary
            return ""
        data = self._bytes_of(spelling)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data


def load_tokenizer(source: Path | Mapping[str, object]) -> Tokenizer:
    """A tokenizer from a Hugging Face directory, or from a GGUF file's metadata."""
    if isinstance(source, Path):
        return Tokenizer.from_directory(source)
    return Tokenizer.from_gguf(source)
