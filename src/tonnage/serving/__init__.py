"""Serving with an inference engine: its weights, its KV cache, whether it starts, and what to change if it does not."""
