"""A recorded training step: allocator events, marks, kernels and collectives of one rank, and their file format."""
