"""Plain Python twin of the sampler: full sorts, float64, and Philox by its definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
MASK = 0xFFFF_FFFF


@dataclass(frozen=True)
class Params:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    min_tokens: int = 0
    banned_until_min: Sequence[int] = ()
    logit_bias: Sequence[tuple[int, float]] = field(default=())
    logprobs: int = -1

    def as_keywords(self) -> dict[str, object]:
        return asdict(self)


def philox(key: int, counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    low, high = key & MASK, key >> 32
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = (
            (b >> 32) ^ counter[1] ^ low,
            b & MASK,
            (a >> 32) ^ counter[3] ^ high,
            a & MASK,
        )
        low, high = (low + 0x9E3779B9) & MASK, (high + 0xBB67AE85) & MASK
    return counter


def uniform(seed: int, position: int) -> float:
    words = philox(seed, (position & MASK, position >> 32, 0, 0))
    return float((words[1] << 32 | words[0]) >> 11) * 2.0**-53


def adjusted(logits: Floats, p: Params, prompt: Sequence[int], output: Sequence[int]) -> Floats:
    """Bias, ban and penalties, in float32 as the sampler does them."""
    z = logits.copy()
    for token, bias in p.logit_bias:
        z[token] += np.float32(bias)
    if len(output) < p.min_tokens:
        z[list(p.banned_until_min)] = -np.inf
    for token in {*prompt, *output}:
        penalty = np.float32(p.repetition_penalty)
        z[token] = z[token] / penalty if z[token] > 0 else z[token] * penalty
    for token in set(output):
        z[token] -= np.float32(p.frequency_penalty) * np.float32(output.count(token))
        z[token] -= np.float32(p.presence_penalty)
    return z


def ranked(z: Floats) -> list[int]:
    """Token ids, best first; the lower id among equals."""
    return sorted(range(len(z)), key=lambda i: (-z[i], i))


def distribution(z: Floats, p: Params) -> Doubles:
    """The probabilities with which a token is drawn from adjusted logits; temperature above 0.

    Parameters are float32, as where they are kept: 0.3 of thirty equal tokens is ten of them, not nine.
    """
    temperature, top_p, min_p = (float(np.float32(x)) for x in (p.temperature, p.top_p, p.min_p))
    weights = np.exp((z.astype(np.float64) - z.max()) / temperature)
    order = [i for i in ranked(z) if weights[i] >= min_p]
    if p.top_k:
        order = order[: p.top_k]
    mass = 0.0
    kept: list[int] = []
    goal = top_p * sum(weights[i] for i in order)
    for token in order:
        if kept and mass >= goal and top_p < 1:
            break
        kept.append(token)
        mass += weights[token]
    probabilities = np.zeros(len(z))
    probabilities[kept] = weights[kept] / mass
    return probabilities


def log_softmax(logits: Floats) -> Doubles:
    z = logits.astype(np.float64) - logits.max()
    return np.asarray(z - np.log(np.exp(z).sum()))
