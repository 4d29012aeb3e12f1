"""Tuning: plans are tried on real devices, and the fastest that holds is kept."""
