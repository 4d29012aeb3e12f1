"""The GPUs of this machine, as NVIDIA's driver reports them: `--here`, or `--gpu here`.

They are read through NVML (the package nvidia-ml-py), which creates no CUDA context and needs no torch.  The memory
that this driver leaves to a process (the total without its own part) replaces the catalog's capacity, which was
measured with another driver.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from tonnage.catalog.devices import generic_device, known_by_driver
from tonnage.cluster import Cluster, Device
from tonnage.errors import CannotEstimate, UsageError
from tonnage.units import format_gib

if TYPE_CHECKING:
    from types import ModuleType

WORTH_SAYING_BYTES: Final = 2**29
"""Memory that other processes may hold on a card without a note: a desktop holds less, a forgotten process more."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """One GPU, or one MIG instance of a divided GPU, that a program started now would see."""

    name: str
    """Name that the driver reports."""
    uuid: str
    """UUID, by which CUDA_VISIBLE_DEVICES may name it."""
    total_bytes: int
    """Memory as nvidia-smi shows it."""
    capacity_bytes: int
    """Memory as torch shows it: without the driver's own part."""
    used_bytes: int
    """Memory that processes hold."""
    capability: tuple[int, int]
    """Compute capability; of a MIG instance, that of the whole GPU."""

    @property
    def device(self) -> Device:
        """Return the catalog's card of that name with this machine's memory, or a generic card with that memory."""
        known = known_by_driver(self.name)
        device = known or replace(generic_device(self.capacity_bytes), name=self.name, capability=self.capability)
        origin = f"capacity {format_gib(self.capacity_bytes)}: as the driver of this machine reports it"
        return replace(
            device,
            capacity_bytes=self.capacity_bytes,
            nvml_total_bytes=self.total_bytes,
            source=(origin, *device.source),
        )


def cluster(gpus: int | None = None) -> Cluster:
    """Return this machine as a cluster, with all of its GPUs or with this number of them.

    Raises CannotEstimate where there is no driver, UsageError where there are fewer GPUs, or where they differ.
    """
    local = visible()
    names = sorted({gpu.name for gpu in local})
    if len(names) > 1:
        listed = ", ".join(f"{sum(gpu.name == name for gpu in local)} x {name}" for name in names)
        raise UsageError(
            f"The GPUs of this machine differ ({listed}); choose some by their UUIDs with CUDA_VISIBLE_DEVICES."
        )
    if gpus is not None and gpus > len(local):
        raise UsageError(f"This machine has {len(local)} x {names[0]}, but {gpus} were requested.")
    least = min(local[:gpus], key=lambda gpu: gpu.capacity_bytes)
    return Cluster(device=least.device, gpus_per_node=len(local[:gpus]))


def in_use(found: Sequence[Found]) -> list[str]:
    """Return a sentence for each GPU on which other processes hold memory, because estimates assume an empty card."""
    return [
        f"GPU {index} ({gpu.name}): other processes hold {format_gib(gpu.used_bytes)} of "
        f"{format_gib(gpu.capacity_bytes)}; "
        "the answer is for an empty card."
        for index, gpu in enumerate(found)
        if gpu.used_bytes > WORTH_SAYING_BYTES
    ]


def visible() -> list[Found]:
    """Return the GPUs that a program started now would see, in its order.  Raises CannotEstimate, UsageError."""
    nvml = _import_nvml()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise CannotEstimate(f"This machine's GPUs cannot be read: {error}. Name a card with --gpu.") from error
    try:
        all_gpus = list(_iterate_gpus(nvml))
    except nvml.NVMLError as error:
        raise CannotEstimate(f"NVIDIA's driver does not report its GPUs: {error}. Name a card with --gpu.") from error
    finally:
        nvml.nvmlShutdown()
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    if _is_ambiguous(all_gpus, variable, os.environ.get("CUDA_DEVICE_ORDER")):
        raise UsageError(
            "The GPUs of this machine differ, and CUDA numbers them by speed (CUDA_DEVICE_ORDER), which the driver "
            "does not report; name them in CUDA_VISIBLE_DEVICES by their UUIDs, or set CUDA_DEVICE_ORDER to "
            "PCI_BUS_ID."
        )
    chosen = _select_visible(all_gpus, variable)
    if not chosen:
        raise UsageError("CUDA_VISIBLE_DEVICES hides all GPUs of this machine; name a card with --gpu.")
    return chosen


def _import_nvml() -> ModuleType:
    try:
        import pynvml
    except ImportError as error:
        raise CannotEstimate(
            "Reading this machine's GPUs needs nvidia-ml-py: pip install nvidia-ml-py; or name a card with --gpu."
        ) from error
    module: ModuleType = pynvml
    return module


def _iterate_gpus(nvml: Any) -> Iterator[Found]:
    """Yield all GPUs; for a divided one, its MIG instances."""
    for index in range(nvml.nvmlDeviceGetCount()):
        whole = nvml.nvmlDeviceGetHandleByIndex(index)
        for handle in _mig_instances(nvml, whole) or [whole]:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
            yield Found(
                name=nvml.nvmlDeviceGetName(handle),
                uuid=nvml.nvmlDeviceGetUUID(handle),
                total_bytes=int(memory.total),
                capacity_bytes=int(memory.total - memory.reserved),
                used_bytes=int(memory.used),
                capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(whole)),
            )


def _mig_instances(nvml: Any, handle: Any) -> list[Any]:
    """Return the handles of a GPU's MIG instances; none for a GPU that is not divided, or without MIG."""
    try:
        is_divided, _ = nvml.nvmlDeviceGetMigMode(handle)
        slots = nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if is_divided else 0
    except nvml.NVMLError:
        return []
    instances = []
    for slot in range(slots):
        try:
            instances.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot))
        except nvml.NVMLError:  # an empty slot
            continue
    return instances


def _is_ambiguous(gpus: Sequence[Found], variable: str | None, order: str | None) -> bool:
    """Return True if CUDA_VISIBLE_DEVICES has numbers that may mean other GPUs in CUDA than in the driver.

    The driver counts by PCI bus, CUDA by speed unless CUDA_DEVICE_ORDER says otherwise.
    """
    has_numbers = variable is not None and any(_is_index(word.strip()) for word in variable.split(","))
    return has_numbers and order != "PCI_BUS_ID" and len({gpu.name for gpu in gpus}) > 1


def _is_index(word: str) -> bool:
    return word.isascii() and word.isdigit()


def _select_visible(gpus: Sequence[Found], variable: str | None) -> list[Found]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES selects, by index or by the beginning of a UUID.

    The list ends at the first unknown entry, and a GPU that is named twice makes it empty, as in CUDA.
    """
    if variable is None:
        return list(gpus)
    chosen: list[Found] = []
    for word in (part.strip() for part in variable.split(",")):
        index = int(word[:9]) if _is_index(word) else None
        if index is not None:
            match = list(gpus[index : index + 1])
        else:
            match = [gpu for gpu in gpus if word and gpu.uuid.startswith(word)]
        if len(match) != 1:
            break
        if match[0] in chosen:
            return []
        chosen += match
    return chosen
