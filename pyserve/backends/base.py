"""What the engine asks of whatever runs the model: one small interface, implemented by each back-end.

The step loop owns the paged KV cache's *accounting* (which block belongs to whom); a back-end owns its
*storage*. A step arrives packed flat: the new tokens of every sequence one after the other, with each
token's position and KV slot. A back-end must have written the KV of every token in the step when
:meth:`Backend.forward` returns, and must return the same bits for a sequence whoever shares the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from pyserve._C import BlockPool, SamplerState


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is loaded. Sizes in bytes; ``kv_bytes_per_token`` counts keys and values of all layers.

    ``dtype`` is the compute type, of every weight that does not stay quantised; ``kv_dtype`` what keys and
    values are stored as;
    ``quantization`` how most of the weights are stored on disk, ``kept_quantized`` the types of those that
    are quantised in memory too.
    """

    name: str
    vocab_size: int
    context_length: int
    hidden_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    quantization: str
    num_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    kept_quantized: tuple[str, ...] = ()
    kv_dtype: str = "float32"

    @property
    def weights(self) -> str:
        """How the weights lie in memory: "float32", or "Q4_1 and Q8_0, the rest float32"."""
        if not self.kept_quantized:
            return self.dtype
        return f"{' and '.join(self.kept_quantized)}, the rest {self.dtype}"


class PackedStep(Protocol):
    """One step's inputs, flat, all int32: T new tokens of S sequences, R of which need logits.

    The tensors are views of buffers that the next step overwrites: a back-end keeps none of them.
    """

    @property
    def input_ids(self) -> Tensor:
        """``[T]`` token ids, sequence after sequence."""

    @property
    def positions(self) -> Tensor:
        """``[T]`` position of each token in its sequence, from 0."""

    @property
    def cu_seqlens(self) -> Tensor:
        """``[S + 1]`` sequence s has tokens ``[cu_seqlens[s], cu_seqlens[s + 1])`` of the flat ones."""

    @property
    def context_lens(self) -> Tensor:
        """``[S]`` length of each sequence's KV after this step."""

    @property
    def slot_mapping(self) -> Tensor:
        """``[T]`` where each token's KV goes: ``block * block_size + offset``."""

    @property
    def block_table(self) -> Tensor:
        """``[S, B]`` the blocks of each sequence in order; beyond its own, unspecified."""

    @property
    def sample_seq(self) -> Tensor:
        """``[R]`` which sequences (0..S-1) reach their last known token and so need logits."""

    @property
    def logit_rows(self) -> Tensor:
        """``[R]`` index into the T tokens of those sequences' last ones."""


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What a step computed. ``logits`` float32 ``[R, vocab_size]`` in the order of ``logit_rows``;
    ``hidden`` float32 ``[E, hidden_size]`` (after the final norm) in the order of ``hidden_rows``.
    """

    logits: Tensor
    hidden: Tensor


@runtime_checkable
class Backend(Protocol):
    """Runs forward passes. Called from one thread at a time, the engine's; need not be thread-safe."""

    @property
    def info(self) -> ModelInfo:
        """What is loaded; the same object for the back-end's whole life."""

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Makes room for the KV of ``num_blocks * block_size`` tokens. Once, before any forward.

        Raises MemoryError or RuntimeError where that does not fit.
        """

    def forward(self, packed: PackedStep, hidden_rows: Tensor) -> ForwardOutput:
        """Runs one step, blocking; should release the GIL for the whole of it.

        Logits are wanted for ``packed.logit_rows``; ``hidden_rows`` int32 ``[E]`` indexes the T tokens whose
        final hidden state is wanted (embeddings). May raise: nothing of the step counts then, and the
        engine runs it again with fewer sequences.
        """

    def close(self) -> None:
        """Gives everything back. Idempotent; nothing is called afterwards."""


@runtime_checkable
class SamplingBackend(Protocol):
    """A back-end that draws tokens itself, where its logits are; others leave that to ``_C.sample``."""

    def sample(
        self, logits: Tensor, pool: BlockPool, state: SamplerState, rows: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What ``_C.sample`` does and raises, for logits of the last forward or rows of them."""


@runtime_checkable
class PrefaultingBackend(Protocol):
    """A back-end that goes on taking memory after :meth:`Backend.allocate`."""

    def await_memory(self) -> None:
        """Waits until it has all of it, so that a step's time is its own."""


@runtime_checkable
class SimulatedBackend(Protocol):
    """A back-end whose steps take no time but say how long they would have."""

    def take_step_seconds(self) -> float:
        """Seconds of all forwards since the last call."""
