"""`nvidia-smi` for programs that call it: which cards the ghost machine has, and nothing of their use.

python smi.py [-L] [-i INDEX] [--query-gpu=NAME,... [--format=csv[,noheader][,nounits]]]
"""

import itertools
import os
import sys

NOT_KNOWN = "[N/A]"


def rows() -> list[dict[str, tuple[str, str]]]:
    """Of each card what is known, by the names of `--query-gpu`: a text and its unit."""
    memory = str(int(os.environ.get("GHOST_TOTAL_BYTES", "0")) // 2**20)
    name = os.environ.get("GHOST_NAME", NOT_KNOWN)
    count = int(os.environ.get("GHOST_DEVICES", "1"))
    return [
        {
            "index": (str(index), ""),
            "count": (str(count), ""),
            "name": (name, ""),
            "gpu_name": (name, ""),
            "compute_cap": (os.environ.get("GHOST_CAPABILITY", NOT_KNOWN), ""),
            "memory.total": (memory, " MiB"),
            "memory.free": (memory, " MiB"),
            "memory.used": ("0", " MiB"),
            "utilization.gpu": ("0", " %"),
        }
        for index in range(count)
    ]


def queried(names: list[str], cards: list[dict[str, tuple[str, str]]], form: list[str]) -> list[str]:
    """Lines of comma-separated values."""
    lines = [] if "noheader" in form else [", ".join(names)]
    for card in cards:
        found = (card.get(name, (NOT_KNOWN, "")) for name in names)
        lines.append(", ".join(value if "nounits" in form else value + unit for value, unit in found))
    return lines


def answer(arguments: list[str]) -> list[str]:
    """What is printed."""
    words = [part for argument in arguments for part in argument.split("=", 1)]
    said = dict(itertools.pairwise(words))
    chosen = said.get("-i", said.get("--id"))
    cards = [card for card in rows() if chosen is None or card["index"][0] in chosen.split(",")]
    if "--query-gpu" in said:
        names = [name.strip() for name in said["--query-gpu"].split(",")]
        return queried(names, cards, said.get("--format", "").split(","))
    if "-L" in words or "--list-gpus" in words:
        return [f"GPU {card['index'][0]}: {card['name'][0]}" for card in cards]
    head = "NVIDIA-SMI  of a dry-run: these GPUs are not there"
    return [head, *(f"| {c['index'][0]:>3}  {c['name'][0]}  0MiB / {c['memory.total'][0]}MiB |" for c in cards)]


if __name__ == "__main__":
    print("\n".join(answer(sys.argv[1:])))
