"""Tokenizers of Hugging Face directories, and what is the same for all tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from pyserve.errors import InvalidRequest, ModelError
from pyserve.models.tokenizer import Tokenizer, load_tokenizer
from tests.models.tokenizer_samples import (
    CHATML,
    CONTROL,
    CORPUS,
    sentencepiece_like,
    small_tokenizer,
    train_byte_level,
    write_directory,
)

SMALL = small_tokenizer()


def metaspace_backend() -> Backend:
    """As newer Llama and Mistral directories have it: a space before the first word only."""
    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=tokens, show_progress=False)
    backend.train_from_iterator(CORPUS[2:12], trainer)
    # Bytes are part of the vocabulary, not added tokens.
    kept = json.loads(backend.to_str())
    kept["added_tokens"] = [t for t in kept["added_tokens"] if not t["content"].startswith("<0x")]
    backend = Backend.from_str(json.dumps(kept))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return backend


def test_ids_and_texts_are_those_of_transformers(tmp_path: Path) -> None:
    directories = [
        write_directory(tmp_path / "byte_level", train_byte_level()),
        write_directory(
            tmp_path / "metaspace", metaspace_backend(), bos_token="<s>", eos_token="</s>"
        ),
    ]
    for directory in directories:
        tokenizer = Tokenizer.from_directory(directory)
        reference = AutoTokenizer.from_pretrained(directory)
        for text in CORPUS:
            ids = tokenizer.encode(text, parse_special=True)
            assert ids == reference.encode(text), repr(text)
            assert tokenizer.encode(text) == reference.encode(text, split_special_tokens=True), (
                repr(text)
            )
            for skip in (True, False):
                assert tokenizer.decode(ids, skip_special_tokens=skip) == reference.decode(
                    ids, skip_special_tokens=skip
                )


@given(st.lists(st.sampled_from([*CONTROL, "a", " ", "<|", "|>", "im_end", "\n"]), max_size=12))
def test_plain_text_never_becomes_a_control_token(parts: list[str]) -> None:
    text = "".join(parts)
    ids = SMALL.encode(text)
    assert SMALL.special_ids.isdisjoint(ids)
    assert SMALL.decode(ids, skip_special_tokens=False) == text


def test_control_tokens_are_read_on_request() -> None:
    assert SMALL.encode("<|im_end|>", parse_special=True) == [2]
    assert 2 not in SMALL.encode("<|im_end|>")


def test_flags_of_control_tokens_hold_when_they_are_respelled(tmp_path: Path) -> None:
    backend = train_byte_level()
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    tokenizer = Tokenizer.from_directory(
        write_directory(tmp_path, backend, chat_template="{{ messages[0].content }}  <mask>  x")
    )
    assert tokenizer.chat_template is not None
    ids = tokenizer.chat_template.encode([{"content": "a<mask>"}])
    mask = tokenizer.token_id("<mask>")
    assert ids.count(mask) == 1
    assert ids[ids.index(mask) + 1 :] == tokenizer.encode("x")


def test_tokens_added_behind_a_sparse_vocabulary_keep_their_ids(tmp_path: Path) -> None:
    described = json.loads(train_byte_level().to_str())
    vocab = described["model"]["vocab"]
    described["model"]["vocab"] = {t: i + (7 if i > 300 else 0) for t, i in vocab.items()}
    backend = Backend.from_str(json.dumps(described))
    backend.add_tokens([AddedToken("<|late|>", special=True), AddedToken("<tool>", special=False)])
    late, tool = backend.token_to_id("<|late|>"), backend.token_to_id("<tool>")
    tokenizer = Tokenizer.from_directory(
        write_directory(
            tmp_path, backend, chat_template="<|late|>{{ messages[0].content }}<|late|>"
        )
    )
    assert tool in tokenizer.encode("a <tool> b")
    assert late not in tokenizer.encode("a <|late|> b")
    for text in CORPUS:
        assert (
            tokenizer.encode(text) == backend.encode(text.replace("<|im", "<\x00|im")).ids
            or "<|" in text
        )
    assert tokenizer.chat_template is not None
    ids = tokenizer.chat_template.encode([{"content": "<|late|>"}])
    assert (ids[0], ids[-1], ids.count(late)) == (late, late, 2)


def test_tokens_that_only_the_configuration_declares_are_known(tmp_path: Path) -> None:
    backend = train_byte_level()
    backend.add_tokens([AddedToken("<tool>", special=False)])
    late = backend.get_vocab_size()
    path = write_directory(
        tmp_path,
        backend,
        additional_special_tokens=["<tool>", "<new>"],
        added_tokens_decoder={
            str(late): {"content": "<think>", "special": False, "normalized": False}
        },
    )
    tokenizer = Tokenizer.from_directory(path)
    reference = AutoTokenizer.from_pretrained(path)
    text = "a <tool> b <think> c <new> d"
    ids = tokenizer.encode(text, parse_special=True)
    assert ids == reference.encode(text)
    names = ("<think>", "<tool>", "<new>")
    think, tool, new = (tokenizer.token_id(name) for name in names)
    assert {think, tool, new} <= set(ids)
    assert {tool, new} <= tokenizer.special_ids
    assert think not in tokenizer.special_ids
    assert {tool, new}.isdisjoint(tokenizer.encode(text))


def test_what_surrounds_a_text_can_be_set_by_the_configuration(tmp_path: Path) -> None:
    path = write_directory(tmp_path, train_byte_level(), add_bos_token=True, add_eos_token=True)
    tokenizer = Tokenizer.from_directory(path)
    plain = tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.encode("hi") == [1, *plain, 2]


def test_generation_settings_add_ends_of_text(tmp_path: Path) -> None:
    path = write_directory(tmp_path, train_byte_level())
    (path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert Tokenizer.from_directory(path).eos_token_ids == (2, 0)
    assert Tokenizer.from_directory(path).bos_token_id == 1


@pytest.mark.parametrize("where", ["jinja", "json", "list"])
def test_the_chat_template_is_found_wherever_it_is_kept(tmp_path: Path, where: str) -> None:
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    inline = named if where == "list" else None
    path = write_directory(tmp_path, train_byte_level(), chat_template=inline)
    if where == "jinja":
        (path / "chat_template.jinja").write_text(CHATML)
    if where == "json":
        (path / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    template = load_tokenizer(path).chat_template
    assert template is not None
    assert template.source == CHATML


def test_a_directory_without_template_has_none(tmp_path: Path) -> None:
    path = write_directory(tmp_path, train_byte_level(), chat_template=None)
    assert Tokenizer.from_directory(path).chat_template is None


def test_what_cannot_be_read_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        Tokenizer.from_directory(tmp_path)
    backend = Backend(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="WordPiece is not supported"):
        Tokenizer.from_directory(write_directory(tmp_path, backend))


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path: Path) -> None:
    backend = train_byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, backend))
    text = "a longer text than that, to be sure of it"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_normalizers_apply_to_text(tmp_path: Path) -> None:
    backend = train_byte_level()
    backend.normalizer = normalizers.NFC()
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, backend))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


def test_unknown_ids_and_broken_text_are_the_clients_mistake() -> None:
    for bad in (-1, SMALL.vocab_size):
        with pytest.raises(InvalidRequest, match="not in the vocabulary"):
            SMALL.decode([bad])
    for parse_special in (True, False):
        with pytest.raises(InvalidRequest, match="not valid Unicode"):
            SMALL.encode("\ud83d", parse_special=parse_special)


def test_single_tokens_show_their_text_and_bytes() -> None:
    tokenizer = sentencepiece_like()
    assert tokenizer.token_text(3 + 0xE2) == "bytes:\\xe2"
    assert tokenizer.token_bytes(3 + 0xE2) == b"\xe2"
    e_acute = tokenizer.token_id("\u00e9")
    assert e_acute is not None
    assert (tokenizer.token_text(e_acute), tokenizer.token_bytes(e_acute)) == (
        "\u00e9",
        b"\xc3\xa9",
    )
    assert tokenizer.token_text(2) == "</s>"
    for text in CORPUS:
        ids = SMALL.encode(text)
        assert b"".join(map(SMALL.token_bytes, ids)) == text.encode()
