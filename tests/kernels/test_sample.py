"""The sampler: exact where it can be, by chi-square where it draws, and the same bits in any batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pyserve._C import SampleError, SamplerState

from . import sample_twin as twin
from .sample_rows import SampleRows
from .sample_twin import Params


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def draw_one(
    logits: Tensor,
    params: Params,
    prompt: list[int] | None = None,
    output: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    bench = SampleRows()
    bench.add(params, prompt or [0], output or [])
    return bench.sample(logits[None])


def random_logits(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def test_philox_twin_gives_the_published_numbers() -> None:
    assert twin.philox(0, (0, 0, 0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFF_FFFF
    expected = (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert twin.philox(2**64 - 1, (ones, ones, ones, ones)) == expected


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1])
def test_draw_is_the_counter_based_number_of_seed_and_position(seed: int) -> None:
    vocabulary = 4096
    for length in (1, 2, 77):
        token = draw_one(torch.zeros(vocabulary), Params(seed=seed), [0] * length)[0]
        assert token.item() == int(twin.uniform(seed, length) * vocabulary)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(1, 1500), st.floats(0.05, 3), st.integers(0, 99))
def test_unfiltered_draw_inverts_the_distribution(
    seed: int, vocabulary: int, temperature: float, data: int
) -> None:
    logits = random_logits(vocabulary, seed=data)
    params = Params(temperature=temperature, seed=seed)
    token = int(draw_one(logits, params)[0].item())
    cumulative = np.cumsum(twin.distribution(logits.numpy(), params))
    at = twin.uniform(seed, 1)
    assert (cumulative[token - 1] if token else 0) - 1e-5 <= at <= cumulative[token] + 1e-5


def chi_square_is_plausible(counts: np.ndarray[Any, Any], probabilities: twin.Doubles) -> bool:
    """Pearson's statistic below the 1 - 1e-6 quantile (Wilson-Hilferty); rare tokens are pooled."""
    expected = probabilities * counts.sum()
    common = expected >= 5
    observed = [*counts[common], counts[~common].sum()]
    wanted = [*expected[common], expected[~common].sum()]
    if wanted[-1] == 0:
        assert observed.pop() == 0, "a token of probability 0 was drawn"
        wanted.pop()
    statistic = sum((o - e) ** 2 / max(e, 1e-9) for o, e in zip(observed, wanted, strict=True))
    freedom = max(len(wanted) - 1, 1)
    spread = 2 / (9 * freedom)
    return bool(statistic < freedom * (1 - spread + 4.753 * spread**0.5) ** 3)


DISTRIBUTIONS = [
    Params(),
    Params(temperature=0.5),
    Params(temperature=1.7),
    Params(top_k=7),
    Params(top_k=1000),
    Params(top_p=0.7),
    Params(top_p=0.999),
    Params(top_p=0.0),
    Params(min_p=0.1),
    Params(temperature=1.5, min_p=0.02, top_k=20, top_p=0.8),
    Params(top_k=12, top_p=0.6),
    Params(min_p=0.05, top_p=0.5),
    Params(frequency_penalty=0.7, presence_penalty=-0.4, repetition_penalty=1.3, top_p=0.9),
    Params(logit_bias=[(3, 4.0), (59, -100.0)], top_k=30),
    Params(min_tokens=9, banned_until_min=[0, 1, 2]),
]


@pytest.mark.parametrize("params", DISTRIBUTIONS, ids=repr)
@pytest.mark.parametrize("vocabulary", [60, 700])
def test_draws_follow_the_distribution(params: Params, vocabulary: int) -> None:
    prompt, output = [1, 2, 3, 3], [5, 5, 3, 8]
    logits = random_logits(vocabulary, seed=vocabulary, scale=2.0)
    draws = 4000
    bench = SampleRows()
    keywords, known = params.as_keywords(), ints(*prompt, *output)
    for seed in range(draws):
        row = bench.pool.add(known, len(prompt), 0, 0)
        bench.state.set(row, **{**keywords, "seed": seed})  # type: ignore[arg-type]
        bench.rows.append(row)
    tokens = bench.sample(logits.expand(draws, -1).contiguous())[0]
    counts = np.bincount(tokens.numpy(), minlength=vocabulary)
    z = twin.adjusted(logits.numpy(), params, prompt, output)
    assert chi_square_is_plausible(counts, twin.distribution(z, params))


def test_chi_square_notices_a_wrong_distribution() -> None:
    probabilities = twin.distribution(random_logits(60, scale=2.0).numpy(), Params())
    counts = np.round(probabilities * 4000)
    assert chi_square_is_plausible(counts, probabilities)
    assert not chi_square_is_plausible(counts, np.roll(probabilities, 1))


params_strategy = st.builds(
    Params,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 50]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -2.0]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    repetition_penalty=st.sampled_from([1.0, 1.2, 0.5]),
    seed=st.integers(0, 2**64 - 1),
    min_tokens=st.integers(0, 3),
    banned_until_min=st.lists(st.integers(0, 19), max_size=3),
    logit_bias=st.lists(st.tuples(st.integers(0, 19), st.sampled_from([-100.0, 2.5])), max_size=3),
    logprobs=st.sampled_from([-1, 0, 1, 5, 20]),
)
token_lists = st.lists(st.integers(0, 19), max_size=8)


@settings(max_examples=150, deadline=None)
@given(
    params_strategy,
    token_lists.filter(bool),
    token_lists,
    st.lists(st.integers(-3, 3), min_size=20, max_size=300),
)
def test_drawn_token_has_positive_probability_and_greedy_is_exact(
    params: Params, prompt: list[int], output: list[int], values: list[int]
) -> None:
    logits = torch.tensor(values, dtype=torch.float32)  # integers: ties everywhere
    tokens, logprobs, top_ids, top_logprobs = draw_one(logits, params, prompt, output)
    token = int(tokens.item())
    z = twin.adjusted(logits.numpy(), params, prompt, output)
    if params.temperature < 1e-5:
        assert token == twin.ranked(z)[0]
    else:
        assert twin.distribution(z, params)[token] > 0
    reference = twin.log_softmax(logits.numpy())
    if params.logprobs < 0:
        assert bool(torch.isnan(logprobs).all())
    else:
        assert logprobs.item() == pytest.approx(reference[token], abs=1e-5)
    best = twin.ranked(logits.numpy())[: max(params.logprobs, 0)]
    assert top_ids[0].tolist() == best
    assert top_logprobs[0].tolist() == pytest.approx([reference[i] for i in best], abs=1e-5)


def test_row_is_the_same_bits_alone_in_any_company_and_order() -> None:
    vocabulary, count = 5000, 40
    logits = random_logits(count, vocabulary)
    bench = SampleRows()
    for i in range(count):
        bench.add(
            Params(
                temperature=(0.0, 0.7, 1.0, 1.4)[i % 4],
                top_k=(0, 5, 0, 4000)[i % 4],
                top_p=(1.0, 0.9, 0.5)[i % 3],
                min_p=(0.0, 0.01)[i % 2],
                frequency_penalty=(0.0, 0.3)[i % 2],
                seed=i * 0x9E3779B97F4A7C15 % 2**64,
                logprobs=(-1, 0, 3, 20)[i % 4],
            ),
            prompt=list(range(1 + i)),
            output=list(range(i % 3)),
        )
    together = bench.sample(logits)
    for i in range(count):
        alone = bench.sample(logits[i : i + 1], [bench.rows[i]])
        width = alone[2].shape[1]
        assert torch.equal(alone[0], together[0][i : i + 1])
        assert torch.equal(alone[1].view(torch.int32), together[1][i : i + 1].view(torch.int32))
        assert torch.equal(alone[2], together[2][i : i + 1, :width])
        assert torch.equal(alone[3], together[3][i : i + 1, :width])
        assert bool((together[2][i, width:] == -1).all())
        assert bool((together[3][i, width:] == -torch.inf).all())
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    shuffled = bench.sample(logits[order], [bench.rows[i] for i in order.tolist()])
    assert torch.equal(shuffled[0], together[0][order])
    assert torch.equal(shuffled[1].view(torch.int32), together[1][order].view(torch.int32))


def test_seed_decides_and_position_advances_the_draw() -> None:
    logits = torch.zeros(1000)
    assert torch.equal(draw_one(logits, Params(seed=5))[0], draw_one(logits, Params(seed=5))[0])
    drawn = {int(draw_one(logits, Params(seed=5), [0] * n)[0].item()) for n in range(1, 30)}
    assert len(drawn) > 25


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((600,), -torch.inf)
    logits[[7, 300]] = torch.tensor([0.0, -1.0])
    for params in (Params(), Params(top_k=500), Params(top_p=0.99), Params(temperature=0.0)):
        bench = SampleRows()
        for seed in range(200):
            bench.add(Params(**{**params.as_keywords(), "seed": seed}), [0], [])  # type: ignore[arg-type]
        tokens = bench.sample(logits.expand(200, -1).contiguous())[0]
        assert set(tokens.tolist()) <= {7, 300}


def test_ban_ends_when_min_tokens_are_there() -> None:
    logits = torch.tensor([0.0, 9.0, 1.0])
    params = Params(temperature=0.0, min_tokens=2, banned_until_min=[1])
    assert draw_one(logits, params, [0], [0])[0].item() == 2
    assert draw_one(logits, params, [0], [0, 0])[0].item() == 1


def test_rows_at_fault_are_named_and_the_others_can_be_sampled_again() -> None:
    bench = SampleRows()
    for params in (
        Params(temperature=0.0),
        Params(),
        Params(top_k=3),
        Params(min_tokens=1, banned_until_min=[0, 1, 2]),
        Params(logit_bias=[(3, 1.0)]),
        Params(temperature=0.0),
    ):
        bench.add(params, [0], [])
    logits = torch.zeros(6, 3)
    logits[1, 2] = torch.nan
    logits[2, 0] = torch.inf
    with pytest.raises(SampleError, match="rows that cannot be sampled: 1 ") as caught:
        bench.sample(logits)
    assert caught.value.failed == {
        1: "the logits are not finite",
        2: "the logits are not finite",
        3: "no token has a finite logit",
        4: "token 3 is beyond the vocabulary of 3",
    }
    assert bench.sample(logits[[0, 5]], [bench.rows[0], bench.rows[5]])[0].tolist() == [0, 0]


def test_no_rows_is_no_work() -> None:
    tokens, logprobs, top_ids, top_logprobs = SampleRows().sample(torch.empty(0, 7))
    assert (tokens.numel(), logprobs.numel()) == (0, 0)
    assert top_ids.shape == top_logprobs.shape == (0, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("inf")},
        {"min_tokens": -1},
        {"logprobs": -2},
        {"banned_until_min": [-1]},
        {"logit_bias": [(0, float("nan"))]},
    ],
    ids=str,
)
def test_parameters_out_of_range_raise(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)).split("_")[0] + "|penalties|ids"):
        SamplerState().set(0, **wrong)


def test_rows_without_parameters_raise() -> None:
    bench = SampleRows()
    row = bench.add(Params(), [0], [])
    bench.state.clear(row)
    bench.state.clear(99)
    with pytest.raises(ValueError, match="no sampling parameters"):
        bench.sample(torch.zeros(1, 4))
    with pytest.raises(ValueError, match="one row for each"):
        bench.sample(torch.zeros(2, 4))
