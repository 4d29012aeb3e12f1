"""Keeps what the watch relies on and a program may change: the allocator's history and its peak counters.

Programs start, stop and clear the history to dump a snapshot of it, and reset the peaks to measure a part.
"""

from typing import Any

_highest: dict[int, dict[str, int]] = {}
"""Peaks of each device when a program reset them."""


def install(torch: Any) -> None:
    """Keep the history on whatever the program asks for, and remember peaks when they are reset.

    The watch has turned the history on, without stacks: a snapshot that the program dumps has the same events.
    """
    for name in ("_cuda_record_memory_history", "_cuda_record_memory_history_legacy"):
        if hasattr(torch._C, name):
            setattr(torch._C, name, _nothing)
    for name in ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats"):
        original = getattr(torch._C, name, None)
        if original is not None:
            setattr(torch._C, name, _remembering(torch, original))


def read_peaks(torch: Any, device: int) -> dict[str, int]:
    """Return torch's own counters of a device for the whole run: allocated_bytes, reserved_bytes, retries, ooms."""
    stats = torch.cuda.memory_stats(device)
    now = {
        "allocated_bytes": stats.get("allocated_bytes.all.peak", 0),
        "reserved_bytes": stats.get("reserved_bytes.all.peak", 0),
        "retries": stats.get("num_alloc_retries", 0),
        "ooms": stats.get("num_ooms", 0),
    }
    before = _highest.get(device, {})
    return {name: max(value, before.get(name, 0)) for name, value in now.items()}


def _nothing(*_: Any) -> None:
    return None


def _remembering(torch: Any, original: Any) -> Any:
    def reset(device: int) -> Any:
        _highest[device] = read_peaks(torch, device)
        return original(device)

    return reset
