"""A script of somebody's own: what it is, found out from inside it, and which of its flags to change."""
