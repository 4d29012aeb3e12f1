"""The search for the fastest plan that fits: which candidates there are, what they cost and need, and why."""
