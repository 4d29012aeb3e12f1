"""Training by a plan: the step that was estimated, on the user's network and batches."""
