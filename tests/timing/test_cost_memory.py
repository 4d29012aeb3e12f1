"""Memory of layouts in closed form, by hand."""

from dataclasses import replace

import pytest
import torch

from networks import tiny_job
from tonnage.catalog.devices import parse_cluster
from tonnage.mesh import Mesh
from tonnage.plans import Plan
from tonnage.techniques import build
from tonnage.timing.kinds import read_shape
from tonnage.timing.memory import (
    SAVED_AGAIN,
    estimate_bytes,
    kept_bytes,
    logit_bytes,
    offloaded_bytes,
    state_bytes,
    used_bytes,
)
from tonnage.timing.shape import Shape
from tonnage.timing.work import Work

SMALL = Shape(
    layers=16, hidden=2048, heads=32, kv_heads=32, head_dim=64, value_dim=64, intermediate=8192, gated=True,
    vocab=131072, tied=True,
)  # fmt: skip
WORK = Work(seq_len=4096, weight_bytes=2, gradient_bytes=4, autocast=False, optimizer="adamw-fused")


def test_states_by_hand():
    weights = 16 * SMALL.dense_layer_parameters + SMALL.embedding_parameters
    # bf16 weights 2, fp32 gradients 4, fp32 main weights 4, two states of 4
    assert state_bytes(SMALL, WORK, 16, 1, main_weights=True) == 18 * weights
    divided = replace(WORK, axes=Mesh(dp_replicate=8), shard="zero1")
    assert state_bytes(SMALL, divided, 16, 1, main_weights=True) == pytest.approx((6 + 12 / 8) * weights)
    assert state_bytes(SMALL, replace(WORK, axes=Mesh(tp=4)), 16, 1, main_weights=True) == 18 * weights / 4


def test_a_recomputed_layer_keeps_its_input():
    assert kept_bytes(SMALL, replace(WORK, checkpointing="full")) == 4096 * 2048 * 2


def test_a_layer_keeps_29_values_of_its_width():
    # inputs of two norms and of the products behind them 4, queries keys and values 9, inner values 4 x 4
    assert kept_bytes(SMALL, WORK) == 4096 * 2048 * 2 * 29


def test_a_layer_of_experts_keeps_each_tokens_copies():
    eight = replace(SMALL, experts=64, experts_per_token=8, expert_intermediate=768)
    # 4 x 8 x 768 inner values, and 8 copies of each token twice: as they go in and as they come out
    assert kept_bytes(eight, WORK) == 4096 * 2 * (13 * 2048 + 4 * 8 * 768 + 2 * 8 * 2048)


def test_the_first_stage_of_a_pipeline_holds_as_many_micro_batches_as_there_are_stages():
    piped = replace(WORK, axes=Mesh(pp=4), grad_accum=16)
    assert logit_bytes(SMALL, piped) == 4096 * 131072 * 10
    first = state_bytes(SMALL, piped, 4, 1) + 4 * 4 * kept_bytes(SMALL, piped)
    assert estimate_bytes(SMALL, piped) == first


def test_everything_that_a_layer_saves_waits_on_the_host():
    copied = replace(WORK, activation_offload=True)
    weights = SMALL.dense_layer_parameters * 2
    assert offloaded_bytes(SMALL, copied) == SAVED_AGAIN * kept_bytes(SMALL, WORK) + weights
    assert offloaded_bytes(SMALL, replace(copied, copies_beside=True)) == kept_bytes(SMALL, WORK)
    assert offloaded_bytes(SMALL, replace(copied, quantized=True)) == SAVED_AGAIN * kept_bytes(SMALL, WORK)
    cast = replace(copied, copies_beside=True, autocast=True)
    assert offloaded_bytes(SMALL, cast) == kept_bytes(SMALL, replace(WORK, autocast=True)) + weights
    adapted = replace(cast, lora_rank=8)
    assert offloaded_bytes(SMALL, adapted) == kept_bytes(SMALL, replace(WORK, autocast=True))


def test_eager_attention_keeps_its_scores():
    """For each head and pair of tokens 4 bytes of softmax and 2 of probabilities, and 2 where scores are capped."""
    streamed = replace(WORK, activation_offload=True, copies_beside=True)
    plain = offloaded_bytes(SMALL, streamed)
    pairs = streamed.tokens * streamed.seq_len * SMALL.heads
    assert offloaded_bytes(SMALL, replace(streamed, attention="eager")) == plain + 6 * pairs
    assert offloaded_bytes(replace(SMALL, keeps_scores=True), streamed) == plain + 8 * pairs


WIDE = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64, "max_position_embeddings": 512}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
WIDE_GPT2 = {"n_embd": 256, "n_inner": 1024, "n_head": 4, "n_positions": 512}


@pytest.mark.parametrize(("name", "sizes"), [("llama", WIDE | HEADS), ("qwen3", WIDE | HEADS), ("gpt2", WIDE_GPT2)])
def test_operations_save_each_kept_byte_about_so_often(name, sizes):
    """Steps on the CPU, with two layers and with one: everything that torch's hooks see saved, but weights."""
    plan, saved = Plan(precision="bf16-true"), []
    for layers in (1, 2):
        job = tiny_job(name, seq_len=512, micro_batch=1)
        config = {**job.model.config, **sizes, "num_hidden_layers" if "head_dim" in sizes else "n_layer": layers}
        config.pop("layer_types", None)
        job = replace(job, model=replace(job.model, config=config))
        saved.append(saved_bytes(build(job, plan, device="cpu")))
    used = used_bytes(read_shape(config), Work.of(job, plan, parse_cluster("a100-80gb")))
    assert saved[1] - saved[0] == pytest.approx(SAVED_AGAIN * used, rel=0.25)


def test_scores_are_saved_as_counted():
    """A step on the CPU as above: eager attention saves more in each layer than a kernel that keeps no scores."""
    saved = {}
    for attention in ("eager", "auto"):
        for layers in (1, 2):
            job = tiny_job("llama", seq_len=512, micro_batch=1)
            config = {**job.model.config, **WIDE, **HEADS, "num_hidden_layers": layers}
            job = replace(job, model=replace(job.model, config=config))
            plan = Plan(precision="bf16-true", attention=attention)
            saved[attention, layers] = saved_bytes(build(job, plan, device="cpu"))
    more = saved["eager", 2] - saved["eager", 1] - (saved["auto", 2] - saved["auto", 1])
    streamed = replace(WORK, seq_len=512, activation_offload=True, copies_beside=True, attention="eager")
    scores = offloaded_bytes(read_shape(config), streamed) - used_bytes(read_shape(config), streamed)
    assert more == pytest.approx(scores, rel=0.1)


def saved_bytes(ready):
    """Return the bytes that a micro-batch's operations save, each as often as it is saved."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in ready.model.parameters()}
    found = []

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            found.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ready.micro_batch(ready.next_batch())
    return sum(found)


def test_a_layer_that_runs_again_gives_away_its_input():
    for way in ("full", "selective"):
        assert offloaded_bytes(SMALL, replace(WORK, activation_offload=True, checkpointing=way)) == 4096 * 2048 * 2
    every_other = replace(WORK, activation_offload=True, checkpointing="full", checkpointed_fraction=1 / 2)
    plain = offloaded_bytes(SMALL, replace(WORK, activation_offload=True))
    assert offloaded_bytes(SMALL, every_other) == (plain + 4096 * 2048 * 2) / 2
