"""Reports to experiment trackers whose packages stand in a folder: what each of them would read of its variables."""

import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, sys.argv[1])
import wandb  # type: ignore[import-not-found]


def main() -> None:
    layer = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):
        layer(torch.ones(8, 64, device="cuda")).sum().backward()
        optimizer.step()
    place = Path(os.environ["WANDB_DIR"])
    (place / "run.log").write_text(wandb.NAME)
    print(
        json.dumps(
            {"mode": os.environ["WANDB_MODE"], "place": str(place), "mlflow": os.environ["MLFLOW_TRACKING_URI"]}
        )
    )


main()
