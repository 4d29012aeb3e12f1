"""The GPUs of the catalog, and how a cluster is written: `t4`, `8xA100-80GB`, `4x8xH100`."""

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
from tonnage.units import MIB, counted, gib, typed

_GENERIC_MODEL: Final = "a100-80gb"
"""The card whose kernels and workspaces a GPU known only by its memory is assumed to have."""

_OTHER_SPEC = re.compile(
    r"(?P<name>.+?)\s*[x×*:]\s*(?P<count>[0-9]+)|(?P<number>[0-9]+)\s*[*:]\s*(?P<card>.+)", re.IGNORECASE
)
"""How others write several GPUs: h100:8, H100x8, 8*h100."""
_SPEC = re.compile(r"\s*(?:([0-9]+)\s*[x×]\s*)?(?:([0-9]+)\s*[x×]\s*)?(.*?)\s*", re.IGNORECASE)


def device_names() -> list[str]:
    """The ids of all GPUs in the catalog, in its order (by generation)."""
    return list(_devices())


def find_device(name: str) -> Device:
    """The GPU with this id or alias, compared exactly after lower-casing.

    Raises UnknownDevice with the closest names.
    """
    known = _names()
    device = known.get(normalise(name))
    if device is not None:
        return device
    near = list(dict.fromkeys(known[found].id for found in closest(name, known, limit=5)))
    hint = f"Close: {', '.join(near)}. " if near else ""
    raise UnknownDevice(
        f"Unknown GPU {name.strip()!r}. {hint}"
        f"All {len(_devices())}: tonnage devices; or give its memory: --gpu-memory 24GiB; or cpu."
    )


def known_by_driver(name: str) -> Device | None:
    """The catalog's GPU that the driver calls so."""
    return next((device for device in _devices().values() if normalise(device.name) == normalise(name)), None)


def generic_device(capacity_bytes: int) -> Device:
    """A GPU known only by its memory: an A100's kernels and context are assumed, and no speeds."""
    model = find_device(_GENERIC_MODEL)
    unknown_speeds: dict[str, Any] = dict.fromkeys(
        (
            *("bandwidth_bytes_per_second", "pcie_generation", "pcie_bytes_per_second", "nvlink_bytes_per_second"),
            "network_bytes_per_second",
        )
    )
    return replace(
        model,
        id=f"{GENERIC}{gib(capacity_bytes).replace(' ', '').lower()}",
        aliases=(),
        name="generic GPU",
        capacity_bytes=capacity_bytes,
        nvml_total_bytes=None,
        peak_flops=Peaks(),
        source=(
            f"only the memory was given ({gib(capacity_bytes)}); assumed: capability "
            f"{model.capability[0]}.{model.capability[1]}, {model.sms} multiprocessors, context as on the {model.id}",
        ),
        **unknown_speeds,
    )


def host_device(capacity_bytes: int | None = None) -> Device:
    """The processor and its memory (default: this machine's), on which estimates count live tensors exactly."""
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
        context_source="none on the CPU; Python and its libraries are not counted",
        sms=0,
        threads_per_sm=0,
        shared_per_sm_bytes=0,
        shared_per_block_bytes=0,
        registers_per_sm=0,
    )


def parse_cluster(
    spec: str | None = None, *, gpus: int | None = None, gpu_memory_bytes: int | None = None
) -> Cluster:
    """The cluster that `t4`, `8xA100-80GB` or `4x8xH100` (machines x GPUs) names.

    `gpus` gives the total where the text does not; above 8 it must be whole machines of 8.  `here` is this machine
    with its GPUs, all of them unless a number is given.  `gpu_memory_bytes` replaces the card's memory, or stands
    alone for a GPU that is not in the catalog.
    Raises UnknownDevice and UsageError; of this machine CannotEstimate.
    """
    if gpus is not None and gpus < 1:
        raise UsageError(f"The number of GPUs is {gpus}; it must be at least 1.")
    if gpu_memory_bytes is not None and gpu_memory_bytes < 1:
        raise UsageError(f"The GPU memory is {gpu_memory_bytes} bytes; it must be above zero.")
    if gpu_memory_bytes is not None and gpu_memory_bytes < MIB:
        raise UsageError(
            f"The GPU memory is {gpu_memory_bytes} bytes, less than 1 MiB; give its unit too, such as 24GiB."
        )
    nodes, per_node, name = _split(spec)
    if per_node is not None and gpus is not None and gpus != nodes * per_node:
        raise UsageError(f"{spec!r} says {counted(nodes * per_node, 'GPU')}, --gpus {gpus}; give one of the two.")
    if normalise(name) == HERE:
        return _here(nodes, per_node or gpus, gpu_memory_bytes)
    if per_node is None:
        nodes, per_node = _machines(gpus or 1)
    return Cluster(device=_device(name, gpu_memory_bytes), gpus_per_node=per_node, nodes=nodes)


def _here(nodes: int, per_node: int | None, memory_bytes: int | None) -> Cluster:
    """So many machines like this one."""
    from tonnage.catalog import local_gpus as here

    found = here.cluster(per_node)
    device = found.device if memory_bytes is None else found.device.with_capacity(memory_bytes)
    return replace(found, device=device, nodes=nodes)


def _split(spec: str | None) -> tuple[int, int | None, str]:
    """Machines, GPUs of each if stated, and the card's name from `4x8xH100`."""
    match = _SPEC.fullmatch(spec or "")
    if match is None:  # a line break within the name
        return 1, None, spec or ""
    counts = [_positive(digits, spec) for digits in match.groups()[:2] if digits is not None]
    nodes = counts[0] if len(counts) == 2 else 1
    return nodes, counts[-1] if counts else None, match[3]


def _positive(digits: str, spec: str | None) -> int:
    if len(digits) > 9 or int(digits) == 0:
        raise UsageError(f"{spec!r}: {digits} is no number of GPUs; try 8xA100-80GB or 4x8xH100.")
    return int(digits)


def _machines(gpus: int) -> tuple[int, int]:
    """Machines and GPUs of each for a total."""
    if gpus <= GPUS_PER_NODE:
        return 1, gpus
    if gpus % GPUS_PER_NODE:
        raise UsageError(
            f"{gpus} GPUs are not whole machines of {GPUS_PER_NODE}; say how many machines, e.g. --gpu 2x6xA100-80GB."
        )
    return gpus // GPUS_PER_NODE, GPUS_PER_NODE


def _device(name: str, memory_bytes: int | None) -> Device:
    if normalise(name) == CPU:
        return host_device(memory_bytes)
    if name:
        _check_form(name)
        device = find_device(name)
        return device if memory_bytes is None else device.with_capacity(memory_bytes)
    if memory_bytes is None:
        raise UsageError("No GPU named; give --gpu (t4, 8xA100-80GB, 4x8xH100) or --gpu-memory 24GiB.")
    return generic_device(memory_bytes)


def _check_form(name: str) -> None:
    """Refuse other ways of writing several GPUs, with ours.  Raises UsageError."""
    kinds = [part for part in re.split(r"\s*[,+]\s*", name) if part]
    if len(kinds) > 1 and normalise(kinds[0]) in _names():
        raise UsageError(f"{name!r} names {len(kinds)} kinds of GPUs; a job runs on one: --gpu {kinds[0]}.")
    other = _OTHER_SPEC.fullmatch(name)
    if other is not None and normalise(other["name"] or other["card"]) in _names():
        written = f"{other['count'] or other['number']}x{other['name'] or other['card']}"
        raise UsageError(f"{name!r}: write the number of GPUs in front: --gpu {written}.")


@cache
def _devices() -> Mapping[str, Device]:
    """The catalog, read once."""
    text = (files("tonnage") / "catalog" / "devices.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    observed = {entry["id"]: entry for entry in tables["device"] if "context_observed_mib" in entry}
    return {entry["id"]: _entry(entry, tables["capability"], observed) for entry in tables["device"]}


@cache
def _names() -> Mapping[str, Device]:
    """Every id and alias."""
    return {name: device for device in _devices().values() for name in (device.id, *device.aliases)}


def _entry(
    entry: Mapping[str, Any], capabilities: Mapping[str, Any], observed: Mapping[str, Mapping[str, Any]]
) -> Device:
    """The Device of one table of devices.toml."""
    values = {k: v for k, v in entry.items() if k not in ("context_observed_mib", "context_like")}
    limits = {k: v for k, v in capabilities[entry["capability"]].items() if k not in ("source", "date")}
    major, minor = entry["capability"].split(".")
    values |= {
        "aliases": tuple(entry.get("aliases", ())),
        "capability": (int(major), int(minor)),
        "peak_flops": Peaks(**entry.get("peak_flops", {})),
        "source": tuple(entry["source"]),
    }
    return Device(**values, **limits, **_context(entry, observed))


def _context(entry: Mapping[str, Any], observed: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Memory of the CUDA context: observed on the card, or on the same chip, or by multiprocessors.

    The context grows with the multiprocessors (each needs local memory for all its threads): the observed
    cards lie between 2.5 and 5.8 MiB a multiprocessor.  A card observed fewer than three times is given
    the spread of all cards around its own median.
    """
    per_sm = {name: median(e["context_observed_mib"]) / e["sms"] for name, e in observed.items()}
    spread = _spread(observed)
    like = observed.get(entry["id"]) or observed.get(entry.get("context_like", ""))
    if like is None:
        middle = median(per_sm.values()) * entry["sms"]
        low, high = min(per_sm.values()) * entry["sms"], max(per_sm.values()) * entry["sms"]
        how = f"derived from {len(observed)} observed cards by multiprocessors"
    else:
        figures = like["context_observed_mib"]
        middle, low, high = median(figures), min(figures), max(figures)
        how = f"observations on {like['id']}: {len(figures)}"
        if len(figures) < 3:
            low, high = min(low, middle * spread[0]), max(high, middle * spread[1])
    return {
        "context_low_bytes": round(low * MIB),
        "context_bytes": round(middle * MIB),
        "context_high_bytes": round(high * MIB),
        "context_source": how,
    }


def _spread(observed: Mapping[str, Mapping[str, Any]]) -> tuple[float, float]:
    """The least and most that any card observed more than once departs from its own median."""
    repeated: list[Sequence[float]] = [
        e["context_observed_mib"] for e in observed.values() if len(e["context_observed_mib"]) > 1
    ]
    return (
        min(min(figures) / median(figures) for figures in repeated),
        max(max(figures) / median(figures) for figures in repeated),
    )


def spell_cluster(cluster: Cluster) -> tuple[str, int | None]:
    """Return what `parse_cluster` reads the same cluster from: its text, and its memory where the catalog has
    another."""
    known = _names().get(cluster.device.id)
    if known is None and cluster.device.id != CPU:
        return f"{cluster.nodes}x{cluster.gpus_per_node}x", cluster.device.capacity_bytes
    differs = known is not None and known.capacity_bytes != cluster.device.capacity_bytes
    return str(cluster), cluster.device.capacity_bytes if differs else None


def spell_options(cluster: Cluster) -> str:
    """Return the cluster as options of the command line: `--gpu 8xh100-80gb`, `--gpu-memory 6GiB --gpus 2`."""
    name, memory_bytes = spell_cluster(cluster)
    if memory_bytes is None:
        return f"--gpu {name}"
    memory = f"--gpu-memory {typed(memory_bytes)}"
    usual = (cluster.nodes == 1 and cluster.gpus <= GPUS_PER_NODE) or cluster.gpus_per_node == GPUS_PER_NODE
    return f"{memory} --gpus {cluster.gpus}" if name.endswith("x") and usual else f"--gpu {name} {memory}"
