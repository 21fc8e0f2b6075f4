"""The benchmark client: vLLM's definitions and JSON keys, over any OpenAI-like server."""
