"""What a rank asks of its peers where there are none: DDP's questions are answered by what this rank says itself.

For steps on fake tensors: a process group that only counts ranks exchanges nothing, and C++ that reads what it got
would read no values.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


def group_of(args: Any) -> Any:
    """The process group that a collective is given: itself, boxed, or by its name."""
    for each in args:
        if isinstance(each, torch.ScriptObject) and each._type().name() == "ProcessGroup":
            return dist.ProcessGroup.unbox(each)
        if isinstance(each, dist.ProcessGroup):
            return each
    return dist.distributed_c10d._resolve_process_group(args[-1])


def known_to_fake_tensors() -> None:
    """Have torch know what collectives give for fake tensors, which before 2.11 only one of its tools tells it."""
    if importlib.util.find_spec("torch.distributed._meta_registrations") is None:
        importlib.import_module("torch.distributed._tools.fake_collectives")


@contextmanager
def ddp() -> Iterator[None]:
    """What DDP asks of its peers in C++, which reads values: equal parameters, averages, one order of buckets.

    Left out is the comparison of shapes before anything is run (a number for each rank, given back at once).
    """
    replicated = torch.nn.parallel.DistributedDataParallel
    build, compare = replicated.__init__, dist._verify_params_across_processes

    @functools.wraps(build)
    def built(self: Any, *arguments: Any, **options: Any) -> None:
        build(self, *arguments, **options)
        self.register_comm_hook(self.process_group, lambda group, bucket: _averaged_in_place(group, bucket))
        self.reducer = _Unanimous(self.reducer)
        self.logger = None if self.logger is None else _Untimed(self.logger)

    dist._verify_params_across_processes = lambda *arguments: None
    replicated.__init__ = built
    try:
        yield
    finally:
        dist._verify_params_across_processes = compare
        replicated.__init__ = build


@contextmanager
def pairs(together: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """What is sent from rank to rank lives as long as the work of sending it, as NCCL's has it.

    Where several such are asked for at once their work is one, which holds nothing; `together` is held meanwhile.
    """
    module = dist.distributed_c10d
    names = ("isend", "irecv", "batch_isend_irecv")
    originals = {name: getattr(module, name) for name in names}
    at_once = False

    def one(name: str) -> Callable[..., Any]:
        @functools.wraps(originals[name])
        def called(tensor: Any, *arguments: Any, **options: Any) -> Any:
            work = originals[name](tensor, *arguments, **options)
            return work if at_once or work is None else _Holding(work, tensor)

        return called

    @functools.wraps(originals["batch_isend_irecv"])
    def batch(asked: Any) -> Any:
        nonlocal at_once
        at_once = True
        try:
            with together():
                return originals["batch_isend_irecv"](asked)
        finally:
            at_once = False

    changed = {"isend": one("isend"), "irecv": one("irecv"), "batch_isend_irecv": batch}
    with ExitStack() as stack:
        for place in (dist, module):
            for name, function in changed.items():
                stack.enter_context(patch.object(place, name, function))
        yield


class _Instead:
    """All of another object but what a subclass says itself."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class _Holding(_Instead):
    """Work, and the tensor that it is about."""

    def __init__(self, original: Any, tensor: Any) -> None:
        super().__init__(original)
        self._tensor = tensor


class _Unanimous(_Instead):
    """DDP's reducer, which divides gradients anew in the second step, among peers that do it as this rank does."""

    def _rebuild_buckets(self) -> bool:
        with _OwnWord():
            return bool(self._original._rebuild_buckets())


class _Untimed(_Instead):
    """DDP's logger, without the times that it would take: there is no card to ask."""

    def set_runtime_stats_and_log(self) -> None:
        """Nothing took any time."""


class _OwnWord(TorchDispatchMode):  # type: ignore[misc]
    """DDP tells its peers an order and reads what the first of them told: here what it told itself.

    C++ writes and reads these whole numbers of the host by their address, so they are in real memory.
    """

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation; what would be sent from the host and come back stays there."""
        kwargs = kwargs or {}
        on_host = kwargs.get("device") in (None, torch.device("cpu"))
        if op is torch.ops.aten.empty.memory_format and kwargs.get("dtype") == torch.int32 and on_host:
            with _disable_current_modes():
                return op(*args, **kwargs)
        if op is torch.ops.aten.copy_.default and torch.Tensor in map(type, args):
            return args[0]
        return op(*args, **kwargs)


def _averaged_in_place(group: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """The bucket's own memory, as DDP's own averaging has it."""
    group.allreduce([bucket.buffer()])
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
