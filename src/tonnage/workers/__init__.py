"""Warm workers: processes that import torch once and fork a child for each job on a ghost."""
