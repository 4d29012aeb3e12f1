"""Runs on a ghost: what operations take inside themselves, over shapes and dtypes, as JSON in the file that is named.

Started by `__main__.py` for each kind of card.  Every operation that `tonnage.meta.quantities` knows is listened
to; the blocks that it took and gave back are those of the allocator's own events.
"""

import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tonnage.meta import quantities

BF16 = (torch.bfloat16,) if torch.cuda.is_bf16_supported(including_emulation=False) else ()
DTYPES = (*BF16, torch.float16, torch.float32)


class Listener(TorchDispatchMode):
    """Notes, for each call of a known operation, where in the allocator's history it began and ended."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, quantities.Quantities, int, int, set[int]]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = quantities.OF.get(op.overloadpacket.__name__) if hasattr(op, "overloadpacket") else None
        if rule is None:
            return op(*args, **(kwargs or {}))
        before = position()
        result = op(*args, **(kwargs or {}))
        kept = {
            tensor.untyped_storage().data_ptr() for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)
        }
        call = (op.overloadpacket.__name__, rule(args, kwargs or {}, result), before, position(), kept)
        self.calls.append(call)
        return result


def position() -> int:
    """How many blocks were handed out or taken back so far."""
    counts = torch._C._cuda_memoryStats(0)["allocation"]["all"]
    return int(counts["allocated"] + counts["freed"])


def inside(events: list[dict[str, Any]], kept: set[int]) -> list[int]:
    """Bytes of the blocks that were alive at the fullest moment of a call and are not its results."""
    alive: dict[int, int] = {}
    fullest: list[int] = []
    for event in events:
        if event["action"] == "alloc":
            alive[event["addr"]] = event["size"]
        else:
            alive.pop(event["addr"], None)
        taken = [size for address, size in alive.items() if address not in kept]
        if sum(taken) > sum(fullest):
            fullest = taken
    return fullest


def leaf(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda", requires_grad=True)


def attention() -> Iterator[torch.Tensor]:
    sizes = ((1, 2), ((4, 4), (8, 2), (12, 12)), (100, 197, 256, 320, 1000, 2048), (32, 64, 80, 96, 128, 256))
    backends = (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.MATH,
    )
    shapes = tuple(product((False, True), *sizes))
    for backend, dtype, (apart, batch, (heads, groups), tokens, width) in product(backends, DTYPES, shapes):
        of_each = [
            (batch, count, tokens, width) if apart else (batch, tokens, count, width)
            for count in (heads, groups, groups)
        ]
        parts = (leaf(*size, dtype=dtype) for size in of_each)
        query, key, value = (part if apart else part.transpose(1, 2) for part in parts)
        with sdpa_kernel(backend):
            try:
                yield functional.scaled_dot_product_attention(
                    query, key, value, is_causal=True, enable_gqa=groups != heads
                )
            except RuntimeError:  # this backend does not serve this call on this card
                continue


def attention_to_more() -> Iterator[torch.Tensor]:
    """Of a part of a sequence to all of it, as with context parallelism."""
    shapes = product((False, True), BF16, ((4, 4), (8, 2)), (256, 1000), (2, 4), (64, 128))
    for apart, dtype, (heads, groups), tokens, times, width in shapes:
        sizes = [(1, tokens, heads, width), *[(1, tokens * times, groups, width)] * 2]
        parts = (leaf(*size, dtype=dtype).transpose(1, 2) for size in sizes)
        query, key, value = (part.contiguous() if apart else part for part in parts)
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            with sdpa_kernel(backend):
                try:
                    yield functional.scaled_dot_product_attention(query, key, value, enable_gqa=groups != heads)
                except RuntimeError:  # this backend does not serve this call on this card
                    continue


def others() -> Iterator[torch.Tensor]:
    for dtype, (rows, columns) in product(DTYPES, ((256, 512), (1000, 1000), (8192, 2048))):
        yield functional.softmax(leaf(rows, columns, dtype=dtype), dim=-1)
    for dtype, tokens, width in product(DTYPES, (512, 3000, 4096, 8192, 20000), (64, 768, 4096)):
        yield functional.embedding(
            torch.zeros(1, tokens, dtype=torch.long, device="cuda"), leaf(1000, width, dtype=dtype)
        )
    for dtype, tokens, width in product(DTYPES, (1024, 4096, 30000), (256, 4096)):
        index = torch.zeros(tokens, dtype=torch.long, device="cuda")
        yield leaf(tokens, width, dtype=dtype)[index]
    for tokens in (1024, 4096, 30000):
        torch.zeros(tokens, dtype=torch.long, device="cuda").cumsum(0)
    for dtype, size, patch, width in product((*BF16, torch.float16), (224, 336), (14, 16, 32), (256, 768, 1024)):
        layer = nn.Conv2d(3, width, patch, patch, device="cuda", dtype=dtype)
        image = torch.empty(4, 3, size, size, device="cuda", dtype=dtype)
        yield layer(image)
        yield layer(image).flatten(2).transpose(1, 2).contiguous()  # whose gradient lies the other way round
    for width, count in ((1024, 3), (4096, 20), (8000, 200)):
        torch._foreach_norm([torch.empty(width, width, device="cuda") for _ in range(count)])


def main() -> None:
    torch.cuda.init()
    torch.empty(1, device="cuda")
    start = position()
    with Listener() as listener:
        for program in (attention, attention_to_more, others):
            for result in program():
                if result.requires_grad:
                    result.backward(torch.empty_like(result))
    events = torch.cuda.memory._snapshot(0)["device_traces"][0]
    events = [event for event in events if event["action"] in ("alloc", "free_requested")]
    missing = position() - len(events)  # before the history began
    assert 0 <= missing <= start
    rows = [
        {
            "op": name,
            "variant": variant,
            "numbers": numbers,
            "blocks": inside(events[begin - missing : end - missing], kept),
        }
        for name, (variant, numbers), begin, end, kept in listener.calls
    ]
    Path(sys.argv[1]).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
