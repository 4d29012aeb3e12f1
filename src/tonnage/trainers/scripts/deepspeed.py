"""Trains with DeepSpeed: ds_config.json is its configuration, job.json describes the network and its rows.

    deepspeed train.py --data FILE

rows.py describes FILE; without --data a few steps run on made-up rows.
"""

import json
from pathlib import Path
from typing import Any

import deepspeed
import job
import rows
import torch.distributed as dist
from loop import checkpointed
from torch.utils.data import DataLoader, DistributedSampler
from transformers.integrations import HfDeepSpeedConfig

HERE = Path(__file__).parent


def main() -> None:
    options = job.options()
    settings = job.read()
    config: dict[str, Any] = json.loads((HERE / "ds_config.json").read_text(encoding="utf-8"))
    deepspeed.init_distributed(dist_backend="nccl")
    from_now_on = HfDeepSpeedConfig(config)  # in stage 3 transformers divides layers as it makes them
    network = job.network(settings, options.random_weights)
    del from_now_on
    network = checkpointed(settings, job.adapted(settings, network))
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=network, model_parameters=trained, config=config)
    micro, accumulated = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    ranks = dist.get_world_size()
    dataset = rows.dataset(settings, options.data, options.steps * micro * accumulated * ranks)
    sampler: Any = DistributedSampler(dataset)
    loader = DataLoader(dataset, micro, sampler=sampler, drop_last=True, pin_memory=True, collate_fn=dataset.batch)
    with job.attention(settings):
        for batch in loader:
            loss = engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()})[0]
            engine.backward(loss)
            engine.step()
    if options.data:
        engine.save_checkpoint("output")


if __name__ == "__main__":
    main()
