"""Ranks of a distributed job: several real processes on this machine, or one process that acts for its rank alone.

With real processes (torchrun) the ghost's NCCL exchanges small payloads between them.  Alone
(TONNAGE_ALONE=1, with RANK and WORLD_SIZE set), nobody answers: the store is private to the process, NCCL is the
ghost's one-rank emulation, and groups of other backends do nothing.
"""

import functools
import os
from typing import Any

from .native import Native


def prepare(torch: Any, native: Native) -> None:
    """Tell the ghost who else is there, and replace the rendezvous of a rank that is alone."""
    if os.environ.get("TONNAGE_ALONE"):
        if torch.distributed.is_available():
            _join_nobody(torch.distributed)
        return
    world = os.environ.get("WORLD_SIZE", "")
    if world.isdigit() and int(world) > 1 and os.environ.get("LOCAL_WORLD_SIZE", world) == world:
        native.set("REAL_RANKS", world)


def _join_nobody(distributed: Any) -> None:
    init, new_group = distributed.init_process_group, distributed.new_group
    backends = distributed.distributed_c10d

    @functools.wraps(init)
    def init_process_group(backend: Any = None, *_args: Any, **kwargs: Any) -> Any:
        from torch.testing._internal.distributed import fake_pg  # registers the backend "fake"

        options = {name: kwargs[name] for name in ("pg_options", "device_id", "timeout") if name in kwargs}
        store = distributed.HashStore() if _mine(backend) != "fake" else fake_pg.FakeStore()
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return init(_mine(backend), store=store, rank=rank, world_size=size, **options)

    @functools.wraps(new_group)
    def new_group_alone(ranks: Any = None, timeout: Any = None, backend: Any = None, **kwargs: Any) -> Any:
        chosen = None if backend is None else _mine(backend)
        return new_group(ranks, timeout, chosen, **kwargs)

    for module in (distributed, backends):
        module.init_process_group = init_process_group
        module.new_group = new_group_alone


def _mine(backend: Any) -> str:
    """The same backend with everything but NCCL replaced by one that asks nothing of its peers."""
    if backend is None:
        return "cpu:fake,cuda:nccl"
    parts = str(backend).lower().split(",")
    if len(parts) == 1 and ":" not in parts[0]:
        return "nccl" if parts[0] == "nccl" else "fake"
    places = dict(part.split(":") for part in parts)
    return ",".join(f"{place}:{'nccl' if name == 'nccl' else 'fake'}" for place, name in places.items())
