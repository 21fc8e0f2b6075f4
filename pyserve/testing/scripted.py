"""What a scripted back-end must say, worked out without an engine: the oracle of the engine's tests."""

from __future__ import annotations

from collections.abc import Sequence

from pyserve.backends.scripted import ScriptedBackend
from pyserve.testing.packing import NO_ROWS, pack_by_hand


def expected_tokens(
    prompt: Sequence[int], count: int, backend: ScriptedBackend | None = None
) -> list[int]:
    """The greedy continuation of ``prompt``, ``count`` tokens, alone and in one chunk.

    ``backend``: a fresh one with the options of the one under test; its cache is made here.
    """
    backend = backend or ScriptedBackend()
    backend.allocate(num_blocks=1, block_size=len(prompt) + count)
    step = pack_by_hand((prompt, 0, [0]), block_size=len(prompt) + count)
    tokens: list[int] = []
    for position in range(len(prompt), len(prompt) + count):
        tokens.append(int(backend.forward(step, NO_ROWS).logits.argmax()))
        step = pack_by_hand((tokens[-1:], position, [0]), block_size=len(prompt) + count)
    return tokens
