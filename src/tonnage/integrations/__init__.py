"""Plans inside the trainers that people keep: each module here is for one of them and imports it."""
