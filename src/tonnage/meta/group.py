"""The process group of one rank of several: it counts them, and exchanges nothing."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from tonnage.errors import CannotEstimate
from tonnage.meta.inside import inside


@contextmanager
def of(ranks: int, rank: int) -> Iterator[None]:
    """Make this process one of `ranks` ranks.  Raises CannotEstimate if it is in a process group already."""
    if dist.is_initialized():
        raise CannotEstimate("This process is part of a process group; use source meta outside of it.")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_caches()


def _clear_sharding_caches() -> None:
    """Clear DTensor's cached decisions for meshes of this group, which equal meshes of the next would reuse."""
    from torch.distributed.tensor import DTensor, _redistribute

    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()  # since 2.10
    for function in list(vars(_redistribute).values()):
        if hasattr(function, "cache_clear"):
            function.cache_clear()


@contextmanager
def voting_alone() -> Iterator[None]:
    """Make a pipeline stage, which asks the others for the shapes they are given, take its own answer."""
    stages = importlib.import_module("torch.distributed.pipelining.stage")
    stage_class = stages.PipelineStage
    names = [name for name in ("_warmup_forward_vote", "_warmup_backward_result") if hasattr(stage_class, name)]
    questions = {name: getattr(stage_class, name) for name in names}
    inside("ranks").vote_alone(stages)
    try:
        yield
    finally:
        for name, question in questions.items():
            setattr(stage_class, name, question)
