"""The ghost's worker, as in tests/ghost."""

from ghost.conftest import torch_build, worker  # noqa: F401
