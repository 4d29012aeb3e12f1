"""The portable source (`--source meta`): a step on a card, imitated on any platform."""
