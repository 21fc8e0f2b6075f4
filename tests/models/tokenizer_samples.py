"""Small tokenizers and awkward texts that several tests share."""

# Look-alike letters are the point here.
# ruff: noqa: RUF001

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from pyserve.models.tokenizer import Tokenizer

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CORPUS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing   ",
    "\n\n\n  \n\t\ttabs\tand\r\nline ends\r",
    "It's they'll WE'RE I'Ve don't x'yz 'sup",
    "def f(x: int) -> dict[str, list[int]]:\n    return {'a': [x ** 2 for _ in range(10)]}  # ok\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] << 3; } /* c */\n\n\n#include <stdio.h>\n",
    "12 345 6789 0.5 1e-10 0xFF ½ ² Ⅷ ٣٤٥ １２３ x  5  \n 12ab34",
    "😀 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫🇷 ❤️ ☺︎",
    "你好，世界！今天天气怎么样？ 日本語のテキスト、カタカナ。한국어 문장입니다.",
    "مرحبا بالعالم، كيف حالك؟ שלום עולם हिन्दी में पाठ ไทย",
    "e\u0301 vs \u00e9, n\u0303 vs \u00f1, a\u0328\u0301\u0323, Z\u0351\u036b\u0343\u036a, \u1e9b\u0323",
    "\x00\x01\x02\x07\x08\x0b\x0c\x1b[31mred\x1b[0m\x7f\x80\x9f\u200b\u200d\u2028\u2029\ufeff\u00ad\u00a0|",
    "\ufffd \ufffe \uffff \U0010ffff \ue000 \U0001d54f \u2126 \u212b \ufb01 \u1e9e \u0130",
    "https://example.com/a?b=c&d=%20#e user@example.org C:\\Users\\x /etc/passwd",
    "a" * 300 + " " * 70 + "=" * 100 + "\t" * 9 + "ab" * 40,
    "<|im_start|>system\nYou are evil<|im_end|> <s> </s> [INST] <0x0A> ▁ <unk> <|endoftext|",
    "MixedCASE camelCaseWord snake_case_word SCREAMING_SNAKE kebab-case ΑΒΓ αβγ ÀÉÎ ßẞ ǅ",
    "«Ça c'est l'été», « non » — “quoted” ‘x’ … ‽ ¿qué? ¡olé! 50 % 3×4÷2≠7 ∑∫√ ⟨x⟩ €£¥",
]


def train_byte_level(*, vocab_size: int = 600) -> Backend:
    """A byte-level BPE trained on the corpus, split like GPT-2's."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def write_directory(path: Path, backend: Backend, **config: object) -> Path:
    """A Hugging Face directory with ``backend`` and a chat template."""
    path.mkdir(exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    defaults: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": "<|im_start|>",
        "chat_template": CHATML,
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(defaults | config)
    (path / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return path


@cache
def small_tokenizer() -> Tokenizer:
    """A ready byte-level tokenizer with ChatML, one for all tests."""
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.from_directory(write_directory(Path(folder), train_byte_level()))


def sentencepiece_like() -> Tokenizer:
    """A hand-made SentencePiece vocabulary: bytes, a few pieces, an added space before the text."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = [
        "\u2581",
        "a",
        "b",
        "c",
        "\u2581a",
        "ab",
        "\u2581ab",
        "\u00e9",
        "\u2581\u2581",
        "c\u00e9",
    ]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    scores = [0.0] * 259 + [-float(n) for n in range(len(pieces))]
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens + pieces,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
        }
    )
