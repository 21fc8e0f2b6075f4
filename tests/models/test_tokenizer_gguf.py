"""Tokenizers rebuilt from GGUF metadata give the ids of the tokenizer they came from."""

from __future__ import annotations

import io
import json
import random
from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from pyserve.errors import ModelError
from pyserve.models.tokenizer import Tokenizer
from tests.models.tokenizer_samples import CONTROL, CORPUS

Metadata = dict[str, Any]


def scrambled(count: int, seed: int = 0) -> list[str]:
    """Texts that put characters of the corpus side by side as no one would."""
    rng = random.Random(seed)
    alphabets = [list(text) for text in CORPUS if text]
    return [
        "".join(rng.choice(rng.choice(alphabets)) for _ in range(rng.randint(1, 50)))
        for _ in range(count)
    ]


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), behavior="isolated"), byte_level]
    )


def digits_alone() -> pre_tokenizers.PreTokenizer:
    """SmolLM2's and StarCoder's, as their tokenizer.json say."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])


ORIGINALS: dict[str, tuple[pre_tokenizers.PreTokenizer, normalizers.Normalizer | None]] = {
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False), None),
    "smollm": (digits_alone(), None),
    "starcoder": (digits_alone(), None),
    "llama-bpe": (split(GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"]), None),
    "qwen2": (split(GGUF_PRE_TOKENIZER_SPLITS["qwen2"]), normalizers.NFC()),
    "tekken": (split(GGUF_PRE_TOKENIZER_SPLITS["tekken"]), None),
    "gpt-4o": (split(GGUF_PRE_TOKENIZER_SPLITS["gpt-4o"]), None),
}


def train(
    pre_tokenizer: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None
) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def byte_level_metadata(backend: Backend, pre: str) -> Metadata:
    vocab = backend.get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    merges = json.loads(backend.to_str())["model"]["merges"]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in CONTROL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }


@pytest.mark.parametrize("pre", ORIGINALS)
def test_byte_level_ids_are_the_originals(pre: str) -> None:
    original = train(*ORIGINALS[pre])
    rebuilt = Tokenizer.from_gguf(byte_level_metadata(original, pre))
    original.encode_special_tokens = True
    for text in CORPUS + scrambled(300):
        assert rebuilt.encode(text) == original.encode(text).ids, repr(text)
    original.encode_special_tokens = False
    for text in CORPUS:
        assert rebuilt.encode(text, parse_special=True) == original.encode(text).ids, repr(text)


def test_words_in_the_vocabulary_skip_merges_where_the_original_does() -> None:
    metadata = byte_level_metadata(train(*ORIGINALS["gpt-2"]), "llama-bpe")
    metadata["tokenizer.ggml.tokens"].append("Zyzzyva")
    metadata["tokenizer.ggml.token_type"].append(1)
    last = len(metadata["tokenizer.ggml.tokens"]) - 1
    assert Tokenizer.from_gguf(metadata).encode("Zyzzyva") == [last]
    assert Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": "qwen2"}).encode("Zyzzyva") != [
        last
    ]


def test_user_defined_tokens_are_matched_whole_and_are_not_special() -> None:
    metadata = byte_level_metadata(train(*ORIGINALS["qwen2"]), "qwen2")
    metadata["tokenizer.ggml.tokens"].append("<think>")
    metadata["tokenizer.ggml.token_type"].append(4)
    tokenizer = Tokenizer.from_gguf(metadata)
    last = tokenizer.vocab_size - 1
    assert last in tokenizer.encode("so <think> hm")
    assert tokenizer.decode(tokenizer.encode("so <think> hm")) == "so <think> hm"


def test_beginning_and_end_are_added_as_the_file_says() -> None:
    metadata = byte_level_metadata(train(*ORIGINALS["gpt-2"]), "gpt-2")
    plain = Tokenizer.from_gguf(metadata).encode("hi", add_special_tokens=False)
    both = metadata | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    assert Tokenizer.from_gguf(both).encode("hi") == [1, *plain, 2]
    assert Tokenizer.from_gguf(metadata).encode("hi") == plain
    del metadata["tokenizer.ggml.add_bos_token"]
    assert Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": "llama-bpe"}).encode("hi")[0] == 1


def test_every_known_end_of_turn_ends_a_text() -> None:
    metadata = byte_level_metadata(train(*ORIGINALS["gpt-2"]), "gpt-2")
    assert set(Tokenizer.from_gguf(metadata).eos_token_ids) == {0, 2}
    assert Tokenizer.from_gguf(metadata).eos_token_ids[0] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "klingon"}, "pre-tokenizer 'klingon'"),
        ({"tokenizer.ggml.model": "rwkv"}, "'rwkv' is not supported"),
        ({"tokenizer.ggml.model": None}, "holds no tokenizer"),
        ({"tokenizer.ggml.merges": None}, "lacks tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["nowhere to"]}, "damaged"),
        ({"tokenizer.ggml.merges": [""]}, "damaged"),
        ({"tokenizer.ggml.merges": [1]}, "no list of str"),
        ({"tokenizer.ggml.tokens": "abc"}, "no list of str"),
        ({"tokenizer.ggml.token_type": [1]}, "1 values for"),
        ({"tokenizer.ggml.model": "llama"}, "lacks tokenizer.ggml.scores"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: Metadata, message: str) -> None:
    metadata = byte_level_metadata(train(*ORIGINALS["gpt-2"]), "gpt-2") | change
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_gguf(metadata)


def train_sentencepiece(**options: Any) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    lines = [
        line for text in CORPUS for line in text.split("\n") if line and "\x00" not in line
    ] * 3
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        minloglevel=2,
        **{"remove_extra_whitespaces": False} | options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_metadata(
    original: sentencepiece.SentencePieceProcessor, *, user_defined: tuple[str, ...] = ()
) -> Metadata:
    """As convert_hf_to_gguf.py writes it, which spells user-defined pieces with spaces."""
    pieces = [original.id_to_piece(i) for i in range(original.vocab_size())]

    def kind(id_: int) -> int:
        if original.is_unknown(id_):
            return 2
        if original.is_control(id_):
            return 3
        return 4 if pieces[id_] in user_defined else 6 if original.is_byte(id_) else 1

    types = [kind(i) for i in range(len(pieces))]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [
            piece.replace("\u2581", " ") if kind == 4 else piece
            for piece, kind in zip(pieces, types, strict=True)
        ],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [
            -1000.0 if kind == 4 else original.get_score(i) for i, kind in enumerate(types)
        ],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


SENTENCEPIECE = train_sentencepiece()
REBUILT = Tokenizer.from_gguf(sentencepiece_metadata(SENTENCEPIECE))

GEMMA_PIECES = (
    "\n", "\n\n", "\n\n\n", "<table>", "</table>", *("\u2581" * n for n in range(2, 17)),
)  # fmt: skip
GEMMA_LIKE = train_sentencepiece(add_dummy_prefix=False, user_defined_symbols=list(GEMMA_PIECES))
GEMMA_REBUILT = Tokenizer.from_gguf(
    sentencepiece_metadata(GEMMA_LIKE, user_defined=GEMMA_PIECES)
    | {"general.architecture": "gemma3", "tokenizer.ggml.add_space_prefix": False}
)


@pytest.mark.parametrize(
    ("original", "rebuilt"),
    [(SENTENCEPIECE, REBUILT), (GEMMA_LIKE, GEMMA_REBUILT)],
    ids=["llama", "gemma"],
)
def test_sentencepiece_ids_and_texts_are_the_originals(
    original: sentencepiece.SentencePieceProcessor, rebuilt: Tokenizer
) -> None:
    spaces = [" " * n + "a" for n in range(40)]
    for text in CORPUS + scrambled(500) + spaces:
        ids = rebuilt.encode(text, add_special_tokens=False)
        assert ids == original.encode(text), repr(text)
        assert rebuilt.decode(ids) == original.decode(ids)


@given(st.text(st.sampled_from("ab \n\u2581\u00e9<s>"), max_size=30))
def test_sentencepiece_agrees_on_repetitions(text: str) -> None:
    assert REBUILT.encode(text, add_special_tokens=False) == SENTENCEPIECE.encode(text)
    assert GEMMA_REBUILT.encode(text, add_special_tokens=False) == GEMMA_LIKE.encode(text)


def test_sentencepiece_adds_bos_unless_the_file_says_no() -> None:
    assert REBUILT.encode("a")[0] == 1
    metadata = sentencepiece_metadata(SENTENCEPIECE) | {"tokenizer.ggml.add_bos_token": False}
    assert Tokenizer.from_gguf(metadata).encode("a")[0] != 1


def test_extra_white_space_is_removed_where_the_model_was_trained_so() -> None:
    original = train_sentencepiece(remove_extra_whitespaces=True)
    metadata = sentencepiece_metadata(original) | {"tokenizer.ggml.remove_extra_whitespaces": True}
    rebuilt = Tokenizer.from_gguf(metadata)
    for text in CORPUS + scrambled(200):
        if "\u2581" not in text:  # which SentencePiece takes for a space there, and removes
            assert rebuilt.encode(text, add_special_tokens=False) == original.encode(text), repr(
                text
            )
