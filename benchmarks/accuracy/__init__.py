"""What others measured, set beside what the ghost says of the same step: `python -m benchmarks.accuracy`."""
