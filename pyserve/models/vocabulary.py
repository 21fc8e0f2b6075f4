"""How a vocabulary spells bytes: GPT-2's byte alphabet, and SentencePiece's ``▁`` and ``<0xAB>``."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

SPACE_MARK = (
    "\N{LOWER ONE EIGHTH BLOCK}"  # ▁, which stands for a space in SentencePiece vocabularies
)

BytesOf = Callable[[str], bytes]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte (Radford et al. 2019), as character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + n): byte for n, byte in enumerate(hidden)})
    return alphabet


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; one spelled outside the alphabet stands for its own UTF-8."""
    alphabet = byte_alphabet()
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    """Bytes of a SentencePiece token: ``<0xAB>`` is that byte, ``▁`` a space."""
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace(SPACE_MARK, " ").encode()


def plain_bytes(token: str) -> bytes:
    """Bytes of a token that is spelled as it reads."""
    return token.encode()
