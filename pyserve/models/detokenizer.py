"""Incremental detokenising: text as soon as it is certain, never half a character.

A token may hold any bytes, so a character may be spread over several tokens. Bytes that can still become
a character are kept back; those that no longer can turn into U+FFFD at once (one per maximal subpart, as
the Unicode standard recommends), so the deltas of any sequence add up to its full decoding.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable

_utf8 = codecs.getincrementaldecoder("utf-8")

Pieces = Callable[[int], bytes | str]


class IncrementalDetokenizer:
    """Turns token ids into text, one at a time, in constant time each.

    ``pieces`` gives a token's text where it is whole characters, its bytes where it is not (ids that the
    vocabulary lacks: empty). ``skipped`` ids have no text. ``strip_space`` drops one leading space of the
    whole text (the one that SentencePiece put there when encoding).
    """

    __slots__ = ("_decoder", "_partial", "_pieces", "_skipped", "_strip_space")

    def __init__(self, pieces: Pieces, *, skipped: frozenset[int], strip_space: bool) -> None:
        self._pieces = pieces
        self._skipped = skipped
        self._strip_space = strip_space
        self._decoder = _utf8("replace")
        self._partial = False

    @property
    def partial(self) -> bool:
        """Whether bytes of an unfinished character are being kept back."""
        return self._partial

    def push(self, token: int) -> str:
        """Text that ``token`` makes certain: possibly none, possibly that of earlier tokens too."""
        if token in self._skipped:
            return ""
        piece = self._pieces(token)
        if self._partial or type(piece) is bytes:
            data = piece if isinstance(piece, bytes) else piece.encode()
            text = self._decoder.decode(data)
            self._partial = bool(self._decoder.getstate()[0])
        else:
            text = str(piece)
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text

    def finish(self) -> str:
        """What was kept back, as U+FFFD; the detokenizer then starts afresh (no space to strip)."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._partial = False
        return text
