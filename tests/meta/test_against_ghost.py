"""The portable source against the ghost: models cut down to one layer, under different plans and on different
GPUs.
"""

import importlib.util
from dataclasses import replace
from typing import Any

import pytest

from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.catalog.models import find_model, model_names
from tonnage.estimates import predict
from tonnage.job import Job
from tonnage.shallow.depths import roomy
from tonnage.techniques.expert_parallel import experts_of, transformers_has_it
from tonnage.trainers.cases import request
from tonnage.workers.worker import Worker

DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")

ROWS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixed precision, cudnn attention": ("smollm2-135m", "h100-80gb", {}),
    "pure bf16, flash attention, fused": (
        "qwen3-0.6b",
        "a100-80gb",
        {"precision": "bf16-true", "optimizer": "adamw-fused"},
    ),
    "loss scaling, math attention": ("smollm2-135m", "t4", {"precision": "fp16-mixed"}),
    "dropout, accumulation, clipping": ("gpt2", "rtx-4090", {"grad_accum": 2, "clip_grad_norm": 1}),
    "eager attention, a loop over parameters": (
        "bert-base",
        "l4",
        {"attention": "eager", "precision": "bf16-true", "optimizer": "adamw-loop"},
    ),
    "a bias that is learned in efficient attention": ("t5-small", "a100-80gb", {"precision": "bf16-true"}),
    "patches, fp32": ("vit-base", "a100-80gb", {"precision": "fp32", "optimizer": "sgd"}),
    "no states": ("smollm2-135m", "a40", {"precision": "fp32", "optimizer": "sgd-plain"}),
    "partial rotary, selective checkpointing": ("pythia-160m", "a100-80gb", {"checkpointing": "selective"}),
    "full checkpointing, expandable segments": (
        "smollm2-135m",
        "b200",
        {"checkpointing": "full", "allocator": "expandable"},
    ),
    "experts": ("granite-moe", "h100-80gb", {"optimizer": "muon"}),
    "latent attention": ("deepseek", "h100-80gb", {"precision": "bf16-true", "optimizer": "adafactor"}),
    "divided among eight ranks, clipping": ("smollm2-135m", "8xa100-80gb", {"shard": "zero3", "clip_grad_norm": 1}),
    "divided among four, averaged across machines": (
        "gpt2",
        "16x4xh100-80gb",
        {"shard": "hsdp", "precision": "bf16-true", "optimizer": "adamw-fused", "allocator": "expandable"},
    ),
    "whole on each rank, accumulation": ("vit-base", "8xl4", {"shard": "ddp", "grad_accum": 2}),
    "matrices divided among eight, autocast on their parts": (
        "llama",
        "8xa100-80gb",
        {"tp": 8, "shard": "none", "clip_grad_norm": 1},
    ),
    "matrices divided among four, experts, sharded": ("granite-moe", "8xh100-80gb", {"tp": 4, "shard": "zero3"}),
    "a ring of four that share a sequence": (
        "llama",
        "8xh100-80gb",
        {"cp": 4, "shard": "zero3", "precision": "bf16-true"},
    ),
    "stages of a pipeline that divide matrices too": (
        "llama",
        "8xh100-80gb",
        {"pp": 2, "tp": 2, "shard": "zero2", "grad_accum": 3, "precision": "bf16-true"},
    ),
    "adapters": ("smollm2-135m", "a100-80gb", {"method": "lora", "loss": "chunked"}),
}
SMALL: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "vocab_size": 8000, "num_hidden_layers": 4, "num_attention_heads": 16},
    "granite-moe": {"model_type": "mixtral", "num_local_experts": 8, "vocab_size": 8000},
    "deepseek": {
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 256,
        "first_k_dense_replace": 1,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": 192,
        "kv_lora_rank": 128,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "vocab_size": 8000,
    },
}
"""Mixtures of experts whose published sizes are too large for a test, one of them with two layers."""
SHAPE = {
    **{"hidden_size": 512, "intermediate_size": 1024, "max_position_embeddings": 1024},
    **{"num_attention_heads": 8, "num_key_value_heads": 8},
}


def asked(name: str, options: dict[str, Any]) -> tuple[Job, Any]:
    """Return job and plan, with one layer of each stack."""
    job, plan = request(
        "smollm2-135m" if name in SMALL else name, offline=True, seq_len=512, micro_batch=2, **options
    )
    config = {key: 1 if key in DEPTHS and value else value for key, value in job.model.config.items()}
    if name in SMALL:
        config = {**SHAPE, "num_hidden_layers": 2, **SMALL[name]}
    return replace(job, model=replace(job.model, name=name, config=config)), plan


CARDS = ("a100-80gb", "h100-80gb", "l4", "b200", "t4")


def one_layer(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with one layer in each of its stacks, and its lists by layer cut to it."""
    layers = config.get("num_hidden_layers")
    listed = {key: value[:1] for key, value in config.items() if isinstance(value, list) and len(value) == layers}
    cut = {key: 1 for key, value in config.items() if key in (*DEPTHS, "depth") and value}
    parts = {key: one_layer(value) for key, value in config.items() if isinstance(value, dict)}
    return {**config, **listed, **cut, **parts}


def _mark_relatives() -> list[Any]:
    """Return the catalog's names; all but the first of each type of network are marked `long`."""
    names, types = [], set[str]()
    for name in model_names():
        known = find_model(name)
        assert known is not None
        kind = known.config()["model_type"]
        names.append(pytest.param(name, marks=pytest.mark.long) if kind in types else name)
        types.add(kind)
    return names


@pytest.mark.ghost
@pytest.mark.parametrize("name", _mark_relatives())
def test_each_model_of_the_catalog_is_within_two_percent(name: str, worker: Worker) -> None:
    """One layer of each at full width, with a GPU and a precision in turn (all layers: benchmarks/meta.py)."""
    turn = model_names().index(name)
    gpu = CARDS[turn % len(CARDS)]
    precision = "fp16-mixed" if gpu == "t4" else ("bf16-true", "bf16-mixed")[turn % 2]
    known = find_model(name)
    assert known is not None
    seq_len = 1100 if "vision_config" in known.config() else 256  # an image is up to 1,000 tokens
    job, plan = request(name, offline=True, seq_len=seq_len, precision=precision)
    job = replace(job, model=replace(job.model, config=one_layer(job.model.config)))
    cluster = roomy(parse_cluster(gpu))
    real = predict.estimate(Case(job, plan, cluster), steps=2, worker=worker).estimate
    imitated = predict.estimate(Case(job, plan, cluster), steps=2, source="meta").estimate
    assert imitated.peak.allocated_bytes == pytest.approx(real.peak.allocated_bytes, rel=0.02)


@pytest.mark.ghost
@pytest.mark.parametrize("row", ROWS)
def test_peaks_are_those_of_the_ghost(row: str, worker: Worker) -> None:
    name, gpu, options = ROWS[row]
    if "lora" in options.values() and importlib.util.find_spec("peft") is None:
        pytest.skip("peft is not installed")
    job, plan = asked(name, options)
    if plan.tp > 1 and experts_of(job) is not None and not transformers_has_it():
        pytest.skip("this version of transformers does not divide experts")
    cluster = parse_cluster(gpu)
    real = predict.estimate(Case(job, plan, cluster), steps=2, worker=worker).estimate
    imitated = predict.estimate(Case(job, plan, cluster), steps=2, source="meta").estimate
    assert imitated.peak.allocated_bytes == pytest.approx(real.peak.allocated_bytes, rel=0.005)
    assert imitated.peak.reserved_bytes == pytest.approx(real.peak.reserved_bytes, rel=0.1)
    assert imitated.peak.phase == real.peak.phase
    for mine, its in zip(imitated.phases, real.phases, strict=True):
        assert (mine.name, mine.allocated_bytes) == (its.name, pytest.approx(its.allocated_bytes, rel=0.02))
    assert imitated.peak.by_category["runtime"] == real.peak.by_category["runtime"]
    alone = (
        not {"tp", "cp"} & options.keys()
    )  # else several buffers have one address between two marks, and which was sent is open
    for category in ("parameter", "optimizer_state", *(("communication",) if alone else ())):
        mine, its = imitated.peak.by_category[category], real.peak.by_category[category]
        assert mine == pytest.approx(its, rel=0.02), category


@pytest.mark.ghost
def test_running_out_is_told_alike(worker: Worker) -> None:
    job, plan = asked("smollm2-135m", {})
    cluster = parse_cluster("t4", gpu_memory_bytes=700 * 2**20)
    real = predict.estimate(Case(job, plan, cluster), worker=worker).estimate
    imitated = predict.estimate(Case(job, plan, cluster), source="meta").estimate
    assert not real.fits
    assert not imitated.fits
    assert real.oom is not None
    assert imitated.oom is not None
    assert (imitated.oom.phase, imitated.oom.step, imitated.oom.layer) == (
        real.oom.phase,
        real.oom.step,
        real.oom.layer,
    )
    tried = real.oom.message.split("GPU 0")[0]
    assert imitated.oom.message.startswith(tried)  # the same segment of the same size
