"""Stop strings, held-back text and tokens that travel with their text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pyserve.core.events import FinishReason, Token
from pyserve.engine.text import TextAssembler, TextDelta
from pyserve.models.tokenizer import Tokenizer
from tests.models.tokenizer_samples import sentencepiece_like, small_tokenizer

BYTE_LEVEL = small_tokenizer()
PIECES = sentencepiece_like()
A, B, C, E_ACUTE = (PIECES.token_id(text) for text in "abc\u00e9")


def events(ids: list[int]) -> list[Token]:
    return [Token("r", 0, id_, None, 1) for id_ in ids]


def assemble(
    tokenizer: Tokenizer, ids: list[int], chunks: list[int], *, stop: list[str], include_stop: bool
) -> list[TextDelta]:
    """Pushes ``ids`` in chunks of the given sizes (over and over), then finishes."""
    assembler = TextAssembler(tokenizer, stop=stop, include_stop=include_stop)
    out: list[TextDelta] = []
    tokens, turn = events(ids), 0
    while tokens and assembler.stopped is None:
        size = chunks[turn % len(chunks)]
        out.append(assembler.push(tokens[:size]))
        tokens, turn = tokens[size:], turn + 1
    return [*out, assembler.finish(FinishReason.STOP)]


def twin(text: str, stop: list[str], include_stop: bool) -> tuple[str, str | None]:
    """The final text, and what stopped it, character by character."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            found = max(ending, key=len)
            return text[: end if include_stop else end - len(found)], found
    return text, None


def longest_held(text: str, stop: list[str]) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of a stop string."""
    return max(
        (n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])),
        default=0,
    )


stops = st.lists(st.text("abc\u00e9 ", min_size=1, max_size=5), max_size=4)
ids = st.lists(
    st.one_of(
        st.integers(259, PIECES.vocab_size - 1),  # pieces
        st.sampled_from([3 + ord(c) for c in "abc "] + [3 + 0xC3, 3 + 0xA9, 2]),  # bytes, EOS
    ),
    max_size=30,
)


@given(
    ids=ids, stop=stops, include_stop=st.booleans(), chunks=st.lists(st.integers(1, 4), min_size=1)
)
def test_assembled_text_is_the_twins_whatever_the_chunks(
    ids: list[int], stop: list[str], include_stop: bool, chunks: list[int]
) -> None:
    deltas = assemble(PIECES, ids, chunks, stop=stop, include_stop=include_stop)
    detokenizer = PIECES.detokenizer(continues=True)
    full = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
    text, stopped = twin(full, stop, include_stop)
    assert "".join(delta.text for delta in deltas) == text
    assert deltas[-1].stopped == stopped


@given(ids=ids, stop=stops)
def test_exactly_the_longest_possible_start_of_a_stop_string_is_held(
    ids: list[int], stop: list[str]
) -> None:
    assembler = TextAssembler(PIECES, stop=stop)
    detokenizer = PIECES.detokenizer(continues=True)
    so_far, released = "", ""
    for token in events(ids):
        so_far += detokenizer.push(token.token)
        delta = assembler.push([token])
        released += delta.text
        if delta.stopped is not None:
            return
        assert released == so_far[: len(so_far) - longest_held(so_far, stop)]


@given(
    ids=ids, stop=stops, include_stop=st.booleans(), chunks=st.lists(st.integers(1, 4), min_size=1)
)
def test_tokens_come_once_in_order_and_with_their_text(
    ids: list[int], stop: list[str], include_stop: bool, chunks: list[int]
) -> None:
    deltas = assemble(PIECES, ids, chunks, stop=stop, include_stop=include_stop)
    detokenizer = PIECES.detokenizer(continues=True)
    starts, length = [], 0
    for id_ in ids:
        starts.append(length)
        length += len(detokenizer.push(id_))
    sent = [token.token for delta in deltas for token in delta.tokens]
    offsets = [offset for delta in deltas for offset in delta.offsets]
    assert sent == ids[: len(sent)]
    assert offsets == starts[: len(sent)]
    if deltas[-1].stopped is None:
        assert sent == ids
    else:
        text = "".join(delta.text for delta in deltas)
        assert all(start <= len(text) for start in offsets)


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=40))
def test_without_stop_strings_text_is_the_incremental_decoding(ids: list[int]) -> None:
    deltas = assemble(BYTE_LEVEL, ids, [1], stop=[], include_stop=False)
    detokenizer = BYTE_LEVEL.detokenizer()
    assert [delta.text for delta in deltas] == [*map(detokenizer.push, ids), detokenizer.finish()]


def test_a_stop_string_across_tokens_is_cut_and_its_own_tokens_withheld() -> None:
    assembler = TextAssembler(PIECES, stop=("bc",))
    first = assembler.push(events([A, B]))
    assert (first.text, [t.token for t in first.tokens]) == ("a", [A])
    second = assembler.push(events([C, A]))
    assert (second.text, second.tokens, second.stopped) == ("", (), "bc")
    assert assembler.push(events([A])) == TextDelta(stopped="bc")
    assert assembler.finish(FinishReason.STOP) == TextDelta(stopped="bc")


def test_a_token_that_a_stop_string_cuts_is_released_with_what_is_left_of_it() -> None:
    ab = PIECES.token_id("ab")
    assembler = TextAssembler(PIECES, stop=("bc",))
    held = assembler.push(events([ab]))
    assert (held.text, held.tokens) == ("a", ())
    delta = assembler.push(events([C]))
    assert (delta.text, [t.token for t in delta.tokens], delta.offsets) == ("", [ab], (0,))


def test_include_stop_keeps_it_and_nothing_after() -> None:
    assembler = TextAssembler(PIECES, stop=("b",), include_stop=True)
    delta = assembler.push(events([A, PIECES.token_id("ab"), C]))
    assert (delta.text, delta.stopped) == ("aab", "b")


def test_stop_tokens_have_text_only_with_include_stop() -> None:
    for include_stop, text in ((False, "a"), (True, "ab")):
        assembler = TextAssembler(PIECES, include_stop=include_stop, stop_token_ids=(B,))
        assert assembler.push(events([A, B])).text == text


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    assembler = TextAssembler(PIECES, stop=("b",), min_tokens=2)
    delta = assembler.push(events([B, B, A, B]))
    assert (delta.text, delta.stopped) == ("bba", "b")


def test_a_half_character_at_the_end_is_dropped_only_when_the_length_cut_it() -> None:
    half = events([A, 3 + 0xC3])
    for reason, text in ((FinishReason.LENGTH, ""), (FinishReason.STOP, "\ufffd")):
        assembler = TextAssembler(PIECES)
        delta = assembler.push(half)
        assert (delta.text, len(delta.tokens)) == ("a", 1)
        last = assembler.finish(reason)
        assert (last.text, len(last.tokens)) == (text, 1)
