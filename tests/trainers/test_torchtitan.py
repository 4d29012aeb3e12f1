"""torchtitan's networks with the shapes of Hugging Face configurations: as many parameters, as many bytes."""

import re
from typing import Any

import pytest
import torch

from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.estimates.from_traces import Run
from tonnage.estimates.predict import estimate
from tonnage.job import Job
from tonnage.model import ModelRef
from tonnage.plans import Plan
from tonnage.trainers import engine_of
from tonnage.trainers.packages import find_version
from tonnage.workers.worker import Worker

WIDTH, INNER, EXPERTS = 128, 64, 8
SHAPES = {
    **{"vocab_size": 1024, "hidden_size": WIDTH, "intermediate_size": 256, "max_position_embeddings": 512},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
}
ROUTED = {"moe_intermediate_size": INNER, "num_experts": EXPERTS, "num_experts_per_tok": 2}
LATENT = {
    **{"moe_intermediate_size": INNER, "n_routed_experts": EXPERTS, "num_experts_per_tok": 2},
    **{"first_k_dense_replace": 1, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16},
    **{"v_head_dim": 32, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1},
}
NETWORKS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SHAPES, "head_dim": 64},
    "qwen3": {"model_type": "qwen3", **SHAPES, "head_dim": 64},
    "qwen3, tied": {"model_type": "qwen3", **SHAPES, "tie_word_embeddings": True},
    "qwen3_moe": {"model_type": "qwen3_moe", **SHAPES, **ROUTED},
    "deepseek_v2": {"model_type": "deepseek_v2", **SHAPES, **LATENT, "q_lora_rank": None},
    "deepseek_v3": {"model_type": "deepseek_v3", **SHAPES, **LATENT, "q_lora_rank": 32},
    "gpt_oss": {
        **{"model_type": "gpt_oss", **SHAPES, "head_dim": 64, "sliding_window": 64},
        **{"num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    },
}
"""Of each kind one; values of the latent attention are as wide as keys, which varlen attention wants."""

WORKSPACE_BYTES = 2 * 4096 * 1024 + 8 * 16 * 1024
"""What torch gives cuBLAS by default (CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8)."""


def job(name: str, **changed: Any) -> Job:
    return Job(model=ModelRef(name=name, kind="config", config=NETWORKS[name] | changed), seq_len=128, micro_batch=2)


def run(worker: Worker, asked: Job, gpus: str = "8xa100-40gb", **plan: Any) -> Run:
    """An estimate of rank 3, or of the only one."""
    if find_version("torchtitan") is None:
        pytest.skip("torchtitan is not installed")
    chosen = Plan(engine="torchtitan", **{"attention": "flash", "shard": "zero3", **plan})
    cluster = parse_cluster(gpus)
    return estimate(Case(asked, chosen, cluster), worker=worker, rank=min(3, cluster.gpus - 1))


def parameters(config: dict[str, Any]) -> int:
    """Of transformers' network, without memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return sum(weight.numel() for weight in network.parameters())


@pytest.mark.ghost
@pytest.mark.parametrize("name", NETWORKS)
def test_its_network_has_as_many_parameters_as_transformers(worker: Worker, name: str) -> None:
    """On 8 GPUs a rank holds an 8th of them in fp32, and of each of two moments; small ones are rounded up."""
    found = run(worker, job(name)).estimate
    count = parameters(NETWORKS[name])
    assert found.model["parameters"] == count
    assert found.peak.by_category["optimizer_state"] == pytest.approx(8 * count / 8, rel=0.05)


@pytest.mark.ghost
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_bytes_of_weights_gradients_and_moments_on_one_gpu(worker: Worker, name: str) -> None:
    """4P, 4P and 8P while the optimizer steps, beside cuBLAS's workspace, tokens and tensors of 512 bytes."""
    found = run(worker, job(name), "a100-40gb", shard="none").estimate
    held = next(phase.allocated_bytes for phase in found.phases if phase.name == "optimizer")
    assert held == pytest.approx(16 * parameters(NETWORKS[name]) + WORKSPACE_BYTES, rel=0.01)


@pytest.mark.ghost
@pytest.mark.parametrize("degrees", [{"tp": 2}, {"ep": 2}, {"tp": 2, "ep": 4}], ids=str)
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_whoever_shares_matrices_or_experts_holds_an_eighth(
    worker: Worker, name: str, degrees: dict[str, int]
) -> None:
    found = run(worker, job(name), **degrees).estimate
    assert found.peak.by_category["optimizer_state"] == pytest.approx(8 * parameters(NETWORKS[name]) / 8, rel=0.08)


@pytest.mark.ghost
def test_experts_of_other_ranks_are_not_gathered(worker: Worker) -> None:
    """With ep 8 no rank gathers any: of wide experts a layer's bf16 weights less, 2 x 3 x 8 x 128 x 2,048 bytes."""
    wide = job("qwen3_moe", moe_intermediate_size=2048)
    layer_bytes = 2 * 3 * EXPERTS * WIDTH * 2048
    alone, shared = (run(worker, wide, ep=ep, checkpointing="full").estimate for ep in (1, 8))
    assert alone.peak.allocated_bytes - shared.peak.allocated_bytes > layer_bytes
    assert any("balanced share" in text for text in shared.coverage.assumed)


def refused(asked: Job, gpus: str = "8xa100-40gb", **plan: Any) -> str:
    chosen = Plan(engine="torchtitan", **{"shard": "zero3", **plan})
    refusal = engine_of(chosen).accepts(Case(asked, chosen, parse_cluster(gpus)))
    return "" if refusal is None else str(refusal)


@pytest.mark.parametrize(
    ("asked", "plan", "said"),
    [
        (job("qwen3", model_type="gemma2"), {}, "of gemma2 there is none here; choose a model of type llama, qwen3,"),
        (job("llama", mlp_bias=True), {}, "its llama3 has no mlp_bias True"),
        (job("qwen3", use_sliding_window=True), {}, "its qwen3 has no use_sliding_window True"),
        (job("qwen3_moe", mlp_only_layers=[0]), {}, r"its qwen3 has no mlp_only_layers \[0\]"),
        (job("deepseek_v2", n_shared_experts=None), {}, "experts that all tokens share, and the configuration none"),
        (job("qwen3", max_position_embeddings=64), {}, "seq-len=128: torchtitan stops at the 64 positions"),
        (job("deepseek_v3", v_head_dim=16), {"attention": "flash"}, "keys have 32 elements a head, values 16"),
        (job("qwen3"), {"ep": 2}, "qwen3 has no experts"),
        (job("qwen3_moe"), {"ep": 16}, "8 experts, which 16 does not divide"),
        (job("qwen3_moe"), {"ep": 2, "shard": "ddp"}, "experts are divided under FSDP2"),
        (job("qwen3_moe"), {"ep": 2, "compile": "layers"}, "is read within a compiled block, and ep is 2"),
        (job("qwen3"), {"tp": 2, "compile": "layers"}, "it fails on a block of torchtitan 0.3 that tp divides"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_its_networks_are_not(asked: Job, plan: dict[str, Any], said: str) -> None:
    assert re.search(said, refused(asked, **plan)), refused(asked, **plan)


@pytest.mark.parametrize("name", NETWORKS)
def test_what_its_networks_are(name: str) -> None:
    assert refused(job(name)) == ""
