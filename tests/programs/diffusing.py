"""Loads a network of diffusers from a folder that holds its configuration alone, and trains it.

python diffusing.py FOLDER
"""

import json
import sys

import torch
from diffusers import UNet2DModel

tiny = UNet2DModel(
    sample_size=16,
    block_out_channels=(32, 64),
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    norm_num_groups=8,
    layers_per_block=1,
)
tiny.save_config(f"{sys.argv[1]}/unet")
network = UNet2DModel.from_pretrained(sys.argv[1], subfolder="unet", torch_dtype=torch.bfloat16).cuda().train()
optimizer = torch.optim.AdamW(network.parameters())
for _ in range(2):
    noise = torch.randn(2, 3, 16, 16, device="cuda", dtype=torch.bfloat16)
    network(noise, torch.tensor([3, 4], device="cuda")).sample.float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
network.save_pretrained(sys.argv[1])
parameters = sum(parameter.numel() for parameter in network.parameters())
kept = {"dtypes": sorted({str(parameter.dtype) for parameter in network.parameters()}), "parameters": parameters}
print(json.dumps(kept | {"same": parameters == sum(p.numel() for p in tiny.parameters())}), flush=True)
