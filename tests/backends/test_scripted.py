"""The scripted back-end: what comes out follows from the context alone, and broken steps are noticed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyserve.backends.base import Backend, SimulatedBackend
from pyserve.backends.scripted import ScriptedBackend, StepCost
from pyserve.testing.packing import NO_ROWS, HandPackedStep, pack_by_hand

BLOCK = 4


def pack(*shares: tuple[list[int], int, list[int]]) -> HandPackedStep:
    return pack_by_hand(*shares, block_size=BLOCK)


def open_backend(**options: object) -> ScriptedBackend:
    backend = ScriptedBackend(**options)  # type: ignore[arg-type]
    backend.allocate(num_blocks=8, block_size=BLOCK)
    return backend


def logits(backend: ScriptedBackend, *sequences: tuple[list[int], int, list[int]]) -> Tensor:
    return backend.forward(pack(*sequences), NO_ROWS).logits


def test_is_a_backend() -> None:
    backend = ScriptedBackend()
    assert isinstance(backend, Backend)
    assert isinstance(backend, SimulatedBackend)


def test_chunks_and_neighbours_and_blocks_do_not_change_the_logits() -> None:
    whole = logits(open_backend(), ([1, 2, 3, 4, 5, 6], 0, [0, 1]))
    backend = open_backend()
    logits(backend, ([1, 2, 3, 4, 5], 0, [7, 2]), ([9], 0, [3]))
    parts = logits(backend, ([8], 1, [3]), ([6], 5, [7, 2]))
    assert torch.equal(parts[1:], whole)


def test_every_token_of_the_context_counts_and_so_does_their_order() -> None:
    rows = [logits(open_backend(), (ids, 0, [0])) for ids in ([1, 2, 3], [2, 1, 3], [1, 2, 4])]
    assert not torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])


def test_overwritten_block_changes_the_logits() -> None:
    clean, dirty = open_backend(), open_backend()
    for backend in (clean, dirty):
        logits(backend, ([1, 2, 3, 4], 0, [0]))
    logits(dirty, ([7], 0, [0]))
    assert not torch.equal(logits(clean, ([5], 4, [0, 1])), logits(dirty, ([5], 4, [0, 1])))


def test_continuation_is_the_favourite() -> None:
    backend = open_backend(continuation=lambda context: int(context[-1]) + 1)
    assert logits(backend, ([1, 2], 0, [0]), ([40], 0, [1])).argmax(dim=1).tolist() == [3, 41]


def test_poison_raises_and_counts_its_time() -> None:
    backend = open_backend(poison_tokens=[66], cost=StepCost(base_s=1.0, prefill_token_s=0.5))
    with pytest.raises(RuntimeError, match="poison"):
        logits(backend, ([1, 66], 0, [0]))
    assert backend.counters.failed == 1
    assert backend.take_step_seconds() == 2.0
    assert backend.take_step_seconds() == 0.0


def test_nan_token_spoils_its_own_row_only() -> None:
    backend = open_backend(nan_tokens=[13])
    rows = logits(backend, ([13, 1], 0, [0]), ([1], 0, [1]))
    assert rows[0].isnan().all()
    assert rows[1].isfinite().all()


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("positions", [1, 2], "positions"),
        ("slot_mapping", [1, 2], "slots"),
    ],
)
def test_contradictory_step_raises(field: str, value: list[int], complaint: str) -> None:
    packed = pack(([1, 2], 0, [0]))
    setattr(packed, field, torch.tensor(value, dtype=torch.int32))
    with pytest.raises(RuntimeError, match=complaint):
        open_backend().forward(packed, NO_ROWS)


def test_shared_slot_and_unwritten_slot_raise() -> None:
    with pytest.raises(RuntimeError, match="share a slot"):
        logits(open_backend(), ([1], 0, [0]), ([2], 0, [0]))
    with pytest.raises(RuntimeError, match="never written"):
        logits(open_backend(), ([1], 4, [0, 1]))


def test_hidden_states_follow_from_the_context() -> None:
    backend = open_backend(hidden_size=5)
    packed = pack(([1, 2], 0, [0]), ([1, 2], 0, [1]), ([2], 0, [2]))
    hidden = backend.forward(packed, torch.tensor([1, 3, 4], dtype=torch.int32)).hidden
    assert hidden.shape == (3, 5)
    assert torch.equal(hidden[0], hidden[1])
    assert not torch.equal(hidden[0], hidden[2])
