"""How long the compute threads idle between two steps, by part: ``python bench/idle.py --streams 16``.

Measured on the engine's own thread, from the end of sampling to the start of the next forward pass, and from
the forward pass's end to sampling. ``--http`` adds real clients that stream over HTTP, in a process of their
own, which compete for the processor as well as (in the server) for the interpreter.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import trio

from pyserve.backends.native import NativeBackend
from pyserve.config import Settings
from pyserve.core.spec import RequestSpec, SamplingParams
from pyserve.engine import runner
from pyserve.engine.engine import Engine, open_engine
from pyserve.engine.loop import StepLoop
from pyserve.http.auth import KeyRing
from pyserve.loading import load_model
from pyserve.server import Started, engine_config, serve

PROMPT_TOKENS = 32
BUSY = ("forward", "sample")


class Marks:
    """Seconds by part, step by step; a part lasts from the last mark until it is named."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.tokens: list[int] = []
        self._now: defaultdict[str, float] = defaultdict(float)
        self._last = time.perf_counter()

    def mark(self, part: str) -> None:
        now = time.perf_counter()
        self._now[part] += now - self._last
        self._last = now

    def end(self, tokens: int) -> None:
        self.steps.append(dict(self._now))
        self.tokens.append(tokens)
        self._now.clear()

    def wrap(self, owner: Any, name: str, before: str, part: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.mark(before)
            try:
                return function(*args, **kwargs)
            finally:
                self.mark(part)

        setattr(owner, name, wrapped)

    def install(self) -> None:
        forward = NativeBackend.forward

        @functools.wraps(forward)
        def counted(backend: NativeBackend, packed: Any, hidden_rows: Any) -> Any:
            self.mark("prepare")
            self.end(len(packed.input_ids))
            output = forward(backend, packed, hidden_rows)
            self.mark("forward")
            return output

        NativeBackend.forward = counted  # type: ignore[method-assign]
        self.wrap(runner.StepRunner, "_sample", "after forward", "sample")
        self.wrap(StepLoop, "begin", "hand over, wait", "plan")
        self.wrap(StepLoop, "complete", "return", "complete")

    def report(self, streams: int) -> dict[str, Any]:
        """Medians over the steps in which exactly ``streams`` decode."""
        chosen = [s for s, n in zip(self.steps, self.tokens, strict=True) if n == streams][3:-3]
        # What is filed at a step's start is of the step before it: the share is the same.
        idle = [sum(v for k, v in step.items() if k not in BUSY) for step in chosen]
        busy = [sum(v for k, v in step.items() if k in BUSY) for step in chosen]
        parts = sorted({part for step in chosen for part in step})
        return {
            "steps": len(chosen),
            "busy_ms": statistics.median(busy) * 1e3,
            "idle_us": statistics.median(idle) * 1e6,
            "idle_mean_us": statistics.fmean(idle) * 1e6,
            "idle_share": sum(idle) / (sum(idle) + sum(busy)),
            "idle_share_median": statistics.median(idle)
            / (statistics.median(idle) + statistics.median(busy)),
            "parts_us": {
                p: round(statistics.median(s.get(p, 0.0) for s in chosen) * 1e6) for p in parts
            },
        }


async def direct(streams: int, tokens: int, settings: Settings) -> None:
    loaded = load_model(settings)
    async with (
        open_engine(loaded.backend, engine_config(settings, loaded)) as engine,
        trio.open_nursery() as nursery,
    ):
        for number in range(streams):
            nursery.start_soon(_one, engine, number, tokens)


async def _one(engine: Engine, number: int, tokens: int) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompt = tuple(1000 + (number * 7919 + i) % 40_000 for i in range(PROMPT_TOKENS))
    async with engine.request(RequestSpec(f"r{number}", prompt, sampling)) as stream:
        async for _ in stream:
            pass


def _clients(url: str, model: str, streams: int, tokens: int) -> None:
    from pyserve.bench.load import Pace, Target, drive
    from pyserve.bench.workload import Work

    work = [
        Work(tuple(1000 + (number * 7919 + i) % 40_000 for i in range(PROMPT_TOKENS)), tokens)
        for number in range(streams)
    ]
    target = Target(url + "/v1/completions", model, {}, {"ignore_eos": True, "temperature": 0})
    trio.run(drive, target, work, Pace(concurrency=streams), lambda _: None)


async def over_http(streams: int, tokens: int, settings: Settings) -> None:
    loaded = load_model(settings)
    spawn = multiprocessing.get_context("spawn")
    started: list[Started] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, loaded, settings, KeyRing(), started.append)
        while not started:  # noqa: ASYNC110 -- a call-back tells, in another task
            await trio.sleep(0.01)
        name = loaded.backend.info.name
        client = spawn.Process(target=_clients, args=(started[0].urls[0], name, streams, tokens))
        client.start()
        await trio.to_thread.run_sync(client.join)
        nursery.cancel_scope.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--http", action="store_true")
    parser.add_argument("--switch-interval", type=float)
    options = parser.parse_args()
    if options.switch_interval:
        sys.setswitchinterval(options.switch_interval)
    marks = Marks()
    marks.install()
    settings = Settings(port=0, kv_memory=256 << 20)
    run = over_http if options.http else direct
    trio.run(run, options.streams, options.tokens, settings)
    found = marks.report(options.streams)
    print(json.dumps({"streams": options.streams, "http": options.http, **found}))


if __name__ == "__main__":
    main()
