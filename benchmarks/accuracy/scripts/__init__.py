"""One plain script a published measurement: the same step, written by us; knows nothing of tonnage or of ghosts."""
