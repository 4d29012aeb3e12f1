"""The search for the fastest plan that fits: candidates, their prices, trial runs, and the reasons for the result."""
