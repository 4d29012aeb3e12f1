"""A user's own training script: run on ghost GPUs, recognised, and advised which of its settings to change."""
