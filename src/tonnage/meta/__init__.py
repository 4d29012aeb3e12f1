"""The portable source (`--source meta`): a step on a GPU, imitated on any platform."""
