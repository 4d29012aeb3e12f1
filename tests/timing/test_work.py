"""What a rank has to do, by a plan and by the trainer that carries it out."""

from __future__ import annotations

from typing import Any

import pytest

from networks import tiny_job
from tonnage.catalog.devices import parse_cluster
from tonnage.plans import Plan
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
def test_trainers_take_the_norm_of_all_gradients_unasked(engine: str, clips: bool) -> None:
    assert work(engine=engine).clipped == clips
    assert work(engine=engine, clip_grad_norm=1.0).clipped


def test_deepspeed_stores_weights_and_gradients_as_it_computes_with_them() -> None:
    own, zero = work(shard="zero3"), work(shard="zero3", engine="deepspeed")
    assert (own.weight_bytes, own.gradient_bytes, own.main_weights) == (4, 4, False)
    assert (zero.weight_bytes, zero.gradient_bytes, zero.main_weights) == (2, 2, True)


def test_accelerate_reduces_gradients_in_the_dtype_of_computation() -> None:
    assert work(shard="zero3").reduced_bytes == 4
    assert work(shard="zero3", engine="accelerate").reduced_bytes == 2
