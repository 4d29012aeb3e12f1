"""Sourced facts: GPUs, model configurations, memory outside torch's allocator, number formats, measured rates."""
