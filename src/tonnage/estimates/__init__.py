"""From Traces to an Estimate: bytes by category and phase, seconds of a step, what was assumed; saved and cached."""
