"""From settings to a model in memory: checkpoint, back-end, tokenizer, and the plan of the KV cache."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from pyserve import _C
from pyserve.backends.base import Backend
from pyserve.backends.cuda import choose_device
from pyserve.backends.native import NativeBackend
from pyserve.config import Settings
from pyserve.errors import ModelError
from pyserve.memory import KvPlan, plan_kv
from pyserve.models.hub_reference import parse_reference
from pyserve.models.load import open_checkpoint
from pyserve.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Loaded:
    """A model in memory, its tokenizer, and the KV cache that it is going to get.

    ``isa`` is the instruction set in use ("torch": whatever it chooses), or the GPU's name.
    """

    backend: Backend
    tokenizer: Tokenizer
    architecture: str
    isa: str
    threads: int
    kv: KvPlan
    load_s: float


def load_model(settings: Settings) -> Loaded:
    """Open the checkpoint, build the back-end and plan its KV cache.

    Raises :class:`~pyserve.errors.PyserveError` with what to do.
    """
    start = time.monotonic()
    if settings.threads is not None:
        _C.set_num_threads(settings.threads)
        torch.set_num_threads(settings.threads)
    device = choose_device(settings.device)
    if settings.backend == "transformers":
        backend, tokenizer, architecture, isa = _transformers(settings, device)
    else:
        backend, tokenizer, architecture, isa = (_native if device == "cpu" else _cuda)(settings)
    try:
        kv = plan_kv(
            bytes_per_token=backend.info.kv_bytes_per_token,
            block_size=settings.block_size or (16 if device == "cpu" else 256),
            context_length=_context_length(settings, backend.info.context_length),
            max_sequences=settings.max_batch_requests,
            wanted_bytes=settings.kv_memory,
            **({} if device == "cpu" else _gpu_memory()),
        )
    except BaseException:
        backend.close()
        raise
    threads = _C.get_num_threads() if settings.backend == "native" else torch.get_num_threads()
    load_s = time.monotonic() - start
    return Loaded(backend, tokenizer, architecture, isa, threads, kv, load_s)


def _native(settings: Settings) -> tuple[Backend, Tokenizer, str, str]:
    checkpoint = open_checkpoint(settings.model)
    tokenizer = checkpoint.tokenizer
    backend = NativeBackend(
        checkpoint,
        dtype=None if settings.dtype == "auto" else settings.dtype,
        kv_dtype=None if settings.kv_dtype == "auto" else settings.kv_dtype,
        quantize=settings.quantize,
        prefault=settings.kv_prefault,
    )
    return backend, tokenizer, checkpoint.architecture, backend.isa


def _cuda(settings: Settings) -> tuple[Backend, Tokenizer, str, str]:
    from pyserve.backends.torch_decoder import TorchBackend

    if settings.kv_dtype not in ("auto", settings.dtype):
        raise ModelError(
            "--kv-dtype must be what --dtype names on a GPU: keys have the compute type"
        )
    if settings.quantize != "none":
        raise ModelError("quantize: on a GPU weights have the compute type; leave it away")
    checkpoint = open_checkpoint(settings.model)
    tokenizer = checkpoint.tokenizer
    backend = TorchBackend(checkpoint, dtype=None if settings.dtype == "auto" else settings.dtype)
    return backend, tokenizer, checkpoint.architecture, torch.cuda.get_device_name()


def _gpu_memory() -> dict[str, int]:
    """What :func:`plan_kv` is told of the GPU's: nine tenths of what is free are for the KV cache."""
    free_bytes = torch.cuda.mem_get_info()[0]
    return {"free_bytes": free_bytes, "default_bytes": free_bytes * 9 // 10}


def _transformers(settings: Settings, device: str) -> tuple[Backend, Tokenizer, str, str]:
    from pyserve.backends.transformers import TransformersBackend

    if settings.quantize != "none":
        raise ModelError("quantize: --backend transformers runs weights as they are; leave it away")
    if settings.model is None:
        raise ModelError("--backend transformers needs --model: a directory or a hub id")
    if settings.kv_dtype != "auto":
        raise ModelError(
            "--kv-dtype is for --backend native: transformers keeps no KV cache of ours"
        )
    dtype = torch.float32 if settings.dtype == "auto" else getattr(torch, settings.dtype)
    backend = TransformersBackend.from_pretrained(settings.model, dtype=dtype, device=device)
    tokenizer = Tokenizer.from_directory(_directory(settings.model))
    return backend, tokenizer, "transformers", "torch"


def _directory(ref: str) -> Path:
    path = Path(ref).expanduser()
    if path.is_dir():
        return path
    reference = parse_reference(ref)
    if reference is None:
        raise ModelError(f"{ref} is neither a directory nor a hub id")
    from pyserve.models.hub import fetch_from_hub

    return fetch_from_hub(reference)


def _context_length(settings: Settings, longest: int) -> int:
    if settings.context_length is None:
        return longest
    if settings.context_length > longest:
        raise ModelError(
            f"context_length: {settings.context_length} tokens were asked for, the model has {longest}"
        )
    return settings.context_length
