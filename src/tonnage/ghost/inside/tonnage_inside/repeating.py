"""A step once more without its program: the allocator is asked again for what the step before asked of it.

All steps but the first do what the first did beside what the first left behind (optimizer states).  What the step
took and gave back is taken and given back once more, in the same order, sizes and streams, by the real allocator in
the state in which the step left it; what the step took and kept is there already.  Costs microseconds an event.
"""

from bisect import bisect_left
from typing import Any

from .written import event_marks, without_collection


def repeat(watch: Any, times: int) -> list[int]:
    """Repeat the only step that was made so many times.

    Returns the marks at which that step begins and each repetition.  Raises torch.OutOfMemoryError where the real
    steps would have.
    """
    torch = watch.torch
    device = torch.cuda.current_device()
    with without_collection():
        events = torch.cuda.memory._snapshot(device)["device_traces"][device]
        marks = list(event_marks(events, watch))
        began = next(
            (number for number, (_, phase, _) in enumerate(watch.marks) if phase != "load"), len(watch.marks)
        )
        returned = _returned(events, bisect_left(marks, began))
    boundaries = [began]
    for _ in range(times):
        boundaries.append(len(watch.marks))
        watch.steps += 1
        _again(watch, events, marks, returned)
    return boundaries


def _returned(events: list[dict[str, Any]], began: int) -> dict[int, int]:
    """Of blocks that were taken back since: the index of the event that handed them out to that of their last.

    The first batch is made before anything tells that the step has begun.
    """
    held: dict[int, int] = {}
    found = {}
    for place, event in enumerate(events):
        if event["action"] == "alloc":
            held[event["addr"]] = place
        elif event["action"] == "free_completed":
            first = held.pop(event["addr"], None)
            if first is not None and place >= began:
                found[first] = place
    return found


def _again(watch: Any, events: list[dict[str, Any]], marks: list[int], returned: dict[int, int]) -> None:
    """One repetition, with marks like those of the step."""
    allocate = watch.torch._C._cuda_cudaCachingAllocator_raw_alloc
    give_back = watch.torch._C._cuda_cudaCachingAllocator_raw_delete
    ends = {last: first for first, last in returned.items()}
    held: dict[int, int] = {}
    latest = -1
    for place in sorted([*returned, *ends]):
        if marks[place] != latest:
            latest = marks[place]
            _, phase, module = watch.marks[latest]
            watch.mark("other" if phase == "load" else phase, module)
        if place in returned:
            held[place] = allocate(events[place]["size"], events[place]["stream"])
        else:
            give_back(held.pop(ends[place]))
