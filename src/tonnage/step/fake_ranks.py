"""Communication with ranks that do not exist: DDP's exchanges are answered with what this rank sent itself.

This is for steps on fake tensors: a fake process group exchanges nothing, and C++ code that reads what it received
would find no values.
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
    """Return the process group that a collective is given: itself, boxed, or by its name."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and argument._type().name() == "ProcessGroup":
            return dist.ProcessGroup.unbox(argument)
        if isinstance(argument, dist.ProcessGroup):
            return argument
    return dist.distributed_c10d._resolve_process_group(args[-1])


def known_to_fake_tensors() -> None:
    """Register meta implementations of collectives, which before torch 2.11 only one of its tools does."""
    if importlib.util.find_spec("torch.distributed._meta_registrations") is None:
        importlib.import_module("torch.distributed._tools.fake_collectives")


@contextmanager
def ddp() -> Iterator[None]:
    """Replace what DDP asks of its peers in C++, which reads values: equal parameters, averages, one order of
    buckets.

    The comparison of shapes before anything runs is left out (a number for each rank, freed at once).
    """
    ddp_class = torch.nn.parallel.DistributedDataParallel
    build, compare = ddp_class.__init__, dist._verify_params_across_processes

    @functools.wraps(build)
    def init(self: Any, *arguments: Any, **options: Any) -> None:
        build(self, *arguments, **options)
        self.register_comm_hook(self.process_group, lambda group, bucket: _average_in_place(group, bucket))
        self.reducer = _SingleRankReducer(self.reducer)
        self.logger = None if self.logger is None else _LoggerWithoutTimes(self.logger)

    dist._verify_params_across_processes = lambda *arguments: None
    ddp_class.__init__ = init
    try:
        yield
    finally:
        dist._verify_params_across_processes = compare
        ddp_class.__init__ = build


@contextmanager
def pairs(together: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Keep tensors that are sent or received alive as long as their work object, as NCCL's does.

    A batch of sends and receives has one work object, which keeps nothing; `together` is entered around it.
    """
    module = dist.distributed_c10d
    names = ("isend", "irecv", "batch_isend_irecv")
    originals = {name: getattr(module, name) for name in names}
    in_batch = False

    def wrap(name: str) -> Callable[..., Any]:
        @functools.wraps(originals[name])
        def send_or_receive(tensor: Any, *arguments: Any, **options: Any) -> Any:
            work = originals[name](tensor, *arguments, **options)
            return work if in_batch or work is None else _WorkWithTensor(work, tensor)

        return send_or_receive

    @functools.wraps(originals["batch_isend_irecv"])
    def batch(operations: Any) -> Any:
        nonlocal in_batch
        in_batch = True
        try:
            with together():
                return originals["batch_isend_irecv"](operations)
        finally:
            in_batch = False

    replacements = {"isend": wrap("isend"), "irecv": wrap("irecv"), "batch_isend_irecv": batch}
    with ExitStack() as stack:
        for patched_module in (dist, module):
            for name, function in replacements.items():
                stack.enter_context(patch.object(patched_module, name, function))
        yield


class _Proxy:
    """Forwards everything to another object, except what a subclass defines."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class _WorkWithTensor(_Proxy):
    """A work object that keeps its tensor alive."""

    def __init__(self, original: Any, tensor: Any) -> None:
        super().__init__(original)
        self._tensor = tensor


class _SingleRankReducer(_Proxy):
    """DDP's reducer; when it rebuilds its buckets in the second step, its peers agree with this rank."""

    def _rebuild_buckets(self) -> bool:
        with _OwnBucketOrder():
            return bool(self._original._rebuild_buckets())


class _LoggerWithoutTimes(_Proxy):
    """DDP's logger without measured times: there is no GPU to ask."""

    def set_runtime_stats_and_log(self) -> None:
        """Do nothing: nothing took any time."""


class _OwnBucketOrder(TorchDispatchMode):  # type: ignore[misc]
    """Answers DDP's broadcast of its bucket order with what this rank sent.

    C++ writes and reads these integers on the host by their address, so they are in real memory.
    """

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, but leave the integers on the host instead of copying them to the GPU and back."""
        kwargs = kwargs or {}
        on_host = kwargs.get("device") in (None, torch.device("cpu"))
        if op is torch.ops.aten.empty.memory_format and kwargs.get("dtype") == torch.int32 and on_host:
            with _disable_current_modes():
                return op(*args, **kwargs)
        if op is torch.ops.aten.copy_.default and torch.Tensor in map(type, args):
            return args[0]
        return op(*args, **kwargs)


def _average_in_place(group: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket in its own memory, as DDP's default hook does."""
    group.allreduce([bucket.buffer()])
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
