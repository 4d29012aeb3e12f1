"""What is predicted is what is applied: an estimate of a plan against a user's loop around `tonnage.apply`."""

import json
import sys
from pathlib import Path

import pytest

from networks import TINY, tiny_job
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.estimates.predict import estimate
from tonnage.plans import Plan

pytestmark = pytest.mark.ghost

CASES = {
    "scaled, clipped, three micro-batches": (
        "a100-40gb",
        {"precision": "fp16-mixed", "clip_grad_norm": 1.0, "checkpointing": "full", "loss": "chunked"},
        {"grad_accum": 3},
    ),
    "half of the states on the host": (
        "a100-40gb",
        {"precision": "bf16-true", "optimizer_offload": "cpu=0.5", "activation_offload": "cpu-streamed"},
        {},
    ),
    "updated in backward": ("a100-40gb", {"checkpointing": "selective", "optimizer_in_backward": True}, {}),
    "sharded": ("2xa100-40gb", {"shard": "zero3", "loss": "chunked"}, {"grad_accum": 2}),
    "divided": ("2xa100-40gb", {"tp": 2, "clip_grad_norm": 1.0}, {}),
    "by DeepSpeed, in files": (
        "a100-40gb",
        {"engine": "deepspeed", "shard": "zero3", "optimizer_offload": "nvme", "param_offload": "nvme"},
        {"grad_accum": 2},
    ),
    "sequences shared": ("2xa100-40gb", {"cp": 2, "shard": "zero3"}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_an_applied_plan_needs_what_was_estimated(name, dry_run, worker, tmp_path):
    gpu, choices, fields = CASES[name]
    job, cluster = tiny_job("llama", seq_len=256, **fields), parse_cluster(gpu)
    expected = estimate(Case(job, Plan(**choices), cluster), worker=worker, rank=0, steps=3).estimate
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY["llama"]))
    spec = json.dumps({"plan": choices, "job": {"seq_len": 256, "micro_batch": job.micro_batch, **fields}})
    together = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    launcher = together if cluster.gpus > 1 else (sys.executable,)
    answer = dry_run("applied.py", spec, str(Path(config)), launcher=launcher, gpu=gpu)
    assert answer.error is None, answer.error
    assert all(all(printed["effects"].values()) for printed in answer.printed)
    assert answer.printed
    found = answer.run.estimate
    assert found.peak.allocated_bytes == expected.peak.allocated_bytes
    assert found.peak.reserved_bytes == expected.peak.reserved_bytes
    # GradScaler's two numbers, 512 bytes each, are read after each step and so count among what forward keeps; one
    # tensor of a shared batch, 4,096 bytes, lies where a buffer of the loss's sum over ranks was
    close = 1024 if "fp16" in choices.get("precision", "") else 4096 if "cp" in choices else 0
    for category, count in expected.peak.by_category.items():
        assert abs(found.peak.by_category[category] - count) <= close, category
    assert found.phases == expected.phases
