"""Steps that do not fit the decoder raise; they never read or write elsewhere."""

import pytest
import torch
from torch import Tensor

from pyserve._C import Decoder
from tests.model.harness import VOCAB, build_decoder, config_of, random_model


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def step(**changes: Tensor) -> list[Tensor]:
    """Two sequences of 3 and 1 tokens with blocks [0], [1]; fields can be replaced."""
    fields = {
        "input_ids": ints(1, 2, 3, 4),
        "positions": ints(0, 1, 2, 0),
        "cu_seqlens": ints(0, 3, 4),
        "context_lens": ints(3, 1),
        "slot_mapping": ints(0, 1, 2, 16),
        "block_table": torch.tensor([[0], [1]], dtype=torch.int32),
        "logit_rows": ints(2, 3),
        "hidden_rows": ints(),
    }
    return list((fields | changes).values())


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    decoder = build_decoder(random_model("gpt2"))
    decoder.allocate_kv(2, 16)
    return decoder


def test_a_fitting_step_runs(decoder: Decoder) -> None:
    logits, hidden = decoder.forward(*step(hidden_rows=ints(0, 2, 3)))
    assert logits.shape == (2, VOCAB)
    assert hidden.shape == (3, 96)
    assert logits.isfinite().all()


def test_an_empty_step_runs(decoder: Decoder) -> None:
    empty = {k: ints() for k in ("input_ids", "positions", "slot_mapping", "logit_rows")}
    table = torch.empty((0, 1), dtype=torch.int32)
    changes = empty | {"cu_seqlens": ints(0), "context_lens": ints(), "block_table": table}
    logits, _ = decoder.forward(*step(**changes))
    assert logits.shape == (0, VOCAB)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input_ids", ints(1, 2, 3, VOCAB)),
        ("input_ids", ints(1, -1, 3, 4)),
        ("input_ids", ints(1, 2, 3)),
        ("positions", ints(0, 1, 2, 512)),
        ("positions", ints(0, 1, 2)),
        ("slot_mapping", ints(0, 1, 2, 32)),
        ("slot_mapping", ints(0, 1, -2, 16)),
        ("cu_seqlens", ints(0, 3)),
        ("cu_seqlens", ints(1, 3, 4)),
        ("cu_seqlens", ints()),
        ("context_lens", ints(2, 1)),
        ("context_lens", ints(3, 17)),
        ("context_lens", ints(3)),
        ("block_table", torch.tensor([[0], [2]], dtype=torch.int32)),
        ("block_table", torch.tensor([[0], [-1]], dtype=torch.int32)),
        ("block_table", torch.empty((2, 0), dtype=torch.int32)),
        ("logit_rows", ints(2, 4)),
        ("logit_rows", ints(0, 1, 2, 3, 3)),
        ("hidden_rows", ints(-1)),
        ("input_ids", torch.tensor([1, 2, 3, 4])),
        ("input_ids", ints(1, 0, 2, 0, 3, 0, 4, 0)[::2]),
    ],
)
def test_indices_out_of_range_raise(decoder: Decoder, field: str, value: Tensor) -> None:
    with pytest.raises(ValueError, match=field.split("_")[0]):
        decoder.forward(*step(**{field: value}))


def test_sequences_that_run_backwards_raise(decoder: Decoder) -> None:
    with pytest.raises(ValueError, match="sequence 0"):
        decoder.forward(*step(cu_seqlens=ints(0, 5, 4)))


def test_use_before_it_is_ready_raises() -> None:
    model = random_model("llama")
    fresh = Decoder(config_of(model).as_dict())
    with pytest.raises(RuntimeError, match="seal"):
        fresh.forward(*step())
    ready = build_decoder(model)
    with pytest.raises(RuntimeError, match="allocate_kv"):
        ready.forward(*step())
    with pytest.raises(RuntimeError, match="sealed"):
        ready.load("embed.weight", torch.zeros(VOCAB, 48))


def test_odd_configurations_are_refused() -> None:
    fields = config_of(random_model("llama")).as_dict()
    with pytest.raises(ValueError, match="norm"):
        Decoder(fields | {"norm": "batch"})
    with pytest.raises(ValueError, match="instruction set"):
        Decoder(fields, "float32", "mmx")
    with pytest.raises(ValueError, match="dtype"):
        Decoder(fields, "int8")
    with pytest.raises(KeyError, match="head_dim"):
        Decoder({k: v for k, v in fields.items() if k != "head_dim"})
