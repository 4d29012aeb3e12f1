"""Trains a layer and files its checkpoints away by Python's own functions, in a folder that has older ones.

python filing.py FOLDER
"""

import json
import os
import shutil
import sys
from pathlib import Path

import torch
from torch import nn

folder = Path(sys.argv[1])
network = nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
for step in range(2):
    network(torch.randn(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
    torch.save({"network": network.state_dict(), "step": step}, folder / "written.tmp")
    os.remove(folder / "last.pt")  # as it must be on Windows
    os.replace(folder / "written.tmp", folder / "last.pt")
    shutil.copyfile(folder / "last.pt", folder / "best.pt")
    if step == 0:
        os.link(folder / "last.pt", folder / f"step-{step}.pt")
        os.symlink("last.pt", folder / "latest")
with open(folder / "opened.ckpt", "wb") as file:
    torch.save({"network": network.state_dict(), "step": 5}, file)
os.rename(folder / "before.pt", folder / "backup.pt")
(folder / "oldest.pth").unlink()
shutil.rmtree(folder / "run-1")
(folder / "note.txt").write_text("mine")
(folder / "note.txt").rename(folder / "notes.txt")
shutil.move(folder / "notes.txt", folder / "moved.txt")
os.remove(folder / "moved.txt")


def step_in(name: str) -> int:
    return int(torch.load(folder / name, map_location="cpu")["step"])


found = {name: step_in(name) for name in ("last.pt", "best.pt", "step-0.pt", "latest", "opened.ckpt")}
with open(folder / "last.pt", "rb") as file:
    found["opened"] = torch.load(file)["step"]
found["backup"] = (folder / "backup.pt").read_text()
found["there"] = [(folder / name).exists() for name in ("written.tmp", "best.pt", "moved.txt")]
found["long_enough"] = os.path.getsize(folder / "best.pt") > network.weight.nbytes
print(json.dumps(found), flush=True)
