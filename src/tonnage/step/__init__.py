"""The step that a Job under a Plan makes: a network, batches for it, its ranks, and what a run does besides."""
