"""Runs programs on the ghost with torch's own recorder and without the watch; started by test_watch.

    python alone.py -- EVENTS_FILE PROGRAM [ARGUMENTS] [-- EVENTS_FILE PROGRAM [ARGUMENTS]] ...

The values policy and a lone rank's rendezvous are as in a dry-run, so that a program takes the same path.  Each has a
process of its own, in which nothing has used the card before; torch alone is imported once for all of them.
"""

import itertools
import json
import os
import runpy
import sys
from typing import Any

from forks import one_of


def main() -> None:
    import torch
    from tonnage_inside import values
    from tonnage_recorder import native, ranks

    ghost = native.load()
    assert ghost is not None
    values.install(values.Policy(torch, ghost))
    ranks.prepare(torch, ghost)
    groups = itertools.groupby(sys.argv[1:], "--".__eq__)
    alone(torch, *one_of([list(words) for separator, words in groups if not separator]))


def alone(torch: Any, target: str, program: str, *arguments: str) -> None:
    """One program, in a process that ends with it."""
    torch.cuda._lazy_call(lambda: torch.cuda.memory._record_memory_history("all", context=None, max_entries=10**7))
    sys.argv = [program, *arguments]
    sys.path[0] = os.path.dirname(program)
    ended = "completed"
    try:
        runpy.run_path(program, run_name="__main__")
    except torch.OutOfMemoryError:
        ended = "oom"
    device = torch.cuda.current_device()
    events: list[dict[str, Any]] = torch.cuda.memory._snapshot(device)["device_traces"][device]
    columns = [[event["action"], event.get("addr", event.get("device_free", 0))] for event in events]
    for column, event in zip(columns, events, strict=True):
        column += [event["size"], event["stream"]]
    with open(target, "w") as file:
        json.dump({"ended": ended, "events": columns}, file)
    os._exit(0)  # what threads do while an interpreter ends is not asked here


if __name__ == "__main__":
    main()
