"""How fast the card is at what a Transformer does: matrix products, attention, and passes over memory, by size.

    python benchmarks/gpu/rates.py > rates.jsonl

One line a measurement: operation, dtype, sizes, median seconds of one call on random data (from CUDA events around
repeated calls, over several input sets so that the cache does not answer), and the operations or bytes it moves.
"""

import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

Row = dict[str, Any]
Call = Callable[[int], Any]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ENOUGH_SECONDS = 0.02
CACHE_BYTES = 192 * 2**20


def seconds(call: Call, sets: int) -> tuple[float, float]:
    """Median and least seconds of one call; `call(i)` uses input set i."""
    for i in range(3):
        call(i % sets)
    torch.cuda.synchronize()
    times: list[float] = []
    spent = 0.0
    while spent < ENOUGH_SECONDS or len(times) < 5:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for i in range(4):
            call(i % sets)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 4e3)
        spent += times[-1] * 4
        if len(times) >= 200:
            break
    return statistics.median(times), min(times)


def input_sets(bytes_each: int) -> int:
    """As many copies of the inputs as exceed the cache, at most 8."""
    return max(1, min(8, -(-CACHE_BYTES // max(bytes_each, 1))))


def products() -> Iterator[tuple[Row, Call, int]]:
    """C[m, n] = A[m, k] B[k, n]."""
    tokens = (1, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)
    widths = ((1024, 1024), (2048, 2048), (4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096), (8192, 8192))
    odd = ((1000, 4000, 1000), (4097, 4096, 4096), (4096, 128256, 4096), (197 * 64, 1024, 1024), (4096, 4096, 64))
    shapes = [(m, n, k) for m, (k, n) in itertools.product(tokens, widths)] + list(odd)
    for name, dtype in DTYPES.items():
        for m, n, k in shapes:
            if name != "bf16" and (m not in (256, 4096) or n > 14336):
                continue
            size = (m * k + k * n) * dtype.itemsize
            sets = input_sets(size)
            left = [torch.randn(m, k, device="cuda", dtype=dtype) for _ in range(sets)]
            right = [torch.randn(n, k, device="cuda", dtype=dtype).t() for _ in range(sets)]
            row = {"op": "mm", "dtype": name, "m": m, "n": n, "k": k, "flops": 2 * m * n * k}
            row["bytes"] = size + m * n * dtype.itemsize
            yield row, lambda i, a=left, b=right: a[i] @ b[i], sets


def attentions() -> Iterator[tuple[Row, Call, int]]:
    """Causal attention forward and backward, per backend."""
    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
    }
    shapes = [
        (1, 32, 2048, 128),
        (1, 32, 4096, 128),
        (1, 32, 8192, 128),
        (4, 16, 1024, 64),
        (8, 32, 512, 128),
        (2, 8, 4096, 256),
    ]
    for (name, backend), (b, h, s, d) in itertools.product(backends.items(), shapes):
        q, k, v = (torch.randn(b, h, s, d, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        row = {"dtype": "bf16", "backend": name, "b": b, "h": h, "s": s, "d": d}
        forward_flops = 2 * b * h * s * s * d  # half of the two products, because of the causal mask

        def attend(_: int, q: Any = q, k: Any = k, v: Any = v, backend: Any = backend) -> Any:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        def both(_: int, q: Any = q, k: Any = k, v: Any = v, call: Any = attend) -> None:
            out = call(0)
            torch.autograd.grad(out, (q, k, v), out.detach())

        yield {"op": "attention forward", **row, "flops": forward_flops}, attend, 1
        yield {"op": "attention forward and backward", **row, "flops": int(3.5 * forward_flops)}, both, 1


def passes() -> Iterator[tuple[Row, Call, int]]:
    """Operations bound by memory, from one kernel launch to gigabytes."""
    for elements in (2**10, 2**14, 2**18, 2**20, 2**22, 2**24, 2**26, 2**28):
        for name in ("bf16", "fp32"):
            dtype = DTYPES[name]
            size = elements * dtype.itemsize
            sets = input_sets(size)
            x = [torch.randn(elements, device="cuda", dtype=dtype) for _ in range(sets)]
            y = [torch.randn(elements, device="cuda", dtype=dtype) for _ in range(sets)]
            row = {"dtype": name, "elements": elements}
            yield {"op": "add", **row, "bytes": 3 * size}, lambda i, x=x, y=y: x[i] + y[i], sets
            yield {"op": "silu", **row, "bytes": 2 * size}, lambda i, x=x: torch.nn.functional.silu(x[i]), sets
            yield {"op": "sum", **row, "bytes": size}, lambda i, x=x: x[i].sum(), sets
            yield {"op": "copy", **row, "bytes": 2 * size}, lambda i, x=x, y=y: y[i].copy_(x[i]), sets
            if name == "fp32":
                cast = {"op": "cast to bf16", **row, "bytes": size + size // 2}
                yield cast, lambda i, x=x: x[i].to(torch.bfloat16), sets


def host_copies() -> Iterator[tuple[Row, Call, int]]:
    """Between host and card, pinned and pageable."""
    for elements in (2**12, 2**16, 2**20, 2**24, 2**27):
        card = torch.empty(elements, dtype=torch.uint8, device="cuda")
        for pinned in (True, False):
            host = torch.empty(elements, dtype=torch.uint8, pin_memory=pinned)
            row = {"dtype": "uint8", "elements": elements, "pinned": pinned, "bytes": elements}
            yield {"op": "to card", **row}, lambda _, h=host, c=card: c.copy_(h, non_blocking=True), 1
            yield {"op": "to host", **row}, lambda _, h=host, c=card: h.copy_(c, non_blocking=True), 1


def main() -> None:
    properties = torch.cuda.get_device_properties(0)
    print(json.dumps({"card": properties.name, "torch": torch.__version__, "cuda": torch.version.cuda}), flush=True)
    for family in (products, attentions, passes, host_copies):
        for row, call, sets in family():
            try:
                median, least = seconds(call, sets)
            except RuntimeError as error:
                print(json.dumps({**row, "error": str(error).splitlines()[0]}), flush=True)
                continue
            print(json.dumps({**row, "seconds": median, "least_seconds": least}), flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
