"""A fixed set of questions, answered by two versions of the program, and what differs between their answers."""
