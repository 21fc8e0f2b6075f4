"""The decoder families that pyserve runs itself, one module each."""

from __future__ import annotations

from pyserve.errors import ModelError
from pyserve.models.architectures.base import Architecture, GGUFHeader
from pyserve.models.architectures.gemma3 import GEMMA3
from pyserve.models.architectures.gpt2 import GPT2
from pyserve.models.architectures.llama import LLAMA, MISTRAL
from pyserve.models.architectures.qwen import QWEN2, QWEN3

__all__ = ["ARCHITECTURES", "Architecture", "GGUFHeader", "find_gguf", "find_huggingface"]

ARCHITECTURES: tuple[Architecture, ...] = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA3, GPT2)


def find_huggingface(model_type: str, where: str) -> Architecture:
    """By config.json's ``model_type``. Raises ModelError, with what is supported, for any other."""
    for architecture in ARCHITECTURES:
        if model_type in architecture.huggingface.model_types:
            return architecture
    raise _unsupported(model_type, where)


def find_gguf(name: str, where: str) -> Architecture:
    """By GGUF's ``general.architecture``. Raises ModelError, with what is supported, for any other."""
    for architecture in ARCHITECTURES:
        if name in architecture.gguf.names:
            return architecture
    raise _unsupported(name, where)


def _unsupported(name: str, where: str) -> ModelError:
    supported = ", ".join(architecture.title for architecture in ARCHITECTURES)
    return ModelError(
        f"{where}: architecture {name!r} is not supported. Supported are: {supported}. The transformers"
        " back-end runs many others: pip install 'pyserve[transformers]', then --backend transformers."
    )
