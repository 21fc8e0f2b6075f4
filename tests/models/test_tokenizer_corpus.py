"""The default model's tokenizer, rebuilt from its GGUF file, on awkward text: same ids, same text back."""

from __future__ import annotations

import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pyserve.models.default import fetch_default
from pyserve.models.load import open_checkpoint
from pyserve.models.progress import silent
from pyserve.models.tokenizer import Tokenizer
from pyserve.models.vocabulary import byte_alphabet
from tests.models.tokenizer_samples import CORPUS


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return open_checkpoint(None, progress=silent).tokenizer


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerBase:
    """transformers' reading of the same file, with the pre-tokenizer of the original tokenizer.json,
    which a GGUF file only names and transformers does not know by that name."""
    file = fetch_default(silent)
    made = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return made


def spelled(text: str) -> list[str]:
    """The bytes of ``text`` in the vocabulary's alphabet."""
    characters = {byte: char for char, byte in byte_alphabet().items()}
    return [characters[byte] for byte in text.encode()]


@pytest.mark.parametrize("text", CORPUS)
def test_ids_are_the_originals(
    tokenizer: Tokenizer, reference: PreTrainedTokenizerBase, text: str
) -> None:
    assert tokenizer.encode(text, parse_special=True) == reference.encode(text)
    assert tokenizer.encode(text) == reference.encode(text, split_special_tokens=True)


def test_ids_of_scrambled_text_are_the_originals(
    tokenizer: Tokenizer, reference: PreTrainedTokenizerBase
) -> None:
    rng = random.Random(7)
    alphabets = [list(text) for text in CORPUS if text]
    for _ in range(2000):
        text = "".join(rng.choice(rng.choice(alphabets)) for _ in range(rng.randint(1, 80)))
        assert tokenizer.encode(text) == reference.encode(text, split_special_tokens=True), repr(
            text
        )


@given(text=st.text(st.characters(codec="utf-8"), max_size=60))
def test_any_text_survives_encoding_and_incremental_decoding(
    tokenizer: Tokenizer, text: str
) -> None:
    # SmolLM2's vocabulary lacks the bytes of some control characters and planes, and drops them.
    assume(all(tokenizer.token_id(char) for char in spelled(text)))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    detokenizer = tokenizer.detokenizer()
    shown = ""
    for id_ in ids:
        shown += detokenizer.push(id_)
        assert text.startswith(shown)  # so no half character on the way
    assert shown == text


def test_digits_stand_alone(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_text(i) for i in tokenizer.encode("x 2026")] == ["x", " ", *"2026"]


def test_the_default_chat_prompt_is_the_published_one(tokenizer: Tokenizer) -> None:
    """As SmolLM2's own tokenizer encodes it, system prompt and all."""
    assert tokenizer.chat_template is not None
    ids = tokenizer.chat_template.encode([{"role": "user", "content": "Hello"}])
    system = [9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712,
              8182]  # fmt: skip
    assert ids == [1, *system, 2, 198, 1, 4093, 198, 19556, 2, 198, 1, 520, 9531, 198]


def test_chat_prompts_are_those_of_transformers(
    tokenizer: Tokenizer, reference: PreTrainedTokenizerBase
) -> None:
    assert tokenizer.chat_template is not None
    for text in CORPUS:
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
        ids = tokenizer.chat_template.encode(messages)
        assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.chat_template.render(
            messages
        )
        if "<|" not in text:
            assert ids == reference.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )


def test_every_token_has_bytes_and_the_ends_are_known(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert all(tokenizer.token_bytes(id_) for id_ in range(tokenizer.vocab_size))
    assert tokenizer.eos_token_ids == (2, 0)
    assert tokenizer.special_ids == frozenset(range(17))
