"""Any ``AutoModelForCausalLM`` of Hugging Face's transformers (extra ``pyserve[transformers]``).

For architectures that the native back-end does not know, and correct before fast: it keeps no keys and
values. What it stores in the paged cache is each position's token id; a step reads the whole context of
every sequence that needs logits back through the block table, pads them into one rectangle and runs the
model over it. So a decode step costs as much as a prefill of the context, prefill chunks short of the
prompt's end cost nothing, and preemption, forks and prefix hits are right for any architecture, recurrent
ones included. Results are *not* bit-equal across batches: torch's matrix products are not.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

import pyserve._C  # noqa: F401  (registers torch.ops.pyserve)
from pyserve import _C
from pyserve.backends.base import ForwardOutput, ModelInfo, PackedStep
from pyserve.errors import ModelError

_TOKEN_ID_BYTES = 4


class TransformersBackend:
    """Implements :class:`~pyserve.backends.base.Backend` on a loaded ``PreTrainedModel``."""

    def __init__(self, model: Any, *, name: str) -> None:
        self._model = model.eval()
        self._info = _model_info(model, name)
        self._picks_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._block_size = 0
        self._token_ids = torch.empty(0, dtype=torch.int32)

    @classmethod
    def from_pretrained(
        cls, ref: str, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> TransformersBackend:
        """Loads a directory or hub id; safetensors only, and no code that comes with the checkpoint.

        Raises :class:`~pyserve.errors.ModelError` where transformers is missing or cannot load it.
        """
        try:
            from transformers import AutoModelForCausalLM
        except ImportError as error:
            raise ModelError(
                "the transformers back-end needs: pip install 'pyserve[transformers]'"
            ) from error
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                ref, dtype=dtype, use_safetensors=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"transformers cannot load {ref}: {error}") from error
        return cls(model.to(device), name=ref)

    @property
    def info(self) -> ModelInfo:
        """From the model's own config."""
        return self._info

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Makes room for the token ids, four bytes each."""
        self._block_size = block_size
        self._token_ids = torch.zeros(num_blocks * block_size, dtype=torch.int32)

    def close(self) -> None:
        """Drops the model and the cache."""
        self._model = None
        self._token_ids = torch.empty(0, dtype=torch.int32)

    @torch.inference_mode()
    def forward(self, packed: PackedStep, hidden_rows: Tensor) -> ForwardOutput:
        """See :class:`~pyserve.backends.base.Backend`. Raises what the model raises."""
        with _C.Range("forward"):
            self._token_ids[packed.slot_mapping.long()] = packed.input_ids
            return ForwardOutput(
                logits=self._logits(packed), hidden=self._hidden_states(packed, hidden_rows)
            )

    def _logits(self, packed: PackedStep) -> Tensor:
        if not len(packed.logit_rows):
            return torch.empty(0, self._info.vocab_size)
        inputs, sequence, position = self._rectangle(packed, packed.logit_rows)
        column = position
        if self._picks_logits:
            inputs["logits_to_keep"], column = torch.unique(position, return_inverse=True)
        logits: Tensor = self._model(**inputs, use_cache=False).logits
        return logits[sequence, column].float().cpu()

    def _hidden_states(self, packed: PackedStep, rows: Tensor) -> Tensor:
        if not len(rows):
            return torch.empty(0, self._info.hidden_size)
        inputs, sequence, position = self._rectangle(packed, rows)
        hidden: Tensor = self._model.base_model(**inputs, use_cache=False).last_hidden_state
        return hidden[sequence, position].float().cpu()

    def _rectangle(
        self, packed: PackedStep, rows: Tensor
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """The contexts that end in ``rows``, padded on the right (causal models never look there).

        Returns the model's inputs, ids and mask ``[S, longest]``, and for each of the R rows its sequence in
        them and its position.
        """
        wanted = rows.long()
        owner = torch.searchsorted(packed.cu_seqlens.long(), wanted, right=True) - 1
        sequences, sequence = torch.unique(owner, return_inverse=True)
        contexts = [self._context(packed, s) for s in sequences.tolist()]
        lengths = torch.tensor([len(context) for context in contexts], dtype=torch.int32)
        cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        ids = torch.ops.pyserve.pad(torch.cat(contexts), cu_seqlens, 0)
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        device = self._model.device
        inputs = {
            "input_ids": ids.long().to(device),
            "attention_mask": mask.long().to(device),
        }
        return inputs, sequence.to(device), packed.positions.long()[wanted].to(device)

    def _context(self, packed: PackedStep, s: int) -> Tensor:
        """Token ids of sequence ``s`` up to and with this step, int32, read through the block table."""
        positions = torch.arange(int(packed.context_lens[s]))
        blocks = packed.block_table[s].long()[positions // self._block_size]
        return self._token_ids[blocks * self._block_size + positions % self._block_size]


def _model_info(model: Any, name: str) -> ModelInfo:
    config = model.config.get_text_config()
    eos = model.generation_config.eos_token_id if model.generation_config else config.eos_token_id
    parameters = list(model.parameters())
    return ModelInfo(
        name=name,
        vocab_size=config.vocab_size,
        context_length=config.max_position_embeddings,
        hidden_size=config.hidden_size,
        eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        dtype=str(model.dtype).removeprefix("torch."),
        quantization="none",
        num_parameters=sum(p.numel() for p in parameters),
        weight_bytes=sum(p.numel() * p.element_size() for p in parameters),
        kv_bytes_per_token=_TOKEN_ID_BYTES,
    )
