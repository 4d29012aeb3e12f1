"""Blocks lie where a real driver put them: the requests recorded on an H200 and an H100, made to the ghost."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tonnage.errors import GhostUnavailable
from tonnage.ghost.environment import libraries

MEASUREMENTS = Path(__file__).parents[2] / "measurements"
CHUNK = 32 * 2**20

PROGRAM = """
import ctypes, json, sys
runtime = ctypes.CDLL("libcudart.so.13")
runtime.cudaMalloc.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t]
runtime.cudaFree.argtypes = [ctypes.c_void_p]
mine, answers = {}, []
for action, size, address in json.load(sys.stdin):
    if action == "malloc":
        pointer = ctypes.c_void_p()
        assert runtime.cudaMalloc(ctypes.byref(pointer), size) == 0
        mine[address] = pointer.value
        answers.append((address, pointer.value))
    else:
        assert runtime.cudaFree(mine.pop(address)) == 0
print(json.dumps(answers))
"""


def sequences() -> dict[str, Any]:
    """The recorded requests of programs that only ask the driver; a training step has libraries ask in between."""
    found = {}
    for card in ("h200", "h100"):
        lines = map(json.loads, (MEASUREMENTS / f"{card}-addresses.jsonl").read_text().splitlines())
        found |= {f"{card}, {line['sequence']}": line["record"] for line in lines if line["sequence"] != "step"}
    return found


def addresses(record: Any) -> list[tuple[int, int]]:
    """Real and ghost's address of every block, in order of request."""
    try:
        folder = libraries(13)
    except GhostUnavailable as error:
        pytest.skip(str(error))
    preload = ":".join(str(path) for path in sorted(folder.iterdir()) if ".so" in path.name)
    variables = {**os.environ, "LD_PRELOAD": preload, "GHOST_TOTAL_BYTES": str(150 * 2**30)}
    done = subprocess.run(
        [sys.executable, "-S", "-c", PROGRAM],
        input=json.dumps(record),
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [(real, mine) for real, mine in json.loads(done.stdout)]


@pytest.mark.parametrize("name", sequences())
def test_blocks_lie_where_the_driver_put_them(name: str) -> None:
    answers = addresses(sequences()[name])
    [(shift, count)] = Counter(real - mine for real, mine in answers).most_common(1)
    moved = [mine for real, mine in answers if real - mine != shift]
    # Holes that the context left were elsewhere in the recorded process: its two chunks, above all others here.
    context = max(mine for _, mine in answers) // CHUNK * CHUNK - CHUNK
    assert all(mine >= context for mine in moved), "a block outside the context's own chunks lies elsewhere"
    assert count > len(answers) / 2
