"""A small engine with the names of vLLM, by which the recorder knows one."""

__version__ = "9.9"
