"""The process group of one rank of several: it counts them, and exchanges nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from tonnage.errors import CannotEstimate


@contextmanager
def of(ranks: int, rank: int) -> Iterator[None]:
    """Within it this process is one rank of so many.  Raises CannotEstimate where it is one of others already."""
    if dist.is_initialized():
        raise CannotEstimate("This process is part of a process group; ask for source meta outside of it.")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
