"""What layers keep under a budget of bytes: one layer's frontier, the choice over layers, and how it is run."""
