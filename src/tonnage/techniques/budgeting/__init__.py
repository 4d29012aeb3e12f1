"""Checkpointing of layers under a budget of bytes: measurement, the choice of what to keep, and its execution."""
