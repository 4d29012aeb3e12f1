"""A recipe for torchtitan 0.3: one of its own networks, with the settings of recipe.json in place of its defaults.

    torchrun --nproc-per-node 8 -m torchtitan.train --module recipe --config training

Data set, tokenizer, checkpoints and metrics are those of torchtitan's llama3_8b; change them here.
"""

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.llama3 import config_registry
from torchtitan.trainer import Trainer

CHECKPOINTING: dict[str, Any] = {"none": None, "full": FullAC.Config, "selective": SelectiveAC.Config}


def training() -> Trainer.Config:
    """Return the whole configuration."""
    settings: dict[str, Any] = json.loads((Path(__file__).parent / "recipe.json").read_text(encoding="utf-8"))
    config = config_registry.llama3_8b()
    config.hf_assets_path = settings["hf_assets_path"]
    family = importlib.import_module(f"torchtitan.models.{settings['family']}")
    config.model_spec = family.model_registry(settings["flavor"], attn_backend=settings["attention"])
    config.training = TrainingConfig(**{"steps": config.training.steps, **settings["training"]})
    config.parallelism = ParallelismConfig(**settings["parallelism"])
    if not hasattr(torch.distributed, "set_timeout"):  # torch before 2.14
        config.parallelism.spmd_backend = "partial_dtensor"  # its FSDP2 takes no meshes of many axes
        torch.distributed.set_timeout = distributed_c10d._set_pg_timeout
    checkpointing = CHECKPOINTING[settings["activation_checkpoint"]]
    config.activation_checkpoint = checkpointing() if checkpointing is not None else None
    config.optimizer.implementation = settings["optimizer"]["implementation"]
    config.compile.enable = settings["compile"]["enable"]
    plain = CrossEntropyLoss.Config(global_vocab_size=config.model_spec.model.vocab_size)
    config.loss = ChunkedLossWrapper.Config(loss_fn=plain) if settings["loss"] == "chunked" else plain
    return config
