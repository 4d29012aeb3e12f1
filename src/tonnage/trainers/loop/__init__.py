"""tonnage's own training loop."""
