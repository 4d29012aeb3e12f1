"""Ranks of a distributed job: several real processes on this machine, or one process that acts for its rank alone.

With real processes (torchrun) the ghost's NCCL exchanges small payloads between them.  A rank alone
(TONNAGE_ALONE=1, with RANK and WORLD_SIZE set) gets no answers: its store is private to the process, NCCL is the
ghost's one-rank emulation, and groups of other backends do nothing.
"""

import contextlib
import functools
import inspect
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from .imports import after_import
from .native import Native

UNIQUE_ID_BYTES = 128
"""Size of ncclUniqueId (NCCL_UNIQUE_ID_BYTES in nccl.h)."""


_stores: list[Any] = []
"""Stores that are kept alive: torch holds only the C++ part of a store, and calls the Python part."""


left: tuple[int, int] | None = None
"""Rank and world size when the program ended its process group."""


def prepare(torch: Any, native: Native | None) -> None:
    """Tell the ghost the number of real ranks, or replace the rendezvous of a rank that is alone."""
    if not torch.distributed.is_available():
        return
    _remember_place(torch.distributed)
    if native is None:
        return
    if os.environ.get("TONNAGE_ALONE"):
        act_alone(torch.distributed, native)
    else:
        _meet(torch.distributed, native)


def _remember_place(distributed: Any) -> None:
    """Remember rank and world size when a program ends its process group, often just before it ends itself."""
    destroy = distributed.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        global left
        if distributed.is_initialized():
            left = distributed.get_rank(), distributed.get_world_size()
        return destroy(*args, **kwargs)

    for module in (distributed, distributed.distributed_c10d):
        module.destroy_process_group = destroy_process_group


def _meet(distributed: Any, native: Native) -> None:
    """Have the ghost's NCCL exchange values between ranks that are processes of this machine.

    torchrun sets their number when a process begins; processes that a program itself spawns or forks learn it when
    they create their process group.
    """

    def tell(world: str) -> None:
        if world.isdigit() and int(world) > 1 and os.environ.get("LOCAL_WORLD_SIZE", world) == world:
            native.set("REAL_RANKS", world)

    tell(os.environ.get("WORLD_SIZE", ""))
    init = distributed.init_process_group

    @functools.wraps(init)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        named = inspect.signature(init).bind_partial(*args, **kwargs).arguments
        tell(str(named.get("world_size") or os.environ.get("WORLD_SIZE", "")))
        return init(*args, **kwargs)

    for module in (distributed, distributed.distributed_c10d):
        module.init_process_group = init_process_group


def private_store(distributed: Any) -> Any:
    """Return a store that has every key that this rank waits for, in place of its peers in a rendezvous.

    A key that nobody has set reads as zeros, as many as NCCL's unique id has bytes: ranks other than the first read
    that id, and the ghost's NCCL accepts any.
    """

    class Store(distributed.Store):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self._values: dict[str, bytes] = {}

        def set(self, key: str, value: bytes | str) -> None:
            self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

        def get(self, key: str) -> bytes:
            return self._values.get(key, bytes(UNIQUE_ID_BYTES))

        def add(self, key: str, amount: int) -> int:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            return total

        def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
            if self._values.get(key, b"") == bytes(expected):
                self._values[key] = bytes(desired)
            return self._values.get(key, bytes(expected))

        def wait(self, *_args: Any) -> None:
            return

        def check(self, keys: list[str]) -> bool:
            return all(key in self._values for key in keys)  # not so for the signal that a peer has failed

        def delete_key(self, key: str) -> bool:
            return self._values.pop(key, None) is not None

        def num_keys(self) -> int:
            return len(self._values)

        def clone(self) -> "Store":
            return self  # asked for when a group is split

    store = Store()
    _stores.append(store)
    return store


def act_alone(distributed: Any, native: Native | None = None) -> None:
    """Make process groups ask nothing of their peers from now on; RANK and WORLD_SIZE give this rank's place.

    A call of NCCL that splits a communicator does not say how many ranks each part has, so `native` is told before.
    """
    init, new_group = distributed.init_process_group, distributed.new_group
    split_group: Any = getattr(distributed, "split_group", None)  # comes with torch 2.5
    backends = distributed.distributed_c10d

    @functools.wraps(init)
    def init_process_group(backend: Any = None, *_args: Any, **kwargs: Any) -> Any:
        from torch.testing._internal.distributed import fake_pg  # registers the backend "fake"

        options = {name: kwargs[name] for name in ("pg_options", "device_id", "timeout") if name in kwargs}
        store = private_store(distributed) if _mine(backend) != "fake" else fake_pg.FakeStore()
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return init(_mine(backend), store=store, rank=rank, world_size=size, **options)

    @functools.wraps(new_group)
    def new_group_alone(ranks: Any = None, timeout: Any = None, backend: Any = None, **kwargs: Any) -> Any:
        chosen = None if backend is None else _mine(backend)
        with parts_of(len(ranks) if ranks else distributed.get_world_size()):
            return new_group(ranks, timeout, chosen, **kwargs)

    @functools.wraps(split_group)
    def split_group_alone(parent_pg: Any = None, split_ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        place = distributed.get_rank(parent_pg)
        with parts_of(next((len(part) for part in split_ranks or () if place in part), 0)):
            return split_group(parent_pg, split_ranks, *args, **kwargs)

    @contextlib.contextmanager
    def parts_of(size: int) -> Iterator[None]:
        if native is not None:
            native.next_split(size)
        try:
            yield
        finally:
            if native is not None:
                native.next_split(0)

    mine = (("init_process_group", init_process_group), ("new_group", new_group_alone))
    for module in (distributed, backends, distributed.device_mesh):
        for name, function in (*mine, ("split_group", split_group_alone)):
            if hasattr(module, name):
                setattr(module, name, function)
    after_import("deepspeed.runtime.zero.utils", _agree_alone)
    after_import("torch.distributed.pipelining.stage", vote_alone)
    after_import("torch.distributed.checkpoint.utils", _plan_alone)
    after_import("torch.distributed.checkpoint.default_planner", _check_alone)


def _agree_alone(module: ModuleType) -> None:
    """Answer ZeRO-3, which compares the order of its modules with rank 0's, with this rank's own order."""
    module.assert_lst_len_same_as_other_ranks = lambda order: None  # type: ignore[attr-defined]
    module.get_lst_from_rank0 = list  # type: ignore[attr-defined]


def _plan_alone(module: ModuleType) -> None:
    """Let a rank save and load distributed checkpoints by its own plan, as torch does without a process group.

    Ranks send each other pickled plans of what each will write or read.  The others' plans are this one's with other
    offsets; they settle which of several copies is written and the index of all files, but not this rank's part.
    """
    kind: Any = module._DistWrapper
    init = kind.__init__

    @functools.wraps(init)
    def alone(self: Any, group: Any, use_dist: bool, coordinator_rank: int) -> None:
        init(self, None, False, coordinator_rank)

    kind.__init__ = alone


def _check_alone(module: ModuleType) -> None:
    """Skip the check that parts make whole tensors, which holds for all ranks' plans together only.

    The answer is that for an empty plan.
    """
    planner: Any = module
    nothing = planner._validate_global_plan([], planner.Metadata({}))  # True, or since torch 2.12 no complaints
    planner._validate_global_plan = lambda plans, metadata: nothing


def vote_alone(module: ModuleType) -> None:
    """Take this rank's own vote as the result where the stages of a pipeline vote on whether given shapes suffice.

    There is no vote before torch 2.13.
    """
    kind = module.PipelineStage
    if not hasattr(kind, "_warmup_forward_vote"):
        return
    vote = kind._warmup_forward_vote

    @functools.wraps(vote)
    def warmup_forward_vote(stage: Any, has_backward: bool, **received: Any) -> Any:
        stage.shapes_suffice = not module.InferenceMode.needs_dynamic(stage._user_meta, has_backward)
        return vote(stage, has_backward, **received)

    def warmup_backward_result(stage: Any, **_received: Any) -> Any:
        import torch

        return torch.tensor([int(stage.shapes_suffice)], dtype=torch.int32, device=stage.device)

    kind._warmup_forward_vote = warmup_forward_vote
    kind._warmup_backward_result = warmup_backward_result


def _mine(backend: Any) -> str:
    """Return the backend with everything but NCCL replaced by one that asks nothing of its peers."""
    if backend is None:
        return "cpu:fake,cuda:nccl"
    parts = str(backend).lower().split(",")
    if len(parts) == 1 and ":" not in parts[0]:
        return "nccl" if parts[0] == "nccl" else "fake"
    places = dict(part.split(":") for part in parts)
    # NCCL comes last: torch hands the options that it makes for it to every backend after it.
    ordered = sorted(places.items(), key=lambda item: item[1] == "nccl")
    return ",".join(f"{place}:{'nccl' if name == 'nccl' else 'fake'}" for place, name in ordered)
