"""Offloads to the host by hand: what only ever held zeros, and what did not."""

import ctypes
import json
import resource

import torch

ELEMENTS = 64 << 20


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def train_on_host(rows: int) -> None:
    for made in (torch.optim.Muon, torch.optim.Adafactor, torch.optim.RMSprop):
        weight = torch.nn.Parameter(torch.zeros(rows, 4096))
        weight.grad = torch.zeros_like(weight)
        made([weight]).step()


def grown_by_hand() -> list[int]:
    """The first byte of large memory that C asked for, after it grew and shrank, and of small memory."""
    c = ctypes.CDLL(None)
    c.realloc.restype, c.realloc.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_size_t)
    c.free.argtypes = (ctypes.c_void_p,)
    found = []
    for size in (1 << 40, 1 << 10):
        memory = ctypes.c_void_p()
        assert c.posix_memalign(ctypes.byref(memory), 4096, ctypes.c_size_t(size)) == 0
        ctypes.memset(memory.value, 7, 1)
        for asked in (size << 1, size >> 1):
            memory = ctypes.c_void_p(c.realloc(memory, asked))
            ctypes.memset(memory.value + asked - 1, 1, 1)
        found.append(ctypes.string_at(memory.value, 1)[0])
        c.free(memory)
    return found


train_on_host(1)  # what it imports takes memory once
card = torch.zeros(ELEMENTS, device="cuda")
torch.cuda.synchronize()
before = peak_bytes()
gradient, moment = card.to("cpu", non_blocking=True), torch.zeros(ELEMENTS)
torch.cuda.synchronize()
gradient += card.cpu()
gradient.mul_(torch.tensor(0.5)).add_(0.0)
overflown = torch.zeros(1)
torch._amp_foreach_non_finite_check_and_unscale_([gradient, moment], overflown, torch.tensor(0.5))
shard = card.cpu().pin_memory()
train_on_host(ELEMENTS // 4096)
half = card.half().to(device="cpu", dtype=torch.float32).to(torch.bfloat16)
filled = torch.full((ELEMENTS,), 0.0)
large = torch.empty(1 << 42, dtype=torch.uint8)  # 4 TiB: more than any machine has
large[-1] = 1
norm = torch.nn.utils.get_total_norm([gradient, moment])
grown = peak_bytes() - before

real = torch.arange(1 << 17, dtype=torch.float32)
pinned = real.pin_memory()
twice = (real * 1).mul_(2).add_(real, alpha=-1)
real_overflown, infinite = torch.zeros(1), torch.full((1 << 17,), float("inf"))
scaled = torch.full((1 << 17,), 3.0)
torch._amp_foreach_non_finite_check_and_unscale_([scaled, torch.zeros(1 << 17)], overflown, torch.tensor(0.5))
torch._amp_foreach_non_finite_check_and_unscale_([scaled, infinite], real_overflown, torch.tensor(0.5))
halved, threes = real.to(torch.bfloat16), torch.full((1 << 17,), 3)
halved[:2] = torch.tensor([7.0, 8.0])
threes[1:].copy_(halved[:1].expand((1 << 17) - 1))
addresses = {torch.empty(1 << 42, dtype=torch.uint8).data_ptr() for _ in range(100)}  # each is given back
said = {
    "by_hand": grown_by_hand(),
    "halved": [half.abs().max().item(), filled.max().item(), halved[:4].tolist(), threes[:2].tolist()],
    "large": [int(large[-1]), int(large[0]), len(addresses) < 100],
    "overflown": [overflown.item(), real_overflown.item()],
    "unscaled": scaled.mean().item(),
    "grown_bytes": grown,
    "norm": norm.item(),
    "pinned": pinned.is_pinned() and shard.is_pinned(),
    "kept": torch.equal(pinned, real),
    "same": torch.equal(twice, real),
    "number": torch.zeros(1 << 17).add_(1.5).mul_(2.0).mean().item(),
    "real_norm": torch.linalg.vector_norm(torch.full((1 << 16,), 3.0)).item(),
    "cleared": twice.zero_().abs().max().item(),
    "strided": real.view(-1, 2)[:, 0].zero_().sum().item() + real.sum().item(),
}
print(json.dumps(said), flush=True)
