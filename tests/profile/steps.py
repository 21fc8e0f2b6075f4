"""Some steps of the default model in an engine on its own thread, as a server runs them."""

from __future__ import annotations

import trio

from pyserve.backends.native import NativeBackend
from pyserve.models.load import open_checkpoint
from pyserve.testing.engine import collect, make_spec, open_scripted_engine


async def run_steps(requests: int, max_tokens: int) -> None:
    """That many requests at once; their prompts take two steps each."""
    backend = NativeBackend(open_checkpoint(None))
    async with (
        open_scripted_engine(backend, driver="thread") as engine,
        trio.open_nursery() as nursery,
    ):
        for seed in range(requests):
            spec = make_spec(range(seed, seed + 40), max_tokens=max_tokens, ignore_eos=True)
            nursery.start_soon(collect, engine, spec)


if __name__ == "__main__":
    trio.run(run_steps, 2, 4)
