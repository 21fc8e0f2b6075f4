"""The back-end interface over the torch decoder."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyserve import _C
from pyserve.backends.base import ForwardOutput, ModelInfo, PackedStep
from pyserve.backends.cuda import missing_for_cuda
from pyserve.backends.source import WeightSource, source_info
from pyserve.backends.torch_decoder.attention import PAGE_MULTIPLE
from pyserve.backends.torch_decoder.decode import DecodeStatistics, PaddedDecode
from pyserve.backends.torch_decoder.decoder import Pages, TorchDecoder
from pyserve.backends.torch_decoder.sampling import DeviceSampler
from pyserve.backends.torch_decoder.staging import Staging, check_step, stage
from pyserve.backends.torch_decoder.weights import load_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchBackend:
    """Implements :class:`~pyserve.backends.base.Backend` and ``SamplingBackend`` on torch tensors.

    On ``device`` "cuda" attention is torch's paged one, decode steps are CUDA graphs and tokens are drawn
    on the device. On "cpu" the same code runs with a plain attention: slower than the native back-end, and
    there to be tested against it. ``dtype`` None is bfloat16 on CUDA and float32 on the CPU; float32 on
    CUDA works, with plain attention and without graphs. Quantised weights are dequantised.

    Not batch-invariant to the bit: torch chooses among matrix-product kernels by the number of rows.

    Raises :class:`~pyserve.errors.ModelError` where weights and shape do not fit, ValueError for an unknown
    dtype, RuntimeError where CUDA is asked for and absent.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        device: str = "cuda",
        dtype: str | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        dtype = dtype or ("bfloat16" if device == "cuda" else "float32")
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        if device == "cuda" and (missing := missing_for_cuda()) is not None:
            raise RuntimeError(missing)
        self._device = torch.device(device)
        config = source.config
        weights = load_weights(source, self._device, DTYPES[dtype], progress)
        self._decoder: TorchDecoder | None = TorchDecoder(
            config, weights, self._device, DTYPES[dtype]
        )
        self._pages: Pages | None = None
        self._decode: PaddedDecode | None = None
        self._statistics = DecodeStatistics()
        self._staging = Staging(self._device)
        self._sampler = DeviceSampler(self._device)
        self._info = source_info(
            source,
            dtype=dtype,
            weight_bytes=weights.nbytes,
            kv_bytes_per_token=config.kv_bytes_per_token(DTYPES[dtype].itemsize),
            kv_dtype=dtype,
        )

    @property
    def info(self) -> ModelInfo:
        """What is loaded."""
        return self._info

    def statistics(self) -> DecodeStatistics:
        """Of the decode steps; what they were when the back-end was closed."""
        return self._statistics if self._decode is None else self._decode.statistics()

    @property
    def _open(self) -> TorchDecoder:
        if self._decoder is None:
            raise RuntimeError("the back-end is closed")
        return self._decoder

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Makes the pages, and one more block that padding writes to. torch raises where they do not fit."""
        decoder = self._open
        if decoder.uses_varlen and block_size % PAGE_MULTIPLE:
            raise ValueError(
                f"block_size must be a multiple of {PAGE_MULTIPLE} on CUDA, not {block_size}"
            )
        self._pages = decoder.allocate(num_blocks + 1, block_size)
        max_blocks = min(num_blocks, -(-decoder.config.context_length // block_size))
        self._decode = PaddedDecode(decoder, self._pages, max_blocks)
        with torch.inference_mode():
            self._decode.capture()

    @torch.inference_mode()
    def forward(self, packed: PackedStep, hidden_rows: Tensor) -> ForwardOutput:
        """Runs one step; logits and hidden states stay on the device. ValueError: an index out of range."""
        with _C.Range("forward"):
            return self._forward(packed, hidden_rows)

    def _forward(self, packed: PackedStep, hidden_rows: Tensor) -> ForwardOutput:
        decoder, pages, decode = self._open, self._pages, self._decode
        if pages is None or decode is None:
            raise RuntimeError("forward before allocate")
        blocks = len(pages.keys[0]) - 1
        check_step(packed, hidden_rows, decoder.config, blocks, pages.block_size)
        if not len(hidden_rows) and decode.fits(packed):
            nothing = torch.empty(0, decoder.config.hidden_size, device=self._device)
            return ForwardOutput(logits=decode.run(packed), hidden=nothing)
        decode.forget()
        step = stage(self._staging, packed, hidden_rows, pages.block_size)
        residual = decoder.forward(step.input_ids, step.sequences, pages)
        return ForwardOutput(
            logits=decoder.logits(residual[step.logit_rows]),
            hidden=decoder.hidden(residual[step.hidden_rows]).cpu(),
        )

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, pool: _C.BlockPool, state: _C.SamplerState, rows: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See ``_C.sample``; starts the next decode step, where there is one to be foreseen."""
        with _C.Range("sample"):
            drawn, results = self._sampler.sample(logits, pool, state, rows)
        if self._decode is not None:
            self._decode.start_ahead(logits, drawn, results[0])
        return results

    def close(self) -> None:
        """Gives weights, KV and graphs back."""
        self._statistics = self.statistics()
        self._decoder = self._pages = self._decode = None
