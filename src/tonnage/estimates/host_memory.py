"""Host memory (RAM) of a machine: what its ranks need together, and whether it fits.

A rank's bytes are a dictionary by CATEGORIES, which is kept with the rank (`Estimate.ranks`), so that ranks that were
run apart can be added up later:

    ranks = [{"rank": 0, "host": {"process": GIB, "loading": 16 * GIB}}]
    add_up(ranks, gpus=8, gpus_per_node=8).total_bytes  # 136 GiB

Two moments count: all ranks of a machine hold the whole weights while they load them, and later what a step and a
checkpoint keep on the host.  The higher one is the machine's need.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tonnage.case import Case
from tonnage.catalog.conventions import conventions_of
from tonnage.recorder.tonnage_recorder.record_layout import FIELDS, KERNEL_KINDS
from tonnage.timing.operations import ELEMENT_BYTES
from tonnage.trace.trace import Trace

CATEGORIES: Final = ("process", "loading", "pinned", "tensors", "managed", "workers", "checkpoint")
"""Categories of a rank's host memory.

`process`: Python and its libraries; `loading`: weights between the file and the card; `pinned`: page-locked
blocks as torch's host allocator rounds them; `tensors`: ordinary host tensors, such as weights, states and what was
copied from the card; `managed`: what a paged optimizer's states lack on the card; `workers`: processes that the rank
started, such as those of a DataLoader; `checkpoint`: copies of what is being saved.
"""

_AT_LOADING: Final = ("process", "loading")
"""Categories of the moment in which weights are loaded; the other moment has all but `loading`."""

_LEAST_COPY_BYTES: Final = 64 * 2**10
"""Copies to the host that are smaller (losses, norms) are within what the process holds anyway."""

_RECORD: Final = np.dtype([(name, {"B": "<u1", "H": "<u2", "I": "<u4", "Q": "<u8"}[code]) for name, code in FIELDS])
"""One record of the ghost's log."""

_CODES: Final = {name: code for code, name in KERNEL_KINDS.items()}


@dataclass(frozen=True, kw_only=True)
class MachineNeed:
    """The host memory that the ranks of one machine need together."""

    total_bytes: int | None
    """Most bytes at once; None if unknown."""
    by_category: dict[str, int]
    """Sums to `total_bytes`; empty if unknown."""


def split_by_category(
    trace: Trace, *, loading_bytes: int = 0, evicted_bytes: int = 0, into_files: bool = False
) -> dict[str, int] | None:
    """Return the host memory of one rank by category; None if its trace does not say.

    `loading_bytes` are those of `loaded_bytes`, `evicted_bytes` the managed memory that the card has no room for.
    `into_files`: what steps copy from the card goes into mapped files, whose pages the kernel writes out.
    """
    host = trace.host
    if "peak_bytes" not in host:
        return None
    pinned, zeros = host.get("pinned_bytes", 0), host.get("zero_bytes", 0)
    copied, saved = _copied_bytes(trace)
    return {
        "process": host["peak_bytes"] - pinned - zeros,
        "loading": max(loading_bytes, host.get("loading_bytes", 0)),
        "pinned": pinned,
        "tensors": zeros + (0 if into_files else copied),
        "managed": evicted_bytes,
        "workers": host.get("workers_bytes", 0),
        "checkpoint": saved,
    }


def peak_of(held: Mapping[str, int]) -> int:
    """Return the most bytes that one rank holds at once."""
    return max(sum(_at_loading(held).values()), sum(_in_steps(held).values()))


_SPREAD: Final = 0.01
"""Part of a process by which its size differs between runs.

Five runs each of gpt2, t5-small and llama-3.2-1b (`tonnage estimate MODEL --gpu a100-40gb --seq-len 128 --fresh
--json`, 2026-11-29) differed by at most 0.4 %: by the pages that Python, torch and the C library happen to touch.
"""


def interval_of(held: Mapping[str, int]) -> tuple[int, int]:
    """Return the ends of the interval for `peak_of`."""
    spread = round(_SPREAD * held.get("process", 0))
    return peak_of(held) - spread, peak_of(held) + spread


def _at_loading(held: Mapping[str, int]) -> dict[str, int]:
    return {name: held.get(name, 0) for name in _AT_LOADING}


def _in_steps(held: Mapping[str, int]) -> dict[str, int]:
    return {name: held.get(name, 0) for name in CATEGORIES if name != "loading"}


def add_up(
    ranks: Sequence[Mapping[str, Any]], *, gpus: int, gpus_per_node: int, all_save: bool = False
) -> MachineNeed:
    """Return what the fullest machine needs, from ranks that stand for all: entries of `Estimate.ranks`.

    A rank that was not run is like the one before it that was; a pipeline's first stage, the one after it and the
    last were run.  The checkpoint is counted for ranks that were run, as the first one saves it for all, or with
    `all_save` for every rank.
    """
    run = {int(rank["rank"]): rank.get("host") for rank in ranks}
    if not run or any(held is None for held in run.values()):
        return MachineNeed(total_bytes=None, by_category={})
    numbers = sorted(run)
    stand_ins = [numbers[max(bisect_right(numbers, rank) - 1, 0)] for rank in range(gpus)]
    moments: list[dict[str, int]] = []
    for first in range(0, gpus, gpus_per_node):
        loading, later = dict.fromkeys(CATEGORIES, 0), dict.fromkeys(CATEGORIES, 0)
        for rank in range(first, min(first + gpus_per_node, gpus)):
            held: Mapping[str, int] = run[stand_ins[rank]] or {}
            for name, size in _at_loading(held).items():
                loading[name] += size
            for name, size in _in_steps(held).items():
                later[name] += size if name != "checkpoint" or all_save or rank in run else 0
        moments += [loading, later]
    highest = max(moments, key=lambda moment: sum(moment.values()))
    return MachineNeed(total_bytes=sum(highest.values()), by_category=highest)


def loaded_bytes(case: Case, parameters: int) -> int:
    """Return the bytes of weights that each rank has in host memory before they go to its card.

    0 where they are loaded straight to the card or in parts: quantized weights, a network that tensor or pipeline
    parallelism divides, and weights that the engine shards as it makes them.  0 too for weights in the dtype of the
    checkpoint, which transformers leaves in mapped files: all ranks share those pages, and the kernel drops them when
    it needs room.  In another dtype each rank makes a copy of its own.
    """
    plan, job = case.plan, case.job
    divided = plan.tp * plan.pp * plan.ep > 1 or plan.shard in conventions_of(plan.engine).loads_in_parts
    if job.method == "qlora" or divided:
        return 0
    true = plan.precision in ("bf16-true", "fp16-true", "fp32")
    dtype = plan.weights_dtype or (plan.compute_dtype if true else "fp32")
    if job.method != "full":
        dtype = plan.base_dtype or plan.compute_dtype
    return 0 if dtype == _find_checkpoint_dtype(job.model.config) else int(parameters * ELEMENT_BYTES[dtype])


_DTYPES: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""Dtypes of plans by torch's names."""


def _find_checkpoint_dtype(config: Mapping[str, Any]) -> str:
    """Return the dtype in which weights were saved; bf16, in which most are published, where no dtype is named."""
    return _DTYPES.get(str(config.get("dtype") or config.get("torch_dtype") or ""), "bf16")


def offloads_into_files(plan: Mapping[str, Any]) -> bool:
    """Return True if a plan, by the names of its fields, moves something from the card into files."""
    return any(str(value).startswith("nvme") for name, value in plan.items() if name.endswith("_offload"))


def _copied_bytes(trace: Trace) -> tuple[int, int]:
    """Return the bytes of ordinary host memory that copies from the card were written to, and those while saving.

    An address that is written again counts once: a block that was freed is handed out again.
    """
    records = np.frombuffer(trace.log, dtype=_RECORD)
    large = (records["kind"] == _CODES["copy_d2h"]) & (records["bytes"] >= _LEAST_COPY_BYTES)
    if not large.any():
        return 0, 0
    copies = records[large]
    pinned = records[records["kind"] == _CODES["pinned_alloc"]]
    copies = copies[~_is_within(copies["address"], pinned["address"], pinned["bytes"])]
    saves = np.array([mark.phase == "save" for mark in trace.marks] or [False])
    saving = saves[np.minimum(copies["mark"], len(saves) - 1)]
    outside = _covered_bytes(copies[~saving])
    return outside, _covered_bytes(copies) - outside


def _is_within(addresses: Any, starts: Any, sizes: Any) -> Any:
    """Return for each address whether a block holds it; of blocks with one start, the largest counts."""
    if not len(starts):
        return np.zeros(len(addresses), dtype=bool)
    order = np.lexsort((sizes, starts))
    starts, ends = starts[order], np.maximum.accumulate(starts[order] + sizes[order])
    found = np.searchsorted(starts, addresses, side="right") - 1
    return (found >= 0) & (addresses < ends[np.maximum(found, 0)])


def _covered_bytes(copies: Any) -> int:
    """Return how many bytes the targets of copies cover together."""
    if not len(copies):
        return 0
    order = np.argsort(copies["address"], kind="stable")
    starts = copies["address"][order].astype(np.int64)
    ends = np.maximum.accumulate(starts + copies["bytes"][order].astype(np.int64))
    return int((ends - np.maximum(starts, np.concatenate(([starts[0]], ends[:-1])))).clip(min=0).sum())
