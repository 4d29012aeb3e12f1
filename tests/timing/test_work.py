"""The work of a rank, by the plan and by the trainer that carries it out."""

from typing import Any

import pytest

from networks import tiny_job
from timed_steps import EAGER, EIGHT, LLAMA, ONE, llama_job
from tonnage.catalog.devices import parse_cluster
from tonnage.mesh import Mesh
from tonnage.plans import Plan
from tonnage.timing.timing import time_step
from tonnage.timing.weights import trained_weights
from tonnage.timing.work import Work


def work(gpu: str = "8xh100-80gb", **plan: Any) -> Work:
    return Work.of(tiny_job(), Plan(**plan), parse_cluster(gpu))


@pytest.mark.parametrize(
    ("engine", "clips"),
    [
        *(("tonnage", False), ("accelerate", False), ("deepspeed", False)),
        *(("hf-trainer", True), ("trl", True), ("axolotl", True), ("torchtitan", True), ("megatron", True)),
    ],
)
def test_trainers_that_clip_by_default_take_the_norm_of_all_gradients(engine: str, clips: bool) -> None:
    assert work(engine=engine).clipped == clips
    assert work(engine=engine, clip_grad_norm=1.0).clipped


def test_deepspeed_stores_weights_and_gradients_as_it_computes_with_them() -> None:
    own, zero = work(shard="zero3"), work(shard="zero3", engine="deepspeed")
    assert (own.weight_bytes, own.gradient_bytes, own.main_weights) == (4, 4, False)
    assert (zero.weight_bytes, zero.gradient_bytes, zero.main_weights) == (2, 2, True)


def test_accelerate_reduces_gradients_in_the_dtype_of_computation() -> None:
    assert work(shard="zero3").reduced_bytes == 4
    assert work(shard="zero3", engine="accelerate").reduced_bytes == 2


def test_work_of_a_job_under_a_plan():
    plan = Plan(precision="bf16-mixed", shard="zero3", tp=2, pp=2, checkpointing="every-4")
    work = Work.of(llama_job(seq_len=2048, grad_accum=4), plan, EIGHT)
    assert work.axes == Mesh(pp=2, dp_shard=2, tp=2)
    assert (work.weight_bytes, work.dtype, work.autocast) == (4, "bf16", False)
    assert (work.checkpointing, work.checkpointed_fraction) == ("full", 0.25)
    assert work.step_tokens == 2048 * 4 * 2
    assert Work.of(llama_job(), Plan(), ONE).autocast


def test_adapters_beside_two_products_are_fewer_and_faster():
    """32 layers have 8 x (4,096 + 4,096) weights beside the queries, 8 x (4,096 + 1,024) beside the values."""
    all_linear, two = (
        Work.of(llama_job(method="lora", lora_rank=8, lora_targets=targets), Plan(precision="bf16-true"), ONE)
        for targets in (("all-linear",), ("q_proj", "v_proj"))
    )
    assert trained_weights(LLAMA, two, 8e9) == 32 * 8 * (8192 + 5120)
    assert (
        time_step(LLAMA, two, ONE, EAGER).step_seconds < 0.92 * time_step(LLAMA, all_linear, ONE, EAGER).step_seconds
    )


@pytest.mark.parametrize(
    ("plan", "wide"),
    [
        (Plan(precision="bf16-true"), False),
        (Plan(precision="fp16-true"), True),
        (Plan(precision="bf16-true", weights_dtype="fp32"), True),
        (Plan(precision="bf16-true", engine="hf-trainer"), True),
        (Plan(precision="bf16-true", engine="hf-trainer", weights_dtype="bf16"), False),
        (Plan(precision="bf16-mixed", engine="hf-trainer"), False),
        (Plan(precision="fp32"), False),
    ],
)
def test_adapters_are_wide_beside_16_bits_without_autocast(plan, wide):
    assert Work.of(llama_job(method="lora"), plan, ONE).wide_adapters == wide
    assert not Work.of(llama_job(), plan, ONE).wide_adapters


@pytest.mark.parametrize(
    ("plan", "wide"),
    [
        (Plan(precision="bf16-true"), True),
        (Plan(precision="bf16-true", unquantized_dtype="compute"), False),
        (Plan(precision="bf16-mixed"), False),
    ],
)
def test_unquantized_weights_are_fp32_without_autocast(plan, wide):
    assert Work.of(llama_job(method="qlora"), plan, ONE).wide_between == wide
    assert not Work.of(llama_job(method="lora"), plan, ONE).wide_between


def test_trainers_fuse_their_optimizer_and_scale_gradients_down():
    by_trainer, own = (Work.of(llama_job(), Plan(engine=engine), ONE) for engine in ("hf-trainer", "tonnage"))
    assert (by_trainer.optimizer, by_trainer.clipped) == ("adamw-fused", True)
    assert (own.optimizer, own.clipped) == ("adamw", False)
    assert (
        Work.of(llama_job(), Plan(engine="hf-trainer", optimizer="adamw-foreach"), ONE).optimizer == "adamw-foreach"
    )


def test_megatrons_own_layers_keep_all_scores():
    assert Work.of(llama_job(), Plan(engine="megatron"), ONE).attention == "eager"
