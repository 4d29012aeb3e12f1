"""The fastest plan that fits: what may be chosen, what it costs, what it needs, and why."""
