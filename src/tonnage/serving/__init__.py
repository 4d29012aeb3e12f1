"""Serving with an inference engine: its weights, its KV cache, whether it starts, what to change."""
