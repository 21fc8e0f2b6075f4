"""The model on this machine's CPU, through the compiled decoder: what pyserve is built around."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from pyserve import _C
from pyserve.backends.base import ForwardOutput, ModelInfo, PackedStep
from pyserve.backends.source import WeightSource, source_info
from pyserve.errors import ModelError
from pyserve.models.checkpoint import PLAIN
from pyserve.models.config import DecoderConfig
from pyserve.models.source import BLOCK_ELEMENTS, QuantizedTensor

ELEMENT_SIZES = {"float32": 4, "bfloat16": 2}
_BYTES = {name: kept[1] / BLOCK_ELEMENTS for name, kept in _C.stored_formats().items()}
KEPT_QUANTIZED: Mapping[str, float] = {k: v for k, v in _BYTES.items() if k not in PLAIN}
"""GGUF types that stay quantised, as they are or as the nearest that the kernels multiply with, and the bytes
that an element takes then; others become the compute type."""
KV_SIZES = {"float32": (4, 0), "bfloat16": (2, 0), "int8": (1, 4)}
"""How keys and values may be stored: bytes of an element, and of the scale of a token's kv head."""
QUANTIZE: Mapping[str, Mapping[str, float]] = {
    "none": KEPT_QUANTIZED,
    "int8": {**KEPT_QUANTIZED, **dict.fromkeys(PLAIN, _BYTES["F32"])},
}
"""What ``--quantize`` can be, and the stored types that are quantised in memory then."""


def default_dtype(stored: str) -> str:
    """ "bfloat16" for weights stored so, or where the processor has instructions for it; else "float32".

    Without such instructions bfloat16 is widened when it is read and nothing is lost: half the memory.
    """
    return "bfloat16" if stored == "BF16" or _C.has_bfloat16() else "float32"


def default_kv_dtype(dtype: str | None) -> str:
    """How keys and values are stored where nobody says: as ``dtype``, bfloat16 where that is None too."""
    return dtype or "bfloat16"


def kv_bytes_per_token(config: DecoderConfig, kv_dtype: str) -> int:
    """Bytes that one token's keys and values take in all layers."""
    return config.kv_bytes_per_token(*KV_SIZES[kv_dtype])


class NativeBackend:
    """Implements :class:`~pyserve.backends.base.Backend` on ``pyserve._C.Decoder``.

    Weights are copied in, packed for the processor's widest vectors; ``source`` can be closed afterwards.
    ``dtype`` is "float32" or "bfloat16", for all weights; None is :func:`default_dtype`, but weights in
    :data:`KEPT_QUANTIZED` types stay as they are, and are multiplied as integers. ``quantize`` "int8" rounds
    the other matrices to 8 bits for each 32 of a row, as GGUF's Q8_0; ``dtype`` is that of the rest then.
    ``kv_dtype`` is one of :data:`KV_SIZES`, for keys and values; None is :func:`default_kv_dtype`. ``isa``
    forces an instruction set ("": the best). With ``prefault``, memory for the KV cache is taken in idle time
    after :meth:`allocate`, where the system can do that (Linux 5.14). ``progress`` is called with each
    weight's bytes at its source as it is taken in.

    Raises :class:`~pyserve.errors.ModelError` where weights and shape do not fit, ValueError for an unknown
    dtype, KV dtype or instruction set, MemoryError.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        dtype: str | None = None,
        kv_dtype: str | None = None,
        isa: str = "",
        quantize: str = "none",
        prefault: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        keep = () if dtype is not None and quantize == "none" else QUANTIZE[quantize]
        kv_dtype = kv_dtype or default_kv_dtype(dtype)
        dtype = dtype or default_dtype(source.quantization)
        if dtype not in ELEMENT_SIZES:
            raise ValueError(f"dtype must be one of {', '.join(ELEMENT_SIZES)}, got {dtype!r}")
        if kv_dtype not in KV_SIZES:
            raise ValueError(f"kv_dtype must be one of {', '.join(KV_SIZES)}, got {kv_dtype!r}")
        config = source.config
        decoder = _C.Decoder(config.as_dict(), dtype, isa)
        kept = set()
        try:
            for name, tensor in source.tensors(keep):
                if isinstance(tensor, QuantizedTensor):
                    decoder.load_blocks(name, tensor.type, tensor.blocks)
                    kept.add(quantize if tensor.type in PLAIN else tensor.type)
                else:
                    decoder.load(name, tensor)
                if progress is not None:
                    progress(tensor.nbytes)
            decoder.seal()
        except ValueError as error:
            raise ModelError(f"{source.name}: {error}") from error
        if quantize not in ("none", *kept):
            raise ModelError(
                f"quantize: {source.name} has no floating-point matrix whose rows are a multiple of"
                f" {BLOCK_ELEMENTS} long, so that none became {quantize}; stored is {source.quantization}"
            )
        self._decoder: _C.Decoder | None = decoder
        self._prefault = prefault
        self._info = source_info(
            source,
            dtype=dtype,
            weight_bytes=decoder.weight_bytes,
            kv_bytes_per_token=kv_bytes_per_token(config, kv_dtype),
            kv_dtype=kv_dtype,
            kept_quantized=tuple(sorted(kept)),
        )

    @property
    def info(self) -> ModelInfo:
        """What is loaded."""
        return self._info

    @property
    def isa(self) -> str:
        """Instruction set in use: "portable", "avx2", "avx512" or "amx"."""
        return self._open.isa

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV storage, allocated so far (0 before :meth:`allocate`)."""
        return self._open.kv_bytes

    @property
    def _open(self) -> _C.Decoder:
        if self._decoder is None:
            raise RuntimeError("the back-end is closed")
        return self._decoder

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Reserves KV storage; the system hands the memory out as blocks are first written, or in idle time
        where the back-end was made to prefault.
        """
        self._open.allocate_kv(num_blocks, block_size, self._info.kv_dtype, self._prefault)

    def await_memory(self) -> None:
        """Waits until all of the KV storage that is to be prefaulted is there."""
        self._open.await_kv()

    def forward(self, packed: PackedStep, hidden_rows: Tensor) -> ForwardOutput:
        """Runs one step with the GIL released. ValueError where an index is out of range."""
        logits, hidden = self._open.forward(
            packed.input_ids,
            packed.positions,
            packed.cu_seqlens,
            packed.context_lens,
            packed.slot_mapping,
            packed.block_table,
            packed.logit_rows,
            hidden_rows,
        )
        return ForwardOutput(logits=logits, hidden=hidden)

    def close(self) -> None:
        """Gives weights and KV back."""
        self._decoder = None
