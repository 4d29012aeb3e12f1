"""The training step that a Job under a Plan makes: network, batches, ranks, and phases beside the steps."""
