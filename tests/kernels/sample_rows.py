"""Rows to draw tokens for."""

from __future__ import annotations

import torch
from torch import Tensor

from pyserve._C import BlockPool, SamplerState, sample
from tests.kernels.sample_twin import Params


class SampleRows:
    """A pool and a sampler state, filled row by row: each with a prompt, an output so far, its parameters."""

    def __init__(self) -> None:
        self.pool = BlockPool(1, 16, False)
        self.state = SamplerState()
        self.rows: list[int] = []

    def add(self, params: Params, prompt: list[int], output: list[int]) -> int:
        tokens = torch.tensor([*prompt, *output], dtype=torch.int32)
        row = self.pool.add(tokens, len(prompt), 0, 0)
        self.state.set(row, **params.as_keywords())  # type: ignore[arg-type]
        self.rows.append(row)
        return row

    def sample(
        self, logits: Tensor, rows: list[int] | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        chosen = self.rows if rows is None else rows
        rows_tensor = torch.tensor(chosen, dtype=torch.int32)
        return sample(logits, self.pool, self.state, rows_tensor)
