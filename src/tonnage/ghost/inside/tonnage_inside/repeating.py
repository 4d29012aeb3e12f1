"""Repeats the memory requests of a step without running the program.

All steps but the first do what the first did, beside the memory that the first left behind (optimizer states).
Blocks that the step allocated and freed are allocated and freed once more, in the same order, sizes and streams, by
the real allocator in the state in which the step left it; blocks that the step kept exist already.  This takes
microseconds a block.
"""

from array import array
from typing import Any, NamedTuple

import numpy as np
from tonnage_recorder import written

from .requested import ALLOC, FREE, MARK, Requested


def repetitions(watch: Any, before: "dict[str, array[int]]", times: int) -> Requested:
    """Return the requests that repeat a program's only step, whose events are `before`, so many times."""
    began = next((number for number, (_, phase, _) in enumerate(watch.marks) if phase != "load"), len(watch.marks))
    changes = [number for number in range(max(began, 1), len(watch.marks)) if _changes_phase(watch.marks, number)]
    step = _returned({name: np.array(column) for name, column in before.items()}, began, changes)
    entered, blocks = len(step.marks), step.blocks
    marks: list[tuple[int, str, str]] = []
    requests = array("q")
    boundaries = [began]
    for count in range(times):
        boundaries.append(len(watch.marks) + len(marks))
        further = np.choose(step.requests[:, 0], (count * entered, 0, count * blocks))
        requests.frombytes((step.requests + np.outer(further, (0, 1, 0))).tobytes())
        for phase, module in ((watch.marks[mark][1], watch.marks[mark][2]) for mark in step.marks):
            marks.append((count + 1, "other" if phase == "load" else phase, module))
    return Requested(watch, marks, requests, boundaries, before)


def _changes_phase(marks: list[tuple[int, str, str]], number: int) -> bool:
    return marks[number][1] != marks[number - 1][1]


class _Step(NamedTuple):
    """The requests of a step for memory that it freed."""

    requests: Any
    """One row of three numbers for each request; marks and blocks are numbered from 0 as they come."""
    marks: list[int]
    """Marks of the step under which there are requests, or at which its phase changes."""
    blocks: int
    """Number of blocks that are handed out."""


def _returned(columns: dict[str, Any], began: int, changes: list[int]) -> _Step:
    """Return the blocks that were freed under the mark `began` or later; `changes` are marks that must be kept.

    The first batch is created before a mark tells that the step has begun.
    """
    births, ends = lives(columns["action"], columns["address"])
    inside = np.append(columns["mark"], -1)[ends] >= began
    births, ends = births[inside], ends[inside]
    events = np.concatenate((births, ends))
    rows = np.zeros((len(events), 3), dtype=np.int64)
    rows[: len(births)] = np.stack(
        (np.full(len(births), ALLOC), columns["size"][births], columns["stream"][births]), 1
    )
    rows[len(births) :, 0], rows[len(births) :, 1] = FREE, np.arange(len(births))
    order = np.argsort(events)
    rows, mark = rows[order], columns["mark"][events[order]]
    entered = np.unique(np.append(mark, np.array(changes, dtype=np.int64)))
    begins = np.zeros((len(entered), 3), dtype=np.int64)
    begins[:, 0], begins[:, 1] = MARK, np.arange(len(entered))
    return _Step(np.insert(rows, np.searchsorted(mark, entered), begins, axis=0), entered.tolist(), len(births))


def lives(action: Any, address: Any) -> tuple[Any, Any]:
    """Return the events that handed out blocks, in order, and those that freed them (a kept block: their count)."""
    allocated, completed = (written.CODES[name] for name in ("alloc", "free_completed"))
    either = np.flatnonzero((action == allocated) | (action == completed))
    either = either[np.argsort(address[either], kind="stable")]
    following = np.append(either[1:], len(action))
    same = np.append(address[either[1:]] == address[either[:-1]], False)
    born = action[either] == allocated
    died = np.where(same, following, len(action))[born]
    order = np.argsort(either[born])
    return either[born][order], died[order]
