"""pyserve: an LLM inference server in which a request is a scope."""

from pyserve.extension import install_guard

__version__ = "0.1.0"

install_guard()
