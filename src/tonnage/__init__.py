"""tonnage: know what your GPUs can carry before you load them."""

__version__ = "0.1.0"
