"""The last layer is computed only for tokens whose output is wanted: the bits are those of all tokens."""

import random

import pytest
import torch
from torch import Tensor

from pyserve._C import Decoder, supported_isas
from tests.model.harness import (
    Row,
    Runner,
    alone,
    assert_same_bits,
    build_decoder,
    random_model,
    random_tokens,
)

VARIANTS = [
    ("llama", "float32", ""),
    ("wide", "bfloat16", ""),
    ("gemma3", "float32", ""),
    ("gpt2", "float32", ""),
    *(("mistral", "float32", isa) for isa in supported_isas()),
]
LENGTHS = [31, 1, 50, 17, 1, 40]


@pytest.fixture(params=VARIANTS, ids=str)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    name, dtype, isa = request.param
    return build_decoder(random_model(name), dtype=dtype, isa=isa)


def outputs(
    decoder: Decoder, logit_rows: list[int], hidden_rows: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Of one step over all the sequences; and every sequence's logits in the step after it."""
    rows = [Row(random_tokens(n + 1, seed=n)) for n in LENGTHS]
    runner = Runner(decoder)
    work = list(zip(rows, LENGTHS, strict=True))
    logits, hidden = runner.forward(work, logit_rows, hidden_rows)
    return logits, hidden, torch.cat(runner.step([(row, 1) for row in rows]))


def test_any_choice_of_outputs_gives_the_bits_of_all(decoder: Decoder) -> None:
    tokens = sum(LENGTHS)
    everything = list(range(tokens))
    all_logits, all_hidden, after = outputs(decoder, everything, everything)
    assert_same_bits(all_logits[: LENGTHS[0]], alone(decoder, random_tokens(32, seed=31))[:31])
    lasts = [sum(LENGTHS[: i + 1]) - 1 for i in range(len(LENGTHS))]
    rng = random.Random(1)
    choices = [
        (lasts, []),
        (lasts[::-1], lasts[2:4]),
        ([], lasts[1:2]),
        ([], []),
        ([0], [tokens - 1, tokens - 1, 3]),
        (everything[1:], []),
        *((rng.sample(everything, n), rng.sample(everything, 3)) for n in (2, 9, 70)),
    ]
    for logit_rows, hidden_rows in choices:
        logits, hidden, next_logits = outputs(decoder, logit_rows, hidden_rows)
        assert_same_bits(logits, all_logits[logit_rows])
        assert_same_bits(hidden, all_hidden[hidden_rows])
        assert_same_bits(next_logits, after)  # keys and values of all were written


def test_logits_of_a_step_outlive_the_next(decoder: Decoder) -> None:
    runner = Runner(decoder)
    row = Row(random_tokens(9))
    first = runner.step([(row, 3)])[0]
    kept = first.clone()
    runner.step([(row, 3)])
    assert_same_bits(first, kept)
    address = runner.step([(row, 1)])[0].data_ptr()
    assert runner.step([(row, 1)])[0].data_ptr() == address  # nobody held it: no new memory
