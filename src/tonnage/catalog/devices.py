"""The GPUs of the catalog, and the notation of a cluster: `t4`, `8xA100-80GB`, `4x8xH100` (machines x GPUs)."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from statistics import median
from typing import Any, Final

from tonnage.catalog.spelling import closest, normalise
from tonnage.cluster import CPU, GENERIC, GPUS_PER_NODE, HERE, Cluster, Device, Peaks
from tonnage.errors import UnknownDevice, UsageError
from tonnage.synonyms import find_other_card
from tonnage.units import GIB, MIB, format_gib, pluralise, spell_bytes

_GENERIC_MODEL: Final = "a100-80gb"
"""The card whose kernels and workspaces are assumed for a GPU of which only the memory is known."""

_OTHER_NOTATION = re.compile(
    r"(?P<name>.+?)\s*[x×*:]\s*(?P<count>[0-9]+)|(?P<number>[0-9]+)\s*[*:]\s*(?P<card>.+)", re.IGNORECASE
)
"""Notations of several GPUs in other programs: h100:8, H100x8, 8*h100."""
_SPEC = re.compile(r"\s*(?:([0-9]+)\s*[x×]\s*)?(?:([0-9]+)\s*[x×]\s*)?(.*?)\s*", re.IGNORECASE)


def device_names() -> list[str]:
    """Return the ids of all GPUs in the catalog, in its order (by generation)."""
    return list(_devices())


def find_device(name: str) -> Device:
    """Return the GPU with this id or alias, compared exactly after lower-casing.

    Raises UnknownDevice with the closest names.
    """
    known = _devices_by_name()
    device = known.get(normalise(name))
    if device is not None:
        return device
    _check_maker(name)
    near = list(dict.fromkeys(known[candidate].id for candidate in closest(name, known, limit=5)))
    hint = f"Close: {', '.join(near)}. " if near else ""
    raise UnknownDevice(
        f"Unknown GPU {name.strip()!r}. {hint}"
        f"`tonnage devices` lists all {len(_devices())}; or give its memory: --gpu-memory 24GiB; or cpu."
    )


def _check_maker(name: str) -> None:
    """Raise UnknownDevice for a card that is not NVIDIA's, with the card that has the nearest memory."""
    found = find_other_card(name)
    if found is None:
        return
    cards, gib = found
    why = f"{name.strip()!r} is {cards.kind}, and tonnage knows NVIDIA's only: it runs CUDA's code."
    if gib is None:
        raise UnknownDevice(
            f"{why} For the same memory give --gpu and --gpu-memory: --gpu a100-80gb --gpu-memory 24GiB."
        )
    with_bf16 = (device for device in _devices().values() if not device.without_bf16)
    nearest = min(with_bf16, key=lambda device: abs(device.capacity_bytes - gib * GIB))
    raise UnknownDevice(
        f"{why} The nearest in memory is {nearest.id} ({format_gib(nearest.capacity_bytes)}); for the same memory as "
        f"yours give --gpu {nearest.id} --gpu-memory {gib}GiB."
    )


def known_by_driver(name: str) -> Device | None:
    """Return the catalog's GPU with this marketing name, as the driver reports it; None if there is none."""
    return next((device for device in _devices().values() if normalise(device.name) == normalise(name)), None)


def generic_device(capacity_bytes: int) -> Device:
    """Return a GPU of which only the memory is known: kernels and context are an A100's, speeds are unknown."""
    model = find_device(_GENERIC_MODEL)
    unknown_speeds: dict[str, Any] = dict.fromkeys(
        (
            *("bandwidth_bytes_per_second", "pcie_generation", "pcie_bytes_per_second", "nvlink_bytes_per_second"),
            "network_bytes_per_second",
        )
    )
    return replace(
        model,
        id=f"{GENERIC}{format_gib(capacity_bytes).replace(' ', '').lower()}",
        aliases=(),
        name="generic GPU",
        capacity_bytes=capacity_bytes,
        nvml_total_bytes=None,
        host_bytes=None,
        host_source="",
        peak_flops=Peaks(),
        source=(
            f"only the memory was given ({format_gib(capacity_bytes)}); assumed: capability "
            f"{model.capability[0]}.{model.capability[1]}, {model.sms} multiprocessors, context as on the {model.id}",
        ),
        **unknown_speeds,
    )


def host_device(capacity_bytes: int | None = None) -> Device:
    """Return the processor as a device, with this memory (default: this machine's); estimates count live tensors."""
    if capacity_bytes is None:
        from tonnage.catalog.machine import memory_bytes

        capacity_bytes = memory_bytes()
    return Device(
        id=CPU,
        name="the host's processor",
        capability=(0, 0),
        capacity_bytes=capacity_bytes,
        context_low_bytes=0,
        context_bytes=0,
        context_high_bytes=0,
        context_source="the CPU has none; the memory of Python and its libraries is not counted",
        sms=0,
        threads_per_sm=0,
        shared_per_sm_bytes=0,
        shared_per_block_bytes=0,
        registers_per_sm=0,
    )


def parse_cluster(
    spec: str | None = None,
    *,
    gpus: int | None = None,
    gpu_memory_bytes: int | None = None,
    host_memory_bytes: int | None = None,
) -> Cluster:
    """Return the cluster that `t4`, `8xA100-80GB` or `4x8xH100` (machines x GPUs) stands for.

    `gpus` is the total where the text has no number; above 8 it must be a multiple of 8.  `here` stands for this
    machine with all of its GPUs, or with the given number of them.  `gpu_memory_bytes` replaces the card's memory;
    without a name it stands for a GPU that is not in the catalog.  `host_memory_bytes` is the memory of each machine
    beside its GPUs; by default that of this machine for `here`, else `Cluster.host_limit_bytes` says what is usual.
    Raises UnknownDevice and UsageError; for `here` also CannotEstimate.
    """
    if gpus is not None and gpus < 1:
        raise UsageError(f"The number of GPUs is {gpus}; it must be at least 1.")
    if gpu_memory_bytes is not None and gpu_memory_bytes < 1:
        raise UsageError(f"The GPU memory is {gpu_memory_bytes} bytes; it must be above zero.")
    if gpu_memory_bytes is not None and gpu_memory_bytes < MIB:
        raise UsageError(
            f"The GPU memory is {gpu_memory_bytes} bytes, less than 1 MiB; give its unit too, such as 24GiB."
        )
    nodes, per_node, name = _split_spec(spec)
    if per_node is not None and gpus is not None and gpus != nodes * per_node:
        raise UsageError(
            f"{spec!r} has {pluralise(nodes * per_node, 'GPU')}, but --gpus is {gpus}; give one of the two."
        )
    if normalise(name) == HERE:
        return _local_cluster(nodes, per_node or gpus, gpu_memory_bytes, host_memory_bytes)
    if per_node is None:
        nodes, per_node = _split_into_machines(gpus or 1)
    device = _resolve_device(name, gpu_memory_bytes)
    return Cluster(device=device, gpus_per_node=per_node, nodes=nodes, host_memory_bytes=host_memory_bytes)


def _local_cluster(nodes: int, per_node: int | None, memory_bytes: int | None, host_bytes: int | None) -> Cluster:
    """Return a cluster of this number of machines like the local one."""
    from tonnage.catalog import local_gpus, machine

    local = local_gpus.cluster(per_node)
    device = local.device if memory_bytes is None else local.device.with_capacity(memory_bytes)
    host_bytes = machine.memory_bytes() if host_bytes is None else host_bytes
    return replace(local, device=device, nodes=nodes, host_memory_bytes=host_bytes)


def _split_spec(spec: str | None) -> tuple[int, int | None, str]:
    """Return the machines, the GPUs of each (None if not stated) and the card's name of `4x8xH100`."""
    match = _SPEC.fullmatch(spec or "")
    if match is None:  # a line break within the name
        return 1, None, spec or ""
    counts = [_parse_positive(digits, spec) for digits in match.groups()[:2] if digits is not None]
    nodes = counts[0] if len(counts) == 2 else 1
    return nodes, counts[-1] if counts else None, match[3]


def _parse_positive(digits: str, spec: str | None) -> int:
    if len(digits) > 9 or int(digits) == 0:
        raise UsageError(f"{spec!r}: {digits} is not a number of GPUs; try 8xA100-80GB or 4x8xH100.")
    return int(digits)


def _split_into_machines(gpus: int) -> tuple[int, int]:
    """Return the number of machines and the GPUs of each for a total."""
    if gpus <= GPUS_PER_NODE:
        return 1, gpus
    if gpus % GPUS_PER_NODE:
        raise UsageError(
            f"{gpus} GPUs are not whole machines of {GPUS_PER_NODE}; give the number of machines too, "
            "e.g. --gpu 2x6xA100-80GB."
        )
    return gpus // GPUS_PER_NODE, GPUS_PER_NODE


def _resolve_device(name: str, memory_bytes: int | None) -> Device:
    """Return the device of a name and an optional memory size.  Raises UnknownDevice, UsageError."""
    if normalise(name) == CPU:
        return host_device(memory_bytes)
    if name:
        _check_notation(name)
        device = find_device(name)
        return device if memory_bytes is None else device.with_capacity(memory_bytes)
    if memory_bytes is None:
        raise UsageError("No GPU named; give --gpu (t4, 8xA100-80GB, 4x8xH100) or --gpu-memory 24GiB.")
    return generic_device(memory_bytes)


def _check_notation(name: str) -> None:
    """Raise UsageError for another program's notation of several GPUs, with the right one in the message."""
    kinds = [part for part in re.split(r"\s*[,+]\s*", name) if part]
    if len(kinds) > 1 and normalise(kinds[0]) in _devices_by_name():
        raise UsageError(f"{name!r} names {len(kinds)} kinds of GPUs; a job runs on one kind: --gpu {kinds[0]}.")
    other = _OTHER_NOTATION.fullmatch(name)
    if other is not None and normalise(other["name"] or other["card"]) in _devices_by_name():
        written = f"{other['count'] or other['number']}x{other['name'] or other['card']}"
        raise UsageError(f"{name!r}: the number of GPUs goes in front: --gpu {written}.")


@cache
def _devices() -> Mapping[str, Device]:
    """Return the GPUs of the catalog by id."""
    text = (files("tonnage") / "catalog" / "devices.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    observed = {entry["id"]: entry for entry in tables["device"] if "context_observed_mib" in entry}
    return {entry["id"]: _parse_device(entry, tables["capability"], observed) for entry in tables["device"]}


@cache
def _devices_by_name() -> Mapping[str, Device]:
    """Return the GPUs of the catalog by id and by alias."""
    return {name: device for device in _devices().values() for name in (device.id, *device.aliases)}


def _parse_device(
    entry: Mapping[str, Any], capabilities: Mapping[str, Any], observed: Mapping[str, Mapping[str, Any]]
) -> Device:
    """Return the Device of one table of devices.toml."""
    values = {k: v for k, v in entry.items() if k not in ("context_observed_mib", "context_like", "machines")}
    limits = {k: v for k, v in capabilities[entry["capability"]].items() if k not in ("source", "date")}
    major, minor = entry["capability"].split(".")
    values |= {
        "aliases": tuple(entry.get("aliases", ())),
        "capability": (int(major), int(minor)),
        "peak_flops": Peaks(**entry.get("peak_flops", {})),
        "source": tuple(entry["source"]),
    }
    return Device(**values, **limits, **_host_fields(entry), **_context_fields(entry, observed))


def _host_fields(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a GPU's share of host memory: the median over the machines that usually have the card, in whole GiB."""
    machines = entry.get("machines", ())
    if not machines:
        return {}
    listed = ", ".join(f"{one['name']} {one['memory_gib']:,} GiB for {one['gpus']}" for one in machines)
    return {
        "host_bytes": int(median(one["memory_gib"] / one["gpus"] for one in machines)) * GIB,
        "host_source": f"median of {pluralise(len(machines), 'machine')}: {listed}",
    }


def _context_fields(entry: Mapping[str, Any], observed: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the memory of the CUDA context: observed on the card, or on the same chip, or derived.

    It is derived from the number of multiprocessors: the context grows with them, because each needs local memory
    for all its threads; the observed cards lie between 2.5 and 5.8 MiB a multiprocessor.  A card with fewer than
    three observations gets the spread of all cards around its own median.
    """
    per_sm = {name: median(e["context_observed_mib"]) / e["sms"] for name, e in observed.items()}
    spread = _spread(observed)
    like = observed.get(entry["id"]) or observed.get(entry.get("context_like", ""))
    if like is None:
        middle = median(per_sm.values()) * entry["sms"]
        low, high = min(per_sm.values()) * entry["sms"], max(per_sm.values()) * entry["sms"]
        origin = f"derived from {len(observed)} observed cards, by number of multiprocessors"
    else:
        figures = like["context_observed_mib"]
        middle, low, high = median(figures), min(figures), max(figures)
        origin = f"observations on {like['id']}: {len(figures)}"
        if len(figures) < 3:
            low, high = min(low, middle * spread[0]), max(high, middle * spread[1])
    return {
        "context_low_bytes": round(low * MIB),
        "context_bytes": round(middle * MIB),
        "context_high_bytes": round(high * MIB),
        "context_source": origin,
    }


def _spread(observed: Mapping[str, Mapping[str, Any]]) -> tuple[float, float]:
    """Return the lowest and the highest ratio of an observation to its card's median, over the repeated ones."""
    repeated: list[Sequence[float]] = [
        e["context_observed_mib"] for e in observed.values() if len(e["context_observed_mib"]) > 1
    ]
    return (
        min(min(figures) / median(figures) for figures in repeated),
        max(max(figures) / median(figures) for figures in repeated),
    )


def spell_cluster(cluster: Cluster) -> tuple[str, int | None]:
    """Return the arguments with which `parse_cluster` makes the same cluster: a text and a memory size.

    The memory is None where it equals the catalog's.
    """
    known = _devices_by_name().get(cluster.device.id)
    if known is None and cluster.device.id != CPU:
        return f"{cluster.nodes}x{cluster.gpus_per_node}x", cluster.device.capacity_bytes
    differs = known is not None and known.capacity_bytes != cluster.device.capacity_bytes
    return str(cluster), cluster.device.capacity_bytes if differs else None


def spell_options(cluster: Cluster) -> str:
    """Return the cluster as command-line options: `--gpu 8xh100-80gb`, or `--gpu-memory 6GiB --gpus 2`.

    The host's memory is among them if it was stated.
    """
    host = "" if cluster.host_memory_bytes is None else f" --host-memory {spell_bytes(cluster.host_memory_bytes)}"
    name, memory_bytes = spell_cluster(cluster)
    if memory_bytes is None:
        return f"--gpu {name}{host}"
    memory = f"--gpu-memory {spell_bytes(memory_bytes)}"
    is_usual = (cluster.nodes == 1 and cluster.gpus <= GPUS_PER_NODE) or cluster.gpus_per_node == GPUS_PER_NODE
    cards = f"{memory} --gpus {cluster.gpus}" if name.endswith("x") and is_usual else f"--gpu {name} {memory}"
    return f"{cards}{host}"
