"""A user's own loop around `tonnage.apply`: a network with weights, and micro-batches on the host.

applied.py '{"plan": {...}, "job": {...}}' CONFIG.json
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

import tonnage
from tonnage import Job, Plan


def main() -> None:
    choices, fields = json.loads(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    plan, job = Plan(**choices["plan"]), Job(**choices["job"])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    dtype = torch.bfloat16 if plan.precision == "bf16-true" else torch.float32
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if "RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    trainable = tonnage.apply(plan, model, {"lr": 2e-5}, job=job)
    for _ in range(3):
        ids = [torch.randint(0, config.vocab_size, (job.micro_batch, job.seq_len)) for _ in range(job.grad_accum)]
        trainable.step([{"input_ids": rows, "labels": rows.clone()} for rows in ids])
    effects = {effect.option: effect.took_effect for effect in trainable.took_effect()}
    print(json.dumps({"effects": effects}))


if __name__ == "__main__":
    main()
