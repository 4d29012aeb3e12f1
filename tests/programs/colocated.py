"""Trains beside a small engine in its process, as GRPO does that generates with vLLM: `colocated.py FOLDER SHARE`."""

import json
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "like"))

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.core import EngineCore

logging.basicConfig(level=logging.INFO)
network = torch.nn.Linear(2048, 2048, bias=False, device="cuda")
optimizer = torch.optim.SGD(network.parameters())
core = EngineCore(EngineArgs(sys.argv[1]).create_engine_config(), float(sys.argv[2]))
print(json.dumps({"blocks": core.vllm_config.cache_config.num_gpu_blocks}), flush=True)
for _ in range(3):
    network(torch.ones(64, 2048, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
