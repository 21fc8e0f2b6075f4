"""Padded decode steps, steps started ahead, and the engine on the torch back-end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import trio
from torch import Tensor

from pyserve import _C
from pyserve.backends.base import Backend
from pyserve.backends.torch_decoder import TorchBackend
from pyserve.backends.torch_decoder import attention as attention_module
from pyserve.backends.torch_decoder.attention import (
    Sequences,
    has_varlen,
    plain_attention,
    varlen_attention,
)
from pyserve.backends.torch_decoder.decode import SIZES
from pyserve.backends.torch_decoder.staging import decode_words, pad_decode, split_decode
from pyserve.testing.engine import Collected, collect, make_spec, open_scripted_engine
from pyserve.testing.packing import pack_by_hand
from tests.backends.torch_harness import Rig, ints, native, on_torch
from tests.model.harness import random_tokens


def started(rig: Rig, lengths: Sequence[int]) -> list[int]:
    """Rows whose prompts have been computed."""
    rows = [rig.add(random_tokens(n, seed=i)) for i, n in enumerate(lengths)]
    rig.step(rows, list(lengths))
    return rows


def append(rig: Rig, rows: Sequence[int], tokens: Sequence[int]) -> None:
    rig.pool.append(ints(*rows), ints(*tokens))


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 11])
def test_padded_decode_gives_the_logits_of_the_flat_step(rows: int) -> None:
    """Asking for a hidden state takes the flat path; the padded one pads to the next size."""
    lengths = [3 + 5 * i for i in range(rows)]
    pieces = []
    for hidden in (False, True):
        rig = Rig(on_torch("gemma3"))
        live = started(rig, lengths)
        for i in range(4):
            append(rig, live, random_tokens(rows, seed=50 + i))
            pieces.append(rig.step(live, [1] * rows, hidden=hidden).logits.clone())
    for padded, flat in zip(pieces[:4], pieces[4:], strict=True):
        torch.testing.assert_close(padded, flat, rtol=1e-5, atol=1e-5)


def test_padding_is_one_token_in_the_scratch_block() -> None:
    packed = pack_by_hand(([7], 20, [4, 2]), ([8], 3, [1]), block_size=16)
    words = torch.full((decode_words(4, 3),), -5, dtype=torch.int32)
    pad_decode(words, packed, 4, 3, scratch_block=99)
    ids, lengths, table = split_decode(words, 4, 3)
    assert ids.tolist() == [7, 8, 0, 0]
    assert lengths.tolist() == [21, 4, 1, 1]
    assert table.tolist() == [[4, 2, 99], [1, 0, 99], [99, 99, 99], [99, 99, 99]]


def test_padding_writes_nowhere_but_the_scratch_block() -> None:
    rig = Rig(on_torch("llama"))
    rows = started(rig, [5, 9, 20])
    backend = rig.backend
    assert isinstance(backend, TorchBackend)
    assert backend._pages is not None
    before = [keys.clone() for keys in backend._pages.keys]
    append(rig, rows, [1, 2, 3])
    rig.step(rows, [1, 1, 1])
    touched = {
        (rig.pool.blocks(row)[(n) // 16], n % 16) for row, n in zip(rows, (5, 9, 20), strict=True)
    }
    for old, new in zip(before, backend._pages.keys, strict=True):
        changed = (old != new).flatten(2).any(dim=2)
        assert {(b, s) for b, s in changed[:-1].nonzero().tolist()} == touched


def test_sizes_cover_every_batch_up_to_the_largest() -> None:
    rig = Rig(on_torch("llama"), num_blocks=80)
    backend = rig.backend
    assert isinstance(backend, TorchBackend)
    rows = started(rig, [2] * 64)
    for count in (64, 33, 1):
        append(rig, rows[:count], [5] * count)
        assert rig.step(rows[:count], [1] * count).logits.shape == (count, 101)
    assert backend.statistics().steps == 3
    assert SIZES[-1] == 64


class Decoding:
    """Rows that decode greedily on a torch back-end, drawn by it, as the engine does."""

    def __init__(self, lengths: Sequence[int], *, block_size: int = 16) -> None:
        self.backend = on_torch("llama")
        self.rig = Rig(self.backend, block_size)
        self.state = _C.SamplerState()
        self.rows = started(self.rig, lengths)
        self.tokens: dict[int, list[int]] = {row: [] for row in self.rows}
        for row in self.rows:
            self.state.set(row, temperature=0.0)
        self.append(self.rows, [row % 7 for row in self.rows])

    def append(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        append(self.rig, rows, tokens)
        for row, token in zip(rows, tokens, strict=True):
            self.tokens[row].append(token)

    def step(self, rows: Sequence[int]) -> None:
        logits = self.rig.step(rows, [1] * len(rows)).logits
        drawn = self.backend.sample(logits, self.rig.pool, self.state, ints(*rows))[0]
        self.append(rows, drawn.tolist())

    @property
    def counts(self) -> tuple[int, int, int]:
        s = self.backend.statistics()
        return s.steps, s.ahead, s.ahead_used


def without_ahead(
    monkeypatch: pytest.MonkeyPatch, steps: Sequence[Sequence[int]]
) -> dict[int, list[int]]:
    """What the same steps give when none is started ahead."""
    with monkeypatch.context() as patch:
        patch.setattr(
            "pyserve.backends.torch_decoder.decode.PaddedDecode.start_ahead",
            lambda *args: None,
        )
        plain = Decoding([3, 5, 8])
        for rows in steps:
            plain.step(rows)
        assert plain.counts[1:] == (0, 0)
        return plain.tokens


@pytest.mark.parametrize(
    ("steps", "used"),
    [
        ([[0, 1, 2]] * 5, 4),  # all go on
        ([[0, 1, 2], [0, 1, 2], [0, 2], [0, 2], [0, 2]], 3),  # one ends: its part is not asked for
        ([[0, 1], [0, 1], [2, 0, 1], [2, 0, 1]], 2),  # one joins: the step ahead is forgotten
        ([[0], [1], [2], [0]], 0),  # others each time
        ([[0, 1, 2], [2, 1, 0], [2, 1, 0]], 1),  # the same in another order
    ],
)
def test_a_step_started_ahead_is_used_only_where_it_is_what_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, steps: list[list[int]], used: int
) -> None:
    expected = without_ahead(monkeypatch, steps)
    ahead = Decoding([3, 5, 8])
    for rows in steps:
        ahead.step(rows)
    assert ahead.tokens == expected
    assert ahead.counts[0] == len(steps)
    assert ahead.counts[2] == used


def test_nothing_is_started_where_a_new_block_is_needed() -> None:
    """The block after the last is the scheduler's to give."""
    decoding = Decoding([14], block_size=16)
    for expected in ((1, 1, 0), (2, 1, 1), (3, 2, 1), (4, 3, 2)):
        decoding.step([0])
        assert decoding.counts == expected


def test_another_token_than_the_drawn_one_is_not_served_the_step_ahead() -> None:
    decoding = Decoding([3])
    decoding.step([0])
    other = Rig(native("llama"))
    row = other.add([*random_tokens(3), 0, 55])
    decoding.rig.pool.release(0)
    again = decoding.rig.add([*random_tokens(3), 0, 55])
    decoding.rig.step([again], [4])
    actual = decoding.rig.step([again], [1]).logits
    torch.testing.assert_close(actual, other.step([row], [5]).logits, rtol=1e-4, atol=1e-4)


async def greedy_texts(backend: Backend, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Twelve tokens each; chunks, company and preemption included: a small pool and a small step."""
    results: list[Collected | None] = [None] * len(prompts)
    async with (
        open_scripted_engine(
            backend, driver="thread", num_blocks=14, max_batch_tokens=8, max_batch_requests=3
        ) as engine,
        trio.open_nursery() as nursery,
    ):

        async def client(i: int) -> None:
            spec = make_spec(prompts[i], max_tokens=12, ignore_eos=True)
            results[i] = await collect(engine, spec)

        for i in range(len(prompts)):
            nursery.start_soon(client, i)
    return [r.tokens[0] for r in results if r is not None]


async def test_engine_on_it_gives_the_native_greedy_text() -> None:
    prompts = [random_tokens(n, seed=n) for n in (21, 9, 3)]
    backend = on_torch("llama")
    texts = await greedy_texts(backend, prompts)
    assert texts == await greedy_texts(native("llama"), prompts)
    statistics = backend.statistics()
    assert statistics.ahead_used > 0
    assert statistics.steps > statistics.ahead_used


class FlashAttention:
    """Stands in for torch's varlen attention: its checks, as its source has them, and plain arithmetic."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self,
        out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool,
        seqused_k: Tensor,
        block_table: Tensor,
        num_splits: int,
    ) -> None:
        self.calls += 1
        sequences, pages, page_size = len(cu_seq_q) - 1, *key.shape[:2]
        assert query.dtype == key.dtype == value.dtype == out.dtype == torch.bfloat16
        assert all(t.stride(-1) == 1 for t in (query, key, value, out, block_table))
        assert all(t.dtype == torch.int32 for t in (cu_seq_q, cu_seq_k, seqused_k, block_table))
        assert cu_seq_q.is_contiguous()
        assert cu_seq_k.is_contiguous()
        assert cu_seq_k.shape == cu_seq_q.shape
        assert seqused_k.is_contiguous()
        assert seqused_k.shape == (sequences,)
        assert block_table.shape[0] == sequences
        assert page_size % 256 == 0
        assert query.shape[2] % 8 == 0
        assert query.shape[2] <= 256
        assert query.shape == out.shape
        assert key.shape == value.shape == (pages, page_size, key.shape[2], query.shape[2])
        assert enable_gqa or query.shape[1] == key.shape[2]
        assert window_size[1] == 0  # causal, bottom right
        # With one query, grouped heads and no window at all it would write into a copy of out.
        assert num_splits == 1
        assert max_q >= int(cu_seq_q.diff().max())
        assert max_k >= int(seqused_k.max())
        at = Sequences(cu_seq_q, seqused_k, block_table, max_q, max_k)
        plain_attention(out, query, key, value, at, scale, window_size[0] + 1)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_varlen_attention_is_called_as_its_source_wants(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash = FlashAttention()
    monkeypatch.setattr(attention_module, "varlen_attn_out", flash)
    outputs = []
    for attend in (plain_attention, varlen_attention):
        rig = Rig(on_torch(name, dtype="bfloat16"), block_size=256, num_blocks=8)
        assert isinstance(rig.backend, TorchBackend)
        rig.backend._open._attend = attend
        rows = started(rig, [300, 4, 30])
        append(rig, rows, [1, 2, 3])
        outputs.append(rig.step(rows, [1, 1, 1]).logits.clone())
    assert flash.calls == 2 * 3
    assert torch.equal(outputs[0], outputs[1])


def test_where_varlen_attention_can_run() -> None:
    cuda, bf16 = torch.device("cuda"), torch.bfloat16
    assert has_varlen(cuda, bf16, 64)
    assert not has_varlen(cuda, torch.float32, 64)
    assert not has_varlen(cuda, bf16, 260)
    assert not has_varlen(torch.device("cpu"), bf16, 64)


def test_page_size_is_checked_where_varlen_attention_runs() -> None:
    backend = on_torch("llama")
    backend._open.uses_varlen = True
    with pytest.raises(ValueError, match="multiple of 256"):
        backend.allocate(4, 16)
