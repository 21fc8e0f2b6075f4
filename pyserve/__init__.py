"""pyserve: an LLM inference server in which a request is a scope."""

__version__ = "0.1.0"
