"""What the outside asks of the engine: one request's prompt, sampling and scheduling wishes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Task(StrEnum):
    """What a request wants of the model."""

    GENERATE = "generate"
    EMBED = "embed"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn, in vLLM's and OpenAI's terms.

    ``temperature`` 0 means greedy. ``top_k`` 0 and ``top_p`` 1.0 and ``min_p`` 0.0 mean off. Penalties as
    OpenAI defines them (``frequency``, ``presence``, over output tokens) and as Keskar et al. 2019
    (``repetition``, over prompt and output tokens, 1.0 means off). ``logprobs`` is how many top
    log-probabilities to return beside the chosen token's (None: none at all; 0: the chosen one's only).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0  # already resolved: the HTTP layer draws one where the client gave none
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    min_tokens: int = 0
    max_tokens: int = 16
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request as the engine sees it. Token ids are int32; ``prompt`` is never empty.

    ``tenant`` is the API key's name ("" without keys); ``weight`` its fair share (> 0). ``cache_salt`` keeps
    prefix-cache entries of different keys apart. ``deadline_s`` is absolute, on the engine's clock.
    ``n`` sequences share the prompt; sequence i draws with seed ``seed_for(i)``.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    task: Task = Task.GENERATE
    n: int = 1
    priority: int = 0  # higher runs first
    deadline_s: float | None = None
    tenant: str = ""
    weight: float = 1.0
    cache_salt: int = 0

    def seed_for(self, index: int) -> int:
        """Seed of choice ``index``: the request's own for 0, a 64-bit mix of both beyond (splitmix64)."""
        if index == 0:
            return self.sampling.seed & 0xFFFF_FFFF_FFFF_FFFF
        z = (self.sampling.seed + index * 0x9E37_79B9_7F4A_7C15) & 0xFFFF_FFFF_FFFF_FFFF
        z = ((z ^ (z >> 30)) * 0xBF58_476D_1CE4_E5B9) & 0xFFFF_FFFF_FFFF_FFFF
        z = ((z ^ (z >> 27)) * 0x94D0_49BB_1331_11EB) & 0xFFFF_FFFF_FFFF_FFFF
        return z ^ (z >> 31)
