"""Trains a layer and saves it, over what a folder holds already, in each step and by every way that torch has.

python saving.py FOLDER
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as distributed
from safetensors.torch import save_file
from torch import nn

folder = Path(sys.argv[1])
network = nn.Linear(2048, 2048).cuda()
optimizer = torch.optim.AdamW(network.parameters())
for step in range(3):
    network(torch.randn(8, 2048, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.save(
        {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, folder / "all.pt"
    )
    save_file(network.state_dict(), folder / "network.safetensors", metadata={"step": str(step)})
    many = {f"a name as long as those of layers of a network, {place}": torch.zeros(2) for place in range(2000)}
    distributed.save({"network": network.state_dict(), "many": many}, checkpoint_id=folder / "parts")
    again = torch.load(folder / "all.pt", map_location="cpu")
    before = torch.cuda.memory_allocated()
    on_card = torch.load(folder / "all.pt", map_location="cuda")
    loaded_bytes = torch.cuda.memory_allocated() - before
    del on_card
    distributed.load({"network": network.state_dict()}, checkpoint_id=folder / "parts")
print(
    json.dumps(
        {
            "step": again["step"],
            "shape": list(again["network"]["weight"].shape),
            "moments": len(again["optimizer"]["state"]),
            "loaded_bytes": loaded_bytes,
            "made": [float(state["step"]) for state in again["optimizer"]["state"].values()],
            "seen": sorted(path.name for path in folder.iterdir()),
        }
    ),
    flush=True,
)
