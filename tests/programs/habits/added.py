"""A kernel that adds numbers to others in place."""

import triton
import triton.language as tl


@triton.jit
def add_kernel(total, more, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = places < count
    sums = tl.load(total + places, mask=there) + tl.load(more + places, mask=there)
    tl.store(total + places, sums, mask=there)
