"""Bit equality on the real default model: a request's tokens and logprobs depend on nothing but itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
import trio
from torch import Tensor

from pyserve.backends.base import ForwardOutput, ModelInfo, PackedStep
from pyserve.backends.native import NativeBackend
from pyserve.core.events import Token
from pyserve.core.spec import RequestSpec, SamplingParams
from pyserve.models.load import open_checkpoint
from pyserve.testing.engine import Collected, collect, open_scripted_engine

BLOCKS, BLOCK_SIZE = 512, 16
TEXTS = [
    "The quick brown fox",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time, in a village by the sea, there lived an old fisherman who had never once",
    "Q: What is the capital of France?\nA:",
    "1, 1, 2, 3, 5, 8, 13,",
    "In the beginning",
]
LONG = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 8


class Borrowed:
    """The one loaded model, lent to engine after engine: allocated once, closed by the fixture."""

    def __init__(self, backend: NativeBackend) -> None:
        self._backend = backend

    @property
    def info(self) -> ModelInfo:
        return self._backend.info

    def allocate(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks <= BLOCKS
        assert block_size == BLOCK_SIZE

    def forward(self, packed: PackedStep, hidden_rows: Tensor) -> ForwardOutput:
        return self._backend.forward(packed, hidden_rows)

    def close(self) -> None:
        pass


class Model:
    """The default model and its reference answers, each request alone in an engine of its own."""

    def __init__(self) -> None:
        checkpoint = open_checkpoint(None)
        self.encode = cache(lambda text: tuple(checkpoint.tokenizer.encode(text)))
        self.native = NativeBackend(checkpoint)  # as served: its weights stay quantised
        self.native.allocate(BLOCKS, BLOCK_SIZE)
        self.alone = cache(self._alone)

    def spec(self, text: str, name: str = "target", **fields: object) -> RequestSpec:
        sampling = SamplingParams(
            temperature=0.8, seed=7, max_tokens=10, logprobs=3, ignore_eos=True
        )
        return RequestSpec(name, self.encode(text), replace(sampling, **fields))  # type: ignore[arg-type]

    def run(self, *specs: RequestSpec, **scheduler: object) -> tuple[list[Collected], int]:
        """All at once in a fresh engine; the results and how often a sequence was preempted."""
        return trio.run(self._run, specs, scheduler)

    async def _run(
        self, specs: tuple[RequestSpec, ...], scheduler: dict[str, object]
    ) -> tuple[list[Collected], int]:
        options = {
            "num_blocks": BLOCKS,
            "block_size": BLOCK_SIZE,
            "max_batch_tokens": 512,
            "max_batch_requests": 64,
            "context_length": 1024,
            "prefix_cache": False,
            "max_prefill_s": 100.0,
            **scheduler,
        }
        results = [Collected()] * len(specs)

        async def client(i: int) -> None:
            results[i] = await collect(engine, specs[i])

        # Inline, and without the bound on time: who meets whom must not depend on the machine's speed.
        async with open_scripted_engine(
            Borrowed(self.native), driver="inline", **options
        ) as engine:
            async with trio.open_nursery() as nursery:
                for i in range(len(specs)):
                    nursery.start_soon(client, i)
            return results, engine.statistics().loop.scheduler.preemptions_total

    def _alone(self, text: str, seed: int, max_tokens: int = 10) -> list[tuple[object, ...]]:
        return said(self.run(self.spec(text, seed=seed, max_tokens=max_tokens))[0][0])


def said(result: Collected, index: int = 0) -> list[tuple[object, ...]]:
    """Tokens with their logprobs and the top few, to be compared bit by bit."""
    return [
        (e.token, e.logprobs and e.logprobs.logprob, e.logprobs and e.logprobs.top)
        for e in result.events
        if isinstance(e, Token) and e.index == index
    ]


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    threads = torch.get_num_threads()
    model = Model()
    yield model
    model.native.close()
    torch.set_num_threads(threads)


@pytest.mark.parametrize("others", [1, 7, 31])
def test_among_others(model: Model, others: int) -> None:
    crowd = [
        model.spec(TEXTS[i % len(TEXTS)], f"other-{i}", seed=i, max_tokens=1 + i % 10)
        for i in range(others)
    ]
    results, _ = model.run(model.spec(LONG), *crowd)
    assert said(results[0]) == model.alone(LONG, 7)
    assert max(r.metrics.batch_size for r in results) > others // 2
    for i in range(0, others, 5):
        alone = model.alone(TEXTS[i % len(TEXTS)], i)
        assert said(results[i + 1]) == alone[: 1 + i % 10]


@pytest.mark.parametrize("max_batch_tokens", [1, 7, 16, 33, 100, 127])
def test_chunked_at_any_boundary(model: Model, max_batch_tokens: int) -> None:
    text = LONG if max_batch_tokens > 7 else TEXTS[2]
    results, _ = model.run(
        model.spec(text), max_batch_tokens=max_batch_tokens, max_batch_requests=1
    )
    assert said(results[0]) == model.alone(text, 7)


def test_preempted_and_resumed(model: Model) -> None:
    tokens = 48  # so many that all of them are there before the first is through
    specs = [
        model.spec(text, f"squeezed-{i}", seed=i, max_tokens=tokens) for i, text in enumerate(TEXTS)
    ]
    blocks = max(-(-(len(spec.prompt) + tokens) // BLOCK_SIZE) for spec in specs)
    results, preemptions = model.run(*specs, num_blocks=blocks + 3, watermark=0.0)
    assert preemptions > 0
    for i, text in enumerate(TEXTS):
        assert said(results[i]) == model.alone(text, i, tokens)


def test_prefix_hit(model: Model) -> None:
    async def twice() -> list[Collected]:
        results = []
        async with open_scripted_engine(
            Borrowed(model.native),
            driver="thread",
            num_blocks=BLOCKS,
            block_size=BLOCK_SIZE,
            max_batch_tokens=512,
            context_length=1024,
        ) as engine:
            for name in ("first", "second"):
                results.append(await collect(engine, model.spec(LONG, name)))  # noqa: PERF401
        return results

    first, second = trio.run(twice)
    assert first.metrics.cached_tokens == 0
    assert second.metrics.cached_tokens > 100
    assert said(first) == said(second) == model.alone(LONG, 7)


def test_forked_choices(model: Model) -> None:
    spec = replace(model.spec(LONG), n=2)
    results, _ = model.run(spec)
    for index in range(2):
        assert said(results[0], index) == model.alone(LONG, spec.seed_for(index))
