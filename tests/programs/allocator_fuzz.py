"""Runs programs of allocator calls on a CUDA build of torch and reports what its caching allocator did.

Reads one JSON document from standard input: a list of jobs, each with `environment` and `operations`.  Every job
runs in a fork made before the first use of the GPU, so that torch is imported once and each job starts with a fresh
allocator.  Writes one JSON line for each job.

Operations (`n` counts the `alloc` operations from 0; one that ran out of memory stays empty):
    ["alloc", bytes, stream]  ["free", n]  ["record", n, stream]  ["synchronise"]  ["empty"]  ["settings", text]
    ["reset_peak"]  ["reset_accumulated"]
    ["pool", splits, use_on_oom]  ["begin", pool]  ["end", pool]  ["drop", pool]
    ["graph", stream]  ["end_graph"]
"""

import ctypes
import json
import os
import sys
import traceback
import warnings
from typing import Any

import torch

STREAMS = 3


class Machine:
    """Carries out operations on the real allocator."""

    def __init__(self) -> None:
        torch.cuda.init()
        self.streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(STREAMS - 1))]
        self.tensors: list[torch.Tensor | None] = []
        self.out_of_memory: list[int] = []
        self.pools: list[Any] = []
        self.pool_ids: list[list[int]] = []
        self.uses: dict[int, Any] = {}
        self.graph_stream = self.streams[0]
        self.graphs: list[torch.cuda.CUDAGraph] = []

    def alloc(self, size: int, stream: int) -> None:
        try:
            with torch.cuda.stream(self.streams[stream]):
                self.tensors.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.cuda.OutOfMemoryError:
            self.out_of_memory.append(len(self.tensors))
            self.tensors.append(None)

    def free(self, number: int) -> None:
        self.tensors[number] = None

    def record(self, number: int, stream: int) -> None:
        tensor = self.tensors[number]
        if tensor is not None:
            tensor.record_stream(self.streams[stream])

    def synchronise(self) -> None:
        torch.cuda.synchronize()

    def empty(self) -> None:
        torch.cuda.empty_cache()

    def settings(self, text: str) -> None:
        torch._C._accelerator_setAllocatorSettings(text)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def reset_accumulated(self) -> None:
        torch.cuda.reset_accumulated_memory_stats()

    def pool(self, splits: bool, use_on_oom: bool) -> None:
        pool = torch.cuda.MemPool(use_on_oom=use_on_oom, no_split=not splits)
        self.pools.append(pool)
        self.pool_ids.append(list(pool.id))

    def begin(self, number: int) -> None:
        self.uses[number] = torch.cuda.use_mem_pool(self.pools[number])
        self.uses[number].__enter__()

    def end(self, number: int) -> None:
        self.uses.pop(number).__exit__(None, None, None)

    def drop(self, number: int) -> None:
        self.pools[number] = None

    def graph(self, stream: int) -> None:
        self.graph_stream = self.streams[stream]
        self.graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.stream(self.graph_stream):
            self.graphs[-1].capture_begin(capture_error_mode="relaxed")

    def end_graph(self) -> None:
        with torch.cuda.stream(self.graph_stream):
            self.graphs[-1].capture_end()
        self.pools.append(None)
        self.pool_ids.append(list(self.graphs[-1].pool()))


def run(operations: list[list[Any]]) -> dict[str, Any]:
    """What the allocator recorded and counted."""
    machine = Machine()
    torch.cuda.memory._record_memory_history(max_entries=10**7, context=None, stacks="python")
    for name, *arguments in operations:
        getattr(machine, name)(*arguments)
    statistics = torch.cuda.memory_stats()
    snapshot = torch.cuda.memory._snapshot()
    events = [
        [event["action"], event.get("addr", event.get("device_free")), event["size"], event["stream"]]
        for event in snapshot["device_traces"][0]
        if event["action"] != "snapshot"
    ]
    segments = [
        [
            segment["address"],
            segment["stream"],
            segment["segment_type"],
            segment["is_expandable"],
            list(segment["segment_pool_id"]),
            [[block["address"], block["size"], block["state"]] for block in segment["blocks"]],
        ]
        for segment in snapshot["segments"]
    ]
    return {
        "torch": torch.__version__,
        "streams": [stream.cuda_stream for stream in machine.streams],
        "pools": machine.pool_ids,
        "out_of_memory": machine.out_of_memory,
        "events": events,
        "segments": segments,
        "statistics": statistics,
    }


def set_environment(environment: dict[str, str]) -> None:
    """For torch, which reads it at the first use of the GPU, and for a ghost that has read it already."""
    os.environ.update(environment)
    ghost = getattr(ctypes.CDLL(None), "ghost_set", None)
    if ghost is None:
        return
    for name, value in environment.items():
        if name.startswith("GHOST_"):
            ghost(name.removeprefix("GHOST_").encode(), value.encode())


def run_in_fork(job: dict[str, Any]) -> None:
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        if status:
            print(json.dumps({"failed": status}), flush=True)
        return
    try:
        set_environment(job["environment"])
        print(json.dumps(run(job["operations"])), flush=True)
    except Exception:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # how an interpreter with torch in it ends takes a hundred times as long as a job


def main() -> None:
    """Carry out the jobs on standard input."""
    warnings.simplefilter("ignore")
    for job in json.load(sys.stdin):
        run_in_fork(job)


if __name__ == "__main__":
    main()
