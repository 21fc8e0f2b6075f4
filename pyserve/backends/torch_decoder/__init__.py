"""The decoder on torch's matrix products and attention, with our own ops for the rest: the GPU path."""

from pyserve.backends.torch_decoder.backend import TorchBackend

__all__ = ["TorchBackend"]
