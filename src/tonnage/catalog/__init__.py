"""Facts with their sources: GPUs, memory outside torch's allocator, and model configurations."""
