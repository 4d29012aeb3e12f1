"""What the driver says of memory: the whole device, this process, and the host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import torch

from tonnage.trainers.packages import find_version

OPTIONAL: Final = ("bitsandbytes", "torchao", "liger-kernel", "trl", "deepspeed", "megatron-core", "triton")
"""Packages that some cases need."""


def device_used() -> int | None:
    """Bytes in use on the first GPU by NVML, all processes together; needs no CUDA context; None without NVML."""
    with_nvml = _nvml()
    if with_nvml is None:
        return None
    library, handle = with_nvml
    return int(library.nvmlDeviceGetMemoryInfo(handle).used)


def process_used() -> int | None:
    """Bytes NVML attributes to this process; None where it lists none (as inside some virtual machines)."""
    with_nvml = _nvml()
    if with_nvml is None:
        return None
    library, handle = with_nvml
    try:
        listed = library.nvmlDeviceGetComputeRunningProcesses(handle)
    except library.NVMLError:
        return None
    # inside a container the driver may know this process by another number; then it must be the only one
    own = [entry.usedGpuMemory for entry in listed if entry.pid == os.getpid() or len(listed) == 1]
    return int(own[0]) if own and own[0] else None


def observe() -> dict[str, int | None]:
    """Where the bytes are now: handed out, reserved, and used of the device by CUDA's and NVML's account."""
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return {
        "allocated_bytes": torch.cuda.memory_allocated(),
        "reserved_bytes": torch.cuda.memory_reserved(),
        "cuda_used_bytes": total_bytes - free_bytes,
        "nvml_used_bytes": device_used(),
        "nvml_process_bytes": process_used(),
    }


def host_bytes() -> dict[str, int]:
    """Resident bytes of this process: now and at most."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Vm")
    )
    return {name: int(fields[key].split()[0]) * 1024 for name, key in (("now", "VmRSS"), ("peak", "VmHWM"))}


def versions() -> dict[str, Any]:
    """All that decides the numbers: software, driver, card.  Makes a CUDA context and may load libraries."""
    import platform

    import accelerate
    import peft
    import transformers

    properties = torch.cuda.get_device_properties(0)
    with_nvml = _nvml()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": _cudnn(),
        "nccl": ".".join(str(part) for part in torch.cuda.nccl.version()),
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "accelerate": accelerate.__version__,
        **{package: found for package in OPTIONAL if (found := find_version(package)) is not None},
        "driver": _text(with_nvml[0].nvmlSystemGetDriverVersion()) if with_nvml else None,
        "kernel": platform.release(),
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "total_bytes": properties.total_memory,
    }


def _cudnn() -> int | str | None:
    try:
        return torch.backends.cudnn.version()
    except RuntimeError as error:  # torch refuses a library that does not fit it
        return str(error).splitlines()[0]


def _nvml() -> tuple[Any, Any] | None:
    """The library and the first GPU's handle; opened anew in every process that asks."""
    process = os.getpid()
    if process not in _OPENED:
        _OPENED[process] = _open_nvml()
    return _OPENED[process]


def _open_nvml() -> tuple[Any, Any] | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
    except Exception:  # absent package, absent library, or a card NVML cannot see: all mean that NVML has no answer
        return None


_OPENED: dict[int, tuple[Any, Any] | None] = {}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
