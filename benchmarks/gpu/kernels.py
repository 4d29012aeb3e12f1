"""The kernels of a piece of work, as the profiler sees them on a real GPU."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def kernels_of(work: Callable[[], None]) -> dict[str, Any]:
    """Columns over all kernels and copies in order of start; names are numbered.  Times in nanoseconds."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        written = json.loads(path.read_text())["traceEvents"]
    return _columns([event for event in written if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")])


def _columns(events: list[dict[str, Any]]) -> dict[str, Any]:
    events.sort(key=lambda event: float(event["ts"]))
    names: dict[str, int] = {}
    streams: dict[int, int] = {}
    first = float(events[0]["ts"]) if events else 0.0
    rows = []
    for event in events:
        found = event.get("args", {})
        rows.append(
            (
                names.setdefault(event["name"], len(names)),
                round((float(event["ts"]) - first) * 1e3),
                round(float(event["dur"]) * 1e3),
                streams.setdefault(found.get("stream", 0), len(streams)),
                found.get("grid", [0, 0, 0]),
                found.get("block", [0, 0, 0]),
                found.get("shared memory", 0),
                found.get("registers per thread", 0),
                found.get("bytes", 0),
            )
        )
    keys = ("name", "start", "duration", "stream", "grid", "block", "shared", "registers", "bytes")
    return {"names": list(names), **{key: [row[i] for row in rows] for i, key in enumerate(keys)}}
