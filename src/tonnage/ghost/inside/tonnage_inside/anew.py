"""Begins anew in a process that has done a job: the next one finds card and torch as in a process of its own.

Forking takes a quarter of a short job, most of it pages that are copied when they are first written to, and what is
made once a process (handles, streams, the threads of backward passes) another part.  What stays after this is what no
trace shows: handles, streams that were made, code that was looked up.
"""

import gc
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import decided, host, meshes
from .values import Policy

_PEAK_OF_RESIDENT = "5"
"""What Linux's /proc/self/clear_refs is told to forget how much was resident at most (proc(5))."""


def is_possible(policy: Policy) -> bool:
    """Whether the last job asked for nothing that torch keeps, so that the next one would not ask for it.

    So it is with plans of cuDNN's that the ghost does not know, and where torch takes blocks to decide something.
    """
    native = policy.native
    assert native is not None
    return not (native.unknown_calls() or native.unknown_workspaces() or decided.takes_memory())


def begin(torch: Any, policy: Policy) -> bool:
    """Give back what the last job took; whether nothing of it is left, without which no other may be done here.

    Whoever calls this holds nothing of the job any more.
    """
    native = policy.native
    assert native is not None
    policy.forget()
    _leave_group(torch)
    meshes.end()
    _forget_answers(torch)
    gc.enable()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    _announce_none(torch)
    torch.cuda.memory._record_memory_history(enabled=None)
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    host.ZEROS.forget_most()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text(_PEAK_OF_RESIDENT)
    return native.begin_anew() and not torch.cuda.memory_reserved()


def _leave_group(torch: Any) -> None:
    """Communicators give back their buffers; groups are numbered, and agree on random numbers, from the beginning."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    random: Any = sys.modules.get("torch.distributed.tensor._random")
    if random is not None:
        random._rng_tracker = None


def _forget_answers(torch: Any) -> None:
    """Whether a card before Ampere has bf16, torch finds by making a tensor, once a process."""
    asked = getattr(torch.cuda, "_check_bf16_tensor_supported", None)
    if asked is not None and hasattr(asked, "cache_clear"):
        asked.cache_clear()


def _announce_none(torch: Any) -> None:
    """The thread of backward passes announces the first mark: its blocks would else be of one of the last job's.

    In a new process it has announced nothing, which is read as the same.
    """
    number = torch.zeros((), device="cuda", requires_grad=True) * 1
    number.grad_fn.register_prehook(lambda _: torch._C._cuda_setMemoryMetadata("0"))
    number.backward()
