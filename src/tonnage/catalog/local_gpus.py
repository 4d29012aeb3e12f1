"""The GPUs of this machine, as NVIDIA's driver tells of them: `--here`, or the name `here`.

Read through NVML (the package nvidia-ml-py), which makes no CUDA context and wants no torch.  What the driver leaves
a process (its total less what it keeps for itself) stands in place of the catalog's capacity, another driver's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from tonnage.catalog.devices import generic_device, known_by_driver
from tonnage.cluster import Cluster, Device
from tonnage.errors import CannotEstimate, UsageError
from tonnage.units import gib

if TYPE_CHECKING:
    from types import ModuleType

WORTH_SAYING_BYTES: Final = 2**29
"""What others hold on a card before it is worth a word: a desktop, or a process that is left over."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """One GPU, or one part of a GPU that is divided (MIG), that a program started now would see."""

    name: str
    """As the driver reports it."""
    uuid: str
    """As CUDA_VISIBLE_DEVICES may name it."""
    total_bytes: int
    """Memory as nvidia-smi shows it."""
    capacity_bytes: int
    """Memory as torch shows it: without what the driver keeps for itself."""
    used_bytes: int
    """Held by processes."""
    capability: tuple[int, int]
    """Compute capability; of a part, that of the whole."""

    @property
    def device(self) -> Device:
        """The catalog's card of that name with the memory that is here; for others only the memory is known."""
        known = known_by_driver(self.name)
        device = known or replace(generic_device(self.capacity_bytes), name=self.name, capability=self.capability)
        stated = f"capacity {gib(self.capacity_bytes)}: as the driver of this machine reports it"
        return replace(
            device,
            capacity_bytes=self.capacity_bytes,
            nvml_total_bytes=self.total_bytes,
            source=(stated, *device.source),
        )


def cluster(gpus: int | None = None) -> Cluster:
    """This machine with all of its GPUs, or with so many of them.

    Raises CannotEstimate where no driver can be asked, UsageError where there are fewer, or where they differ.
    """
    found = visible()
    names = sorted({one.name for one in found})
    if len(names) > 1:
        listed = ", ".join(f"{sum(one.name == name for one in found)} x {name}" for name in names)
        raise UsageError(
            f"The GPUs of this machine differ ({listed}); choose some by their UUIDs with CUDA_VISIBLE_DEVICES."
        )
    if gpus is not None and gpus > len(found):
        raise UsageError(f"This machine has {len(found)} x {names[0]}, and {gpus} were asked for.")
    least = min(found[:gpus], key=lambda one: one.capacity_bytes)
    return Cluster(device=least.device, gpus_per_node=len(found[:gpus]))


def in_use(found: Sequence[Found]) -> list[str]:
    """A sentence for each GPU on which others hold memory: an estimate is of an empty card."""
    return [
        f"GPU {place} ({one.name}): other processes hold {gib(one.used_bytes)} of {gib(one.capacity_bytes)}; "
        "the answer is for an empty card."
        for place, one in enumerate(found)
        if one.used_bytes > WORTH_SAYING_BYTES
    ]


def visible() -> list[Found]:
    """The GPUs that a program started now would see, in its order.  Raises CannotEstimate, UsageError."""
    nvml = _nvml()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise CannotEstimate(f"This machine's GPUs cannot be read: {error}. Name a card with --gpu.") from error
    try:
        every = list(_all(nvml))
    except nvml.NVMLError as error:
        raise CannotEstimate(f"NVIDIA's driver does not tell of its GPUs: {error}.") from error
    finally:
        nvml.nvmlShutdown()
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    if _is_ambiguous(every, said, os.environ.get("CUDA_DEVICE_ORDER")):
        raise UsageError(
            "The GPUs of this machine differ, and CUDA numbers them by their speed (CUDA_DEVICE_ORDER), which the "
            "driver does not tell; name them in CUDA_VISIBLE_DEVICES by their UUIDs, or set CUDA_DEVICE_ORDER to "
            "PCI_BUS_ID."
        )
    chosen = _chosen(every, said)
    if not chosen:
        raise UsageError("No GPU of this machine can be seen (CUDA_VISIBLE_DEVICES); name a card with --gpu.")
    return chosen


def _nvml() -> ModuleType:
    try:
        import pynvml
    except ImportError as error:
        raise CannotEstimate(
            "Reading this machine's GPUs needs nvidia-ml-py: pip install nvidia-ml-py; or name a card with --gpu."
        ) from error
    module: ModuleType = pynvml
    return module


def _all(nvml: Any) -> Iterator[Found]:
    """All GPUs; of one that is divided, its parts."""
    for index in range(nvml.nvmlDeviceGetCount()):
        whole = nvml.nvmlDeviceGetHandleByIndex(index)
        for handle in _parts(nvml, whole) or [whole]:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
            yield Found(
                name=nvml.nvmlDeviceGetName(handle),
                uuid=nvml.nvmlDeviceGetUUID(handle),
                total_bytes=int(memory.total),
                capacity_bytes=int(memory.total - memory.reserved),
                used_bytes=int(memory.used),
                capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(whole)),
            )


def _parts(nvml: Any, handle: Any) -> list[Any]:
    """MIG instances; none where a card is whole, or knows nothing of them."""
    try:
        divided, _ = nvml.nvmlDeviceGetMigMode(handle)
        most = nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if divided else 0
    except nvml.NVMLError:
        return []
    parts = []
    for place in range(most):
        try:
            parts.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place))
        except nvml.NVMLError:  # a place without an instance
            continue
    return parts


def _is_ambiguous(every: Sequence[Found], said: str | None, order: str | None) -> bool:
    """Whether GPUs are chosen by numbers that the driver, which counts them by their places, may give to others."""
    numbered = said is not None and any(_is_place(word.strip()) for word in said.split(","))
    return numbered and order != "PCI_BUS_ID" and len({one.name for one in every}) > 1


def _is_place(word: str) -> bool:
    return word.isascii() and word.isdigit()


def _chosen(every: Sequence[Found], said: str | None) -> list[Found]:
    """What CUDA_VISIBLE_DEVICES leaves: by place, or by the beginning of a UUID; up to the first that is unknown.

    Of one that is named twice CUDA makes that there is none.
    """
    if said is None:
        return list(every)
    chosen: list[Found] = []
    for word in (part.strip() for part in said.split(",")):
        place = int(word[:9]) if _is_place(word) else None
        if place is not None:
            match = list(every[place : place + 1])
        else:
            match = [one for one in every if word and one.uuid.startswith(word)]
        if len(match) != 1:
            break
        if match[0] in chosen:
            return []
        chosen += match
    return chosen
