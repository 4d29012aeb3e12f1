"""A step once more without its program: the allocator is asked again for what the step before asked of it.

All steps but the first do what the first did beside what the first left behind (optimizer states).  What the step
took and gave back is taken and given back once more, in the same order, sizes and streams, by the real allocator in
the state in which the step left it; what the step took and kept is there already.  Costs microseconds a block.
"""

from array import array
from bisect import bisect_left
from typing import Any

from . import written
from .requested import ALLOC, FREE, MARK, Requested


def repetitions(watch: Any, times: int) -> Requested:
    """What the only step that was made asked for, so many times more, behind it."""
    with written.without_collection():
        before = written.event_columns(watch.torch, watch)
    began = next((number for number, (_, phase, _) in enumerate(watch.marks) if phase != "load"), len(watch.marks))
    step = list(_returned(before, bisect_left(before["mark"], began)))
    marks: list[tuple[int, str, str]] = []
    requests = array("q")
    blocks = 0
    boundaries = [began]
    for count in range(1, times + 1):
        boundaries.append(len(watch.marks) + len(marks))
        latest = -1
        held: dict[int, int] = {}
        for birth, size, stream, mark in step:
            if mark != latest:
                latest = mark
                _, phase, module = watch.marks[mark]
                requests.extend((MARK, len(marks), 0))
                marks.append((count, "other" if phase == "load" else phase, module))
            if size >= 0:
                held[birth] = blocks
                blocks += 1
                requests.extend((ALLOC, size, stream))
            else:
                requests.extend((FREE, held.pop(birth), 0))
    found = Requested(watch, marks, requests, boundaries, before)
    found.streams = {stream: stream for stream in set(before["stream"])}
    return found


def _returned(columns: dict[str, "array[int]"], began: int) -> list[tuple[int, int, int, int]]:
    """Blocks that were taken back since an event: when handed out, bytes (-1: taken back), stream, mark; in order.

    The first batch is made before anything tells that the step has begun.
    """
    allocated, completed = written.ACTIONS["alloc"], written.ACTIONS["free_completed"]
    held: dict[int, int] = {}
    ended: dict[int, int] = {}
    for place, (action, address) in enumerate(zip(columns["action"], columns["address"], strict=True)):
        if action == allocated:
            held[address] = place
        elif action == completed:
            birth = held.pop(address, None)
            if birth is not None and place >= began:
                ended[place] = birth
    sizes, streams, marks = columns["size"], columns["stream"], columns["mark"]
    found = [(place, birth, -1) for place, birth in ended.items()]
    found += [(birth, birth, sizes[birth]) for birth in ended.values()]
    return [(birth, size, streams[birth], marks[place]) for place, birth, size in sorted(found)]
