"""The process group of one rank of several: it counts them, and exchanges nothing."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from tonnage.errors import CannotEstimate
from tonnage.meta.recording import inside


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
        _forget_divisions()


def _forget_divisions() -> None:
    """What DTensor has decided for meshes of this group: it would be taken for equal meshes of the next one."""
    from torch.distributed.tensor import DTensor, _redistribute

    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()  # since 2.10
    for function in list(vars(_redistribute).values()):
        if hasattr(function, "cache_clear"):
            function.cache_clear()


@contextmanager
def voting_alone() -> Iterator[None]:
    """Within it a stage of a pipeline, asking the others what shapes they are given, hears what it says itself."""
    stages = importlib.import_module("torch.distributed.pipelining.stage")
    kind = stages.PipelineStage
    names = [name for name in ("_warmup_forward_vote", "_warmup_backward_result") if hasattr(kind, name)]
    asked = {name: getattr(kind, name) for name in names}
    inside("ranks").vote_alone(stages)
    try:
        yield
    finally:
        for name, question in asked.items():
            setattr(kind, name, question)
