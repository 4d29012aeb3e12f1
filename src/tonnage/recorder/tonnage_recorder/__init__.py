"""Watches PyTorch while a program trains, on a ghost, a real GPU or the CPU, and writes a Trace.

It runs beside torch in processes that may not have tonnage: standard library and torch only.
"""
