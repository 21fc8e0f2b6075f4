"""The engine without HTTP, measured step by step: where the time of a step goes, beside what it could be.

Steps run on the calling thread, as the engine's own thread runs them, with nobody to hand results to. Steps
without timers and steps with them take turns; all figures are medians, so that parts add up but nearly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from pyserve import _C
from pyserve.backends.base import Backend, PrefaultingBackend
from pyserve.bench.limits import Limits, Work
from pyserve.core.config import SchedulerConfig
from pyserve.core.spec import RequestSpec, SamplingParams
from pyserve.engine.commands import Command, Submit
from pyserve.engine.loop import StepLoop

WARM_STEPS = 3
PRODUCTS = ("qkv", "o", "gate_up", "down", "lm_head", "attention")
"""What is a matrix product or attention; everything else of a step is overhead."""
COMPUTE = ("forward", "sample")
"""The stages in which the compute threads have work."""


@dataclass(frozen=True, slots=True)
class Case:
    """Decode steps of ``batch`` sequences, ``context`` tokens long when it begins; or, where ``prefill`` is
    not 0, whole prompts of so many tokens, one at a time.
    """

    batch: int = 1
    context: int = 256
    prefill: int = 0

    @property
    def name(self) -> str:
        """For headings."""
        return f"prompt of {self.prefill}" if self.prefill else f"batch {self.batch}"

    @property
    def tokens(self) -> int:
        """That one unit computes: a step, or a prompt."""
        return self.prefill or self.batch


@dataclass(frozen=True, slots=True)
class Row:
    """One op or stage, a step (or a prompt); ``ms`` is its own, without what is measured inside of it."""

    op: str
    calls: float
    ms: float
    memory_bytes: float
    cached_bytes: float
    float_operations: float
    int_operations: float
    tile_operations: float
    limit_ms: float
    bound: str

    @property
    def percent_of_limit(self) -> float | None:
        """None where the op has no limit: it is overhead altogether."""
        return 100 * self.limit_ms / self.ms if self.limit_ms and self.ms else None


@dataclass(frozen=True, slots=True)
class StepReport:
    """``median_ms`` and ``p95_ms`` are of steps (or prompts) without timers, ``timed_ms`` and ``rows`` of
    those with them; ``compute_ms`` is spent in forward and sample.
    """

    case: Case
    median_ms: float
    p95_ms: float
    timed_ms: float
    compute_ms: float
    rows: tuple[Row, ...]

    @property
    def limit_ms(self) -> float:
        """All ops at their limits, one after the other."""
        return sum(row.limit_ms for row in self.rows)

    @property
    def percent_of_limit(self) -> float:
        """100 where the step took no longer than that."""
        return 100 * self.limit_ms / self.median_ms

    @property
    def overhead_share(self) -> float:
        """Of the step: all that is neither a matrix product nor attention."""
        rest_ms = sum(row.ms for row in self.rows if row.op not in PRODUCTS)
        return rest_ms / sum(row.ms for row in self.rows)

    @property
    def idle_share(self) -> float:
        """Of the step: between two steps' computing, when the compute threads have nothing to do."""
        return 1 - self.compute_ms / self.timed_ms

    @property
    def tokens_per_s(self) -> float:
        """Computed."""
        return 1e3 * self.case.tokens / self.median_ms

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "name": self.case.name,
            **asdict(self.case),
            "median_ms": self.median_ms,
            "p95_ms": self.p95_ms,
            "tokens_per_s": self.tokens_per_s,
            "limit_ms": self.limit_ms,
            "percent_of_limit": self.percent_of_limit,
            "overhead_share": self.overhead_share,
            "idle_share": self.idle_share,
            "timed_ms": self.timed_ms,
            "ops": [asdict(row) | {"percent_of_limit": row.percent_of_limit} for row in self.rows],
        }


class StepBench:
    """Runs cases on a back-end, which it borrows; ``temperature`` 0 is greedy."""

    def __init__(
        self,
        backend: Backend,
        limits: Limits,
        *,
        block_size: int = 16,
        max_batch_tokens: int = 512,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._backend = backend
        self._limits = limits
        self._block_size = block_size
        self._max_batch_tokens = max_batch_tokens
        self._temperature = temperature
        self._random = np.random.default_rng(seed)
        self._submitted = 0

    def run(self, case: Case, steps: int) -> StepReport:
        """Measures ``steps`` steps (of prompts a tenth as many, at least three), and as many with timers.

        Raises ValueError where the model's context is too short.
        """
        if case.prefill:
            return self._prefill(case, max(3, steps // 10))
        return self._decode(case, steps)

    def _decode(self, case: Case, steps: int) -> StepReport:
        # Those that enter first decode while others do: they must not end before the last measured step.
        entering = 2 * -(-case.batch * case.context // self._max_batch_tokens) + 2
        output_tokens = entering + 2 * steps + WARM_STEPS + 2
        loop = self._loop(case.batch, case.context + output_tokens)
        fewest = _turn(loop, self._submit(case.batch, case.context, output_tokens))
        while fewest < case.batch and not loop.scheduler.idle:
            fewest = _turn(loop)

        def step() -> None:
            nonlocal fewest
            fewest = min(fewest, _turn(loop))

        report = self._measure(case, step, WARM_STEPS, steps)
        if fewest < case.batch:
            raise RuntimeError(f"{case.name}: a step had but {fewest} sequences")
        return report

    def _prefill(self, case: Case, prompts: int) -> StepReport:
        loop = self._loop(1, case.prefill + 1)

        def prompt() -> None:
            _turn(loop, self._submit(1, case.prefill, 1))
            while not loop.scheduler.idle:
                _turn(loop)

        return self._measure(case, prompt, 1, prompts)

    def _measure(self, case: Case, run: Callable[[], None], warm: int, count: int) -> StepReport:
        for _ in range(warm):
            run()
        milliseconds: list[float] = []
        timed: list[dict[str, _C.OpTime]] = []
        for _ in range(count):
            start_s = time.perf_counter()
            run()
            milliseconds.append(1e3 * (time.perf_counter() - start_s))
            _C.profile_start()
            run()
            timed.append(_C.profile_stop())
        return StepReport(
            case,
            float(np.median(milliseconds)),
            float(np.percentile(milliseconds, 95)),
            1e3 * _median(times["step"].total_seconds for times in timed),
            1e3 * _median(map(_compute_s, timed)),
            tuple(
                _row(op, [times[op] for times in timed], self._limits)
                for op in _C.profile_ops()
                if all(op in times for times in timed)
            ),
        )

    def _loop(self, sequences: int, length: int) -> StepLoop:
        if length > self._backend.info.context_length:
            raise ValueError(
                f"{length} tokens a sequence, but the model has a context of"
                f" {self._backend.info.context_length}"
            )
        blocks = sequences * (-(-length // self._block_size) + 1)
        config = SchedulerConfig(
            num_blocks=blocks + 1,
            block_size=self._block_size,
            context_length=length,
            max_batch_tokens=self._max_batch_tokens + sequences,
            max_batch_requests=sequences,
            max_waiting_tokens=sequences * length,
            max_prefill_s=1e6,
            window_max_s=0.0,
            watermark=0.0,
            headroom_tokens=0,
        )
        loop = StepLoop(self._backend, config, prefix_cache=False)
        if isinstance(self._backend, PrefaultingBackend):
            self._backend.await_memory()
        return loop

    def _submit(self, count: int, prompt_tokens: int, output_tokens: int) -> list[Command]:
        vocabulary = self._backend.info.vocab_size
        commands: list[Command] = []
        for _ in range(count):
            self._submitted += 1
            sampling = SamplingParams(
                temperature=self._temperature,
                seed=self._submitted,
                max_tokens=output_tokens,
                ignore_eos=True,
            )
            prompt = tuple(self._random.integers(vocabulary, size=prompt_tokens).tolist())
            spec = RequestSpec(f"bench-{self._submitted}", prompt, sampling)
            commands.append(Submit(spec, time.monotonic()))
        return commands


def _turn(loop: StepLoop, commands: Iterable[Command] = ()) -> int:
    """One step; how many sequences decoded in it."""
    with _C.Range("step"):
        start_s = time.monotonic()
        boundary = loop.begin(commands, start_s)
        if boundary.plan is not None:
            result = loop.compute(boundary.plan)
            now = time.monotonic()
            loop.complete(boundary.plan, result, now)
            loop.record(boundary.plan, result, now, now - start_s)
    return boundary.plan.decode_sequences if boundary.plan is not None else 0


def _median(values: Iterable[float]) -> float:
    return float(np.median(list(values)))


def _compute_s(times: Mapping[str, _C.OpTime]) -> float:
    return sum(times[stage].total_seconds for stage in COMPUTE if stage in times)


def _row(op: str, timed: Sequence[_C.OpTime], limits: Limits) -> Row:
    def mean(name: str) -> float:
        return float(np.mean([getattr(one, name) for one in timed]))

    work = Work(*(mean(name) for name in Work.__dataclass_fields__))
    return Row(
        op,
        mean("calls"),
        1e3 * _median(one.seconds for one in timed),
        **asdict(work),
        limit_ms=1e3 * limits.seconds(work),
        bound=limits.bound(work),
    )
