"""Drawing on a device: the CPU sampler's results, whatever the number of lanes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pyserve import _C
from pyserve.backends.torch_decoder.sampling import DeviceSampler
from tests.device.places import CUDA, at_place
from tests.kernels import sample_twin as twin
from tests.kernels.sample_rows import SampleRows
from tests.kernels.sample_twin import Params

PLACES = ["cpu", "cpu by 5 lanes", CUDA]
WISHES = [
    Params(),
    Params(temperature=0.0),
    Params(temperature=0.5),
    Params(temperature=1.7, logprobs=4),
    Params(top_k=7),
    Params(top_k=1),
    Params(top_p=0.7),
    Params(top_p=0.0),
    Params(top_p=0.999),
    Params(min_p=0.1),
    Params(temperature=1.5, min_p=0.02, top_k=20, top_p=0.8),
    Params(temperature=0.0, frequency_penalty=0.7, presence_penalty=-0.4, repetition_penalty=1.3),
    Params(frequency_penalty=0.7, presence_penalty=0.4, repetition_penalty=1.3, top_p=0.9),
    Params(logit_bias=[(3, 4.0), (59, -100.0)], top_k=30, logprobs=0),
    Params(min_tokens=9, banned_until_min=[0, 1, 2], logit_bias=[(1, 9.0)]),
]


@pytest.fixture(params=PLACES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with at_place(request.param) as kind:
        yield kind


class Bench(SampleRows):
    """Rows that are drawn on a device, or by the CPU sampler."""

    def draw(self, logits: Tensor, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        there = logits.to(device)
        rows = torch.tensor(self.rows, dtype=torch.int32)
        sampler = DeviceSampler(there.device)
        on_device, results = sampler.sample(there, self.pool, self.state, rows)
        assert torch.equal(on_device.cpu(), results[0])
        assert torch.equal(there.cpu(), logits), "the logits were not restored"
        return results

    def reference(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.sample(logits)


def bench_of(params: Params, rows: int) -> Bench:
    bench = Bench()
    for row in range(rows):
        wish = Params(**{**params.as_keywords(), "seed": 77 + row})  # type: ignore[arg-type]
        bench.add(wish, [1, 2, 3, 2], [3, 3, 5, 8][: row % 5])
    return bench


def logits_for(rows: int, vocabulary: int, seed: int = 0, ties: bool = False) -> Tensor:
    logits = 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))
    return logits.round() if ties else logits


@pytest.mark.parametrize("params", WISHES, ids=str)
@pytest.mark.parametrize("ties", [False, True])
def test_draws_follow_the_twins_distribution_by_id(device: str, params: Params, ties: bool) -> None:
    """The token is where the random number falls on the twin's distribution, laid out by id."""
    vocabulary, rows = 60, 12
    bench = bench_of(params, rows)
    logits = logits_for(rows, vocabulary, ties=ties)
    tokens, *_ = bench.draw(logits, device)
    for row in range(rows):
        prompt, output = [1, 2, 3, 2], [3, 3, 5, 8][: row % 5]
        z = twin.adjusted(logits[row].numpy(), params, prompt, output)
        token = int(tokens[row])
        if params.temperature == 0:
            assert token == twin.ranked(z)[0]
            continue
        probabilities = twin.distribution(z, params)
        assert probabilities[token] > 0
        before = probabilities[:token].sum()
        at = twin.uniform(77 + row, len(prompt) + len(output))
        assert before - 1e-6 <= at <= before + probabilities[token] + 1e-6


@pytest.mark.parametrize("params", WISHES, ids=str)
def test_logprobs_and_unfiltered_draws_are_the_cpu_samplers(device: str, params: Params) -> None:
    bench = bench_of(Params(**{**params.as_keywords(), "logprobs": 5}), 9)  # type: ignore[arg-type]
    logits = logits_for(9, 700, seed=3)
    tokens, logprobs, top_ids, top_logprobs = bench.draw(logits, device)
    expected = bench.reference(logits)
    if params.top_k == 0 and params.top_p == 1 and params.min_p == 0:
        assert tokens.tolist() == expected[0].tolist()
        torch.testing.assert_close(logprobs, expected[1], rtol=1e-5, atol=1e-5)
    assert torch.equal(top_ids, expected[2])
    torch.testing.assert_close(top_logprobs, expected[3], rtol=1e-5, atol=1e-5)


def test_bits_do_not_depend_on_the_lanes() -> None:
    logits = logits_for(len(WISHES), 500, seed=5)
    results = []
    for lanes in (1, 2, 3, 8):
        _C.emulate_lanes(lanes)
        bench = Bench()
        for i, params in enumerate(WISHES):
            bench.add(Params(**{**params.as_keywords(), "seed": i, "logprobs": 3}), [1, 2], [7])  # type: ignore[arg-type]
        results.append(bench.draw(logits, "cpu"))
    _C.emulate_lanes(1)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a.view(torch.int32), b.view(torch.int32))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 400),
    st.integers(0, 2**64 - 1),
    st.floats(0.05, 3),
    st.integers(0, 50),
    st.floats(0, 1),
    st.floats(0, 1),
    st.booleans(),
)
def test_any_filter_keeps_what_the_twin_keeps(
    vocabulary: int,
    seed: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    ties: bool,
) -> None:
    params = Params(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    bench = Bench()
    bench.add(params, [0], [])
    logits = logits_for(1, vocabulary, seed=seed % 1000, ties=ties)
    token = int(bench.draw(logits, "cpu")[0])
    kept = twin.distribution(logits[0].numpy(), params)
    near = twin.distribution(logits[0].numpy(), _wider(params))
    assert kept[token] > 0 or near[token] > 0


def _wider(params: Params) -> Params:
    """Thresholds moved by a rounding error."""
    changed = {"top_p": min(1.0, params.top_p * (1 + 1e-6)), "min_p": params.min_p * (1 - 1e-6)}
    return Params(**{**params.as_keywords(), **changed})  # type: ignore[arg-type]


def test_the_kept_set_is_exact() -> None:
    """Over many seeds every kept token comes up, and nothing else."""
    params = Params(top_k=6, temperature=2.0)
    logits = logits_for(1, 40, seed=9, ties=True).expand(400, 40).contiguous()
    bench = bench_of(params, 400)
    tokens, *_ = bench.draw(logits, "cpu")
    expected = np.flatnonzero(twin.distribution(logits[0].numpy(), params))
    assert sorted(set(tokens.tolist())) == expected.tolist()


def test_rows_that_cannot_be_drawn_are_named(device: str) -> None:
    logits = logits_for(4, 30)
    logits[1, 4] = float("nan")
    logits[2] = -float("inf")
    logits[3, 7] = float("inf")
    bench = bench_of(Params(), 4)
    with pytest.raises(_C.SampleError) as caught:
        bench.draw(logits, device)
    assert caught.value.failed == {
        1: "the logits are not finite",
        2: "no token has a finite logit",
        3: "the logits are not finite",
    }
    beyond = Bench()
    beyond.add(Params(logit_bias=[(30, 1.0)]), [0], [])
    with pytest.raises(_C.SampleError, match="token 30 is beyond the vocabulary of 30"):
        beyond.draw(logits[:1], device)
