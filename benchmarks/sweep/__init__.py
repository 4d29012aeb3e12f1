"""Random jobs under random plans, asked in several ways that must give the same answer."""
