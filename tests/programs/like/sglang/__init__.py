"""A small engine of our own with SGLang's names."""

__version__ = "9.9"
