"""What to change in a case that does not fit, or only barely: changes that were run, with what each one gains."""
