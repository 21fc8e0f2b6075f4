"""Incremental detokenising adds up to the full decoding, and never shows half a character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyserve.models.tokenizer import Tokenizer
from tests.models.tokenizer_samples import CORPUS, sentencepiece_like, small_tokenizer

TOKENIZERS = {"byte_level": small_tokenizer(), "sentencepiece": sentencepiece_like()}


def deltas(tokenizer: Tokenizer, ids: list[int], *, skip: bool) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), skip=st.booleans())
def test_deltas_of_any_tokens_add_up_to_the_decoding_of_their_bytes(
    name: str, data: st.DataObject, skip: bool
) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    text = "".join(deltas(tokenizer, ids, skip=skip))
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)
    shown = [i for i in ids if not (skip and i in tokenizer.special_ids)]
    raw = b"".join(map(tokenizer.token_bytes, shown)).decode(errors="replace")
    assert text == (raw.removeprefix(" ") if name == "sentencepiece" else raw)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", CORPUS)
def test_text_comes_back_without_replacement_characters_on_the_way(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    parts = deltas(tokenizer, tokenizer.encode(text, add_special_tokens=False), skip=True)
    if name == "sentencepiece":
        text = text.replace("\u2581", " ")  # its mark for a space, so the two cannot be told apart
    assert "".join(parts) == text
    assert parts[-1] == ""
    assert sum(part.count("\ufffd") for part in parts) == text.count("\ufffd")


def test_bytes_that_can_no_longer_become_a_character_are_replaced_at_once() -> None:
    tokenizer = sentencepiece_like()
    detokenizer = tokenizer.detokenizer(continues=True)
    byte = {value: 3 + value for value in range(256)}
    assert detokenizer.push(byte[0xE2]) == ""
    assert detokenizer.push(byte[0x82]) == ""
    assert detokenizer.partial
    assert detokenizer.push(byte[0x41]) == "\ufffdA"
    assert detokenizer.push(byte[0xFF]) == "\ufffd"
    assert detokenizer.push(byte[0xF0]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert not detokenizer.partial


def test_only_a_text_from_its_start_loses_the_space_that_encoding_added() -> None:
    tokenizer = sentencepiece_like()
    ids = tokenizer.encode("ab ab", add_special_tokens=False)
    assert tokenizer.decode(ids) == "ab ab"
    continued = tokenizer.detokenizer(continues=True)
    assert "".join(map(continued.push, ids)) == " ab ab"


def test_special_tokens_are_skipped_or_shown() -> None:
    tokenizer = small_tokenizer()
    ids = tokenizer.encode("a<|im_end|>b", parse_special=True)
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|>b"


def test_a_padded_row_of_the_output_layer_has_no_text() -> None:
    tokenizer = small_tokenizer()
    assert tokenizer.detokenizer().push(tokenizer.vocab_size + 5) == ""
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""
