"""`nvidia-smi` for programs that call it: the cards of the ghost's machine, and their memory in use.

python smi.py [-L] [-i INDEX] [--query-gpu=NAME,... [--format=csv[,noheader][,nounits]]]
It shows no processes (`--query-compute-apps`), as in a container.
"""

import ctypes
import itertools
import os
import sys

NOT_KNOWN = "[N/A]"


def rows() -> list[dict[str, tuple[str, str]]]:
    """Return the facts of each card by the names of `--query-gpu`: a text and its unit."""
    name = os.environ.get("GHOST_NAME", NOT_KNOWN)
    count = int(os.environ.get("GHOST_DEVICES", "1"))
    return [
        {
            "index": (str(index), ""),
            "count": (str(count), ""),
            "name": (name, ""),
            "gpu_name": (name, ""),
            "compute_cap": (os.environ.get("GHOST_CAPABILITY", NOT_KNOWN), ""),
            **read_nvml(index),
            "utilization.gpu": ("0", " %"),
        }
        for index in range(count)
    ]


def read_nvml(card: int) -> dict[str, tuple[str, str]]:
    """Return the facts of a card that the ghost's NVML has."""
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    handle, sizes = ctypes.c_void_p(), (ctypes.c_ulonglong * 5)()  # nvmlMemory_v2_t: version, and the four
    uuid, driver = ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
    nvml.nvmlDeviceGetHandleByIndex_v2(card, ctypes.byref(handle))
    nvml.nvmlDeviceGetMemoryInfo_v2(handle, sizes)
    nvml.nvmlDeviceGetUUID(handle, uuid, len(uuid))
    nvml.nvmlSystemGetDriverVersion(driver, len(driver))
    names = ("memory.total", "memory.reserved", "memory.free", "memory.used")
    memory = {name: (str(count_bytes // 2**20), " MiB") for name, count_bytes in zip(names, sizes[1:], strict=True)}
    return {"uuid": (uuid.value.decode(), ""), "driver_version": (driver.value.decode(), ""), **memory}


def format_query(names: list[str], cards: list[dict[str, tuple[str, str]]], form: list[str]) -> list[str]:
    """Return lines of comma-separated values."""
    lines = [] if "noheader" in form else [", ".join(names)]
    for card in cards:
        facts = (card.get(name, (NOT_KNOWN, "")) for name in names)
        lines.append(", ".join(value if "nounits" in form else value + unit for value, unit in facts))
    return lines


def answer(arguments: list[str]) -> list[str]:
    """Return the lines to print for these arguments."""
    words = [part for argument in arguments for part in argument.split("=", 1)]
    options = dict(itertools.pairwise(words))
    chosen = options.get("-i", options.get("--id"))
    cards = [card for card in rows() if chosen is None or card["index"][0] in chosen.split(",")]
    for query, about in (("--query-gpu", cards), ("--query-compute-apps", [])):
        if query in options:
            names = [name.strip() for name in options[query].split(",")]
            return format_query(names, about, options.get("--format", "").split(","))
    if "-L" in words or "--list-gpus" in words:
        return [f"GPU {card['index'][0]}: {card['name'][0]} (UUID: {card['uuid'][0]})" for card in cards]
    head = "NVIDIA-SMI  of a dry-run: these GPUs are not there"
    return [
        head,
        *(_row(*(card[name][0] for name in ("index", "name", "memory.used", "memory.total"))) for card in cards),
    ]


def _row(index: str, name: str, used: str, total: str) -> str:
    return f"| {index:>3}  {name}  {used}MiB / {total}MiB |"


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in answer(sys.argv[1:]))
