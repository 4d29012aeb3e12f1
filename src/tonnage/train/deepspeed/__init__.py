"""A plan carried out by DeepSpeed's engine: applied, saved and looked at."""
