"""accelerate with a loop of our own."""
