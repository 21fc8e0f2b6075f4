"""How a GGUF file's ``tokenizer.ggml.pre`` splits text before BPE, as the original tokenizers do.

Names are llama.cpp's (``convert_hf_to_gguf.py``); each stands for what the ``tokenizer.json`` of the model
family says: a normalizer, a pre-tokenizer, and whether a whole word in the vocabulary skips the merges.
"""

# The patterns hold full-width and mathematical letters on purpose.
# ruff: noqa: RUF001

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from pyserve.errors import ModelError


@dataclass(frozen=True)
class Splitting:
    """One family's way to cut text into words."""

    pre_tokenizer: Callable[[], PreTokenizer]
    normalizer: Callable[[], Normalizer] | None = None
    ignore_merges: bool = False
    adds_bos: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASH_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}" + _SLASH_TAIL
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}" + _SLASH_TAIL
)
_HAN = r"[一-龥ࠀ-一가-퟿]+"
# Letters as DeepSeek-LLM's tokenizer lists them: cased scripts only.
_DEEPSEEK_LETTERS = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώ"
    r"ᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗ"
    r"Ａ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
_DEEPSEEK_SIGNS = r"\s?[!-/:-~！-／：-～‘-‟　-。]+"


def _regexes(*patterns: str, digits: bool = False) -> Callable[[], PreTokenizer]:
    """Split by each pattern in turn, then (``digits``) each digit alone, then spell bytes."""

    def build() -> PreTokenizer:
        steps: list[PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns
        ]
        if digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps)

    return build


def _gpt2(*, digits: bool = False) -> Callable[[], PreTokenizer]:
    """GPT-2's own regex, after each digit alone where ``digits``."""

    def build() -> PreTokenizer:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if not digits:
            return byte_level
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])

    return build


_GPT2_FAMILY = Splitting(_gpt2())
_DIGITS_FAMILY = Splitting(_gpt2(digits=True))
_LLAMA3_FAMILY = Splitting(_regexes(_LLAMA3), ignore_merges=True, adds_bos=True)
_QWEN2_FAMILY = Splitting(_regexes(_QWEN2), normalizer=normalizers.NFC)
_GPT4O_FAMILY = Splitting(_regexes(_GPT4O))

SPLITTINGS: Mapping[str, Splitting] = {
    "gpt-2": _GPT2_FAMILY,
    "default": _GPT2_FAMILY,
    "mpt": _GPT2_FAMILY,
    "olmo": _GPT2_FAMILY,
    "smollm": _DIGITS_FAMILY,
    "starcoder": _DIGITS_FAMILY,
    "refact": _DIGITS_FAMILY,
    "codeshell": _DIGITS_FAMILY,
    "llama-bpe": _LLAMA3_FAMILY,
    "llama3": _LLAMA3_FAMILY,
    "llama-v3": _LLAMA3_FAMILY,
    "falcon3": _LLAMA3_FAMILY,
    "smaug-bpe": _LLAMA3_FAMILY,
    "qwen2": _QWEN2_FAMILY,
    "megrez": _QWEN2_FAMILY,
    "deepseek-r1-qwen": Splitting(_regexes(_QWEN2), adds_bos=True),
    "tekken": Splitting(_regexes(_TEKKEN), ignore_merges=True, adds_bos=True),
    "gpt-4o": _GPT4O_FAMILY,
    "llama4": _GPT4O_FAMILY,
    "deepseek-llm": Splitting(
        _regexes(r"[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_SIGNS, r"\s+$", _HAN, digits=True),
        adds_bos=True,
    ),
    "deepseek-coder": Splitting(
        _regexes(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, digits=True), adds_bos=True
    ),
}

# Files older than `tokenizer.ggml.pre` (April 2024) do not say; what the architecture's models use.
_BY_ARCHITECTURE = {"qwen2": "qwen2", "qwen3": "qwen2"}
_LLAMA3_VOCAB_SIZE = 128256


def splitting_of(metadata: Mapping[str, object], vocab_size: int) -> Splitting:
    """The splitting that a GGUF file's metadata names. Raises ModelError on an unknown name."""
    name = metadata.get("tokenizer.ggml.pre")
    if name is None or name == "default":
        architecture = str(metadata.get("general.architecture"))
        name = _BY_ARCHITECTURE.get(architecture, "default")
        if architecture == "llama" and vocab_size == _LLAMA3_VOCAB_SIZE:
            name = "llama-bpe"
    try:
        return SPLITTINGS[str(name)]
    except KeyError:
        raise ModelError(
            f"The GGUF file's pre-tokenizer {name!r} is not supported (supported: "
            f"{', '.join(sorted(SPLITTINGS))}). Serve the model from its Hugging Face directory instead."
        ) from None
