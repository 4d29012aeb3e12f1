"""Runs on a ghost: which kernel of attention torch takes, and which `tonnage.meta.choices` says it takes.

    tonnage dry-run --gpu h100-80gb -- python benchmarks/portable/attention.py

Ends with an error where they differ.
"""

import sys
from itertools import product

import torch

from tonnage.meta.choices import CUDNN, EFFICIENT, FLASH, MATH, choose_kernel

KERNELS = {0: MATH, 1: FLASH, 2: EFFICIENT, 3: CUDNN}
"""torch's enum SDPBackend (ATen/native/transformers/sdp_utils_cpp.h)."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTHS = (32, 40, 60, 64, 72, 80, 96, 128, 160, 192, 200, 256, 320, 512)
TOKENS = ((128, 128), (1, 128), (100, 100), (128, 256))


def main() -> None:
    """Ask both, over a grid of calls."""
    capability = torch.cuda.get_device_capability()
    count, wrong = 0, []
    grid = product(
        DTYPES, WIDTHS, (None, 64, 128), (None, "bool", "float"), (0.0, 0.1), (False, True), (8, 2), TOKENS
    )
    for dtype, width, other, kind, dropout, causal, groups, (asking, asked) in grid:
        for trained in (False, True):
            if (kind and causal) or other == width:
                continue
            sizes = ((8, asking, width), (groups, asked, width), (groups, asked, other or width))
            query, key, value = (
                torch.empty(2, *size, dtype=dtype, device="cuda", requires_grad=trained) for size in sizes
            )
            mask_dtype = torch.bool if kind == "bool" else dtype
            mask = torch.empty(2, 1, asking, asked, dtype=mask_dtype, device="cuda") if kind else None
            gqa = groups != 8
            torchs = KERNELS[torch._fused_sdp_choice(query, key, value, mask, dropout, causal, enable_gqa=gqa)]
            ours = choose_kernel(query, key, value, mask, dropout, causal, gqa, capability)
            count += 1
            if ours != torchs:
                wrong.append(
                    (dtype, width, other, kind, dropout, causal, groups, asking, asked, trained, torchs, ours)
                )
    for row in wrong:
        sys.stdout.write(f"{row}\n")
    sys.stdout.write(f"{count} calls, {len(wrong)} differ\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
