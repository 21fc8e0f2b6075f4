"""One step's arithmetic, straight on the block pool: who is sampled, who is not, and who alone fails."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from pyserve import _C
from pyserve.backends.scripted import ScriptedBackend
from pyserve.engine.runner import StepResult, StepRunner
from pyserve.errors import StepFailed
from pyserve.testing.scripted import expected_tokens

POISON, NAN = 66, 77


def ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


class Steps:
    """A pool with a prompt to each row, and a runner on a scripted back-end."""

    def __init__(self, *prompts: Sequence[int]) -> None:
        self.backend = ScriptedBackend(poison_tokens=[POISON], nan_tokens=[NAN])
        self.backend.allocate(64, 4)
        self.pool = _C.BlockPool(64, 4, True)
        sampler = _C.SamplerState()
        self.runner = StepRunner(self.backend, self.pool, sampler, _C.StepBuffers(256, 64, 8))
        self.rows = []
        for prompt in prompts:
            row = self.pool.add(ints(prompt), len(prompt), 0, 0)
            assert self.pool.reserve(row, len(prompt))
            sampler.set(row, temperature=0.0)
            self.rows.append(row)

    def run(self, takes: Sequence[int], embeds: Sequence[int] = ()) -> StepResult:
        return self.runner.run(ints(self.rows), ints(takes), frozenset(embeds))


def tokens(result: StepResult) -> dict[int, int]:
    return {
        row: token
        for part in result.sampled
        for row, token in zip(part.rows.tolist(), part.tokens.tolist(), strict=True)
    }


def test_rows_that_reach_their_end_are_sampled() -> None:
    steps = Steps([1, 2, 3], [4, 5, 6, 7])
    result = steps.run([3, 2])
    assert tokens(result) == {steps.rows[0]: expected_tokens([1, 2, 3], 1)[0]}
    assert result.forwards == 1
    assert result.failed == {}


def test_embeddings_give_a_hidden_state_and_no_token() -> None:
    steps = Steps([1, 2, 3], [4, 5], [6])
    result = steps.run([3, 2, 1], embeds=[steps.rows[1]])
    assert list(result.hidden) == [steps.rows[1]]
    assert result.hidden[steps.rows[1]].shape == (steps.backend.info.hidden_size,)
    assert set(tokens(result)) == {steps.rows[0], steps.rows[2]}
    assert set(steps.run([3, 2, 1], embeds=steps.rows).hidden) == set(steps.rows)


@pytest.mark.parametrize("culprits", [{0}, {7}, {3, 4}, {0, 1, 2, 3, 4, 5, 6, 7}])
def test_poison_is_found_by_halves_and_the_others_get_what_they_would(culprits: set[int]) -> None:
    prompts = [[i, POISON if i in culprits else 1, 2] for i in range(8)]
    steps = Steps(*prompts)
    result = steps.run([3] * 8)
    assert set(result.failed) == {steps.rows[i] for i in culprits}
    assert all(isinstance(error, StepFailed) for error in result.failed.values())
    assert all(isinstance(error.__cause__, RuntimeError) for error in result.failed.values())
    assert tokens(result) == {
        steps.rows[i]: expected_tokens(prompts[i], 1)[0] for i in range(8) if i not in culprits
    }
    assert result.forwards <= 1 + 2 * 3 * len(culprits)


def test_lone_culprit_is_not_run_again() -> None:
    result = Steps([POISON]).run([1])
    assert result.forwards == 1
    assert len(result.failed) == 1


def test_rows_of_nan_fail_and_the_others_are_drawn() -> None:
    steps = Steps([1, 2], [NAN], [3], [4, NAN])
    result = steps.run([2, 1, 1, 2])
    assert set(result.failed) == {steps.rows[1], steps.rows[3]}
    assert set(tokens(result)) == {steps.rows[0], steps.rows[2]}
    assert result.forwards == 1


def test_step_without_anyone_at_their_end_samples_nothing() -> None:
    result = Steps([1, 2, 3], [4, 5, 6]).run([2, 1])
    assert result.sampled == []
    assert result.hidden == {}


def test_broken_accounting_is_a_bug_not_a_request() -> None:
    steps = Steps([1, 2, 3])
    with pytest.raises(ValueError, match=r"take|room|token"):
        steps.run([4])
