"""Where the driver puts memory: the addresses that cudaMalloc answers to sequences of requests and frees.

    python benchmarks/gpu/addresses.py > addresses.jsonl

Before torch 2.12 the caching allocator prefers, among free blocks of one size, the one with the lowest address, so
the order of the driver's addresses decides how a step's memory is cut up.  One line a sequence: what was asked for,
in order, as ["malloc", bytes, address] and ["free", bytes, address].
"""

import ctypes
import json
import random
from collections.abc import Callable
from typing import Any

MIB = 2**20
Record = list[tuple[str, int, int]]


class Driver:
    """cudaMalloc and cudaFree of the runtime that torch brought along, and a record of what they answered."""

    def __init__(self) -> None:
        import torch

        torch.cuda.init()
        torch.cuda.synchronize()
        self._library = ctypes.CDLL(_loaded("libcudart"))
        self.record: Record = []
        self.held: list[tuple[int, int]] = []

    def malloc(self, size_bytes: int) -> int:
        pointer = ctypes.c_void_p()
        code = self._library.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size_bytes))
        if code:
            raise MemoryError(f"cudaMalloc({size_bytes}) answered {code}")
        address = pointer.value or 0
        self.record.append(("malloc", size_bytes, address))
        self.held.append((address, size_bytes))
        return address

    def free(self, place: int) -> None:
        address, size_bytes = self.held.pop(place)
        self._library.cudaFree(ctypes.c_void_p(address))
        self.record.append(("free", size_bytes, address))


def _loaded(name: str) -> str:
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if name in line}
    return sorted(paths)[0]


def ascending(driver: Driver) -> None:
    """Sizes of the allocator's segments: small pool, medium, large."""
    for size in (2, 2, 20, 20, 2, 32, 64, 20, 2, 34, 1002, 20, 2, 128, 22, 2, 2, 500, 20, 2):
        driver.malloc(size * MIB)


def equal(driver: Driver) -> None:
    for size in (2, 20, 64, 512):
        for _ in range(12):
            driver.malloc(size * MIB)


def reused(driver: Driver) -> None:
    """Holes of several sizes, then requests that fit some of them exactly, some with room to spare."""
    for _ in range(10):
        driver.malloc(20 * MIB)
        driver.malloc(64 * MIB)
    for place in (18, 14, 9, 8, 3, 2):
        driver.free(place)
    for size in (20, 64, 64, 20, 30, 2, 2, 84, 20):
        driver.malloc(size * MIB)


def mixed(driver: Driver) -> None:
    rng = random.Random(0)
    for _ in range(200):
        if driver.held and rng.random() < 0.4:
            driver.free(rng.randrange(len(driver.held)))
        else:
            driver.malloc(rng.choice((2, 2, 20, 20, 22, 32, 64, 66, 128, 502, 1002)) * MIB)


def everything_again(driver: Driver) -> None:
    """All freed, as empty_cache does, then the same requests once more."""
    for size in (2, 20, 64, 2, 512, 20, 1002):
        driver.malloc(size * MIB)
    while driver.held:
        driver.free(0)
    for size in (2, 20, 64, 2, 512, 20, 1002):
        driver.malloc(size * MIB)


SEQUENCES: tuple[Callable[[Driver], None], ...] = (ascending, equal, reused, mixed, everything_again)


def steps() -> Any:
    """Segments of a real step in the order in which torch asked for them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.cuda.memory._record_memory_history("all", context=None, max_entries=10**6)
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 32000, (2, 2048), device="cuda")
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [
        (event["action"], event["size"], event["addr"], event["stream"])
        for event in torch.cuda.memory._snapshot()["device_traces"][0]
        if event["action"].startswith("segment")
    ]


def main() -> None:
    driver = Driver()
    for sequence in SEQUENCES:
        driver.record = []
        sequence(driver)
        while driver.held:
            driver.free(len(driver.held) - 1)
        print(json.dumps({"sequence": sequence.__name__, "record": driver.record}), flush=True)
    print(json.dumps({"sequence": "step", "record": steps()}), flush=True)


if __name__ == "__main__":
    main()
