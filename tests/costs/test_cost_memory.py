"""Memory of layouts in closed form, by hand."""

from dataclasses import replace

import pytest

from tonnage.axes import Axes
from tonnage.costs.memory import SAVED_AGAIN, kept_bytes, likely_bytes, logit_bytes, offloaded_bytes, state_bytes
from tonnage.costs.shape import Shape
from tonnage.costs.work import Work

SMALL = Shape(
    layers=16, hidden=2048, heads=32, kv_heads=32, head_dim=64, value_dim=64, intermediate=8192, gated=True,
    vocab=131072, tied=True,
)  # fmt: skip
WORK = Work(seq_len=4096, weight_bytes=2, gradient_bytes=4, autocast=False, optimizer="adamw-fused")


def test_states_by_hand():
    weights = 16 * SMALL.dense_layer_parameters + SMALL.embedding_parameters
    # bf16 weights 2, fp32 gradients 4, fp32 main weights 4, two states of 4
    assert state_bytes(SMALL, WORK, 16, 1, main_weights=True) == 18 * weights
    divided = replace(WORK, axes=Axes(dp_replicate=8), shard="zero1")
    assert state_bytes(SMALL, divided, 16, 1, main_weights=True) == pytest.approx((6 + 12 / 8) * weights)
    assert state_bytes(SMALL, replace(WORK, axes=Axes(tp=4)), 16, 1, main_weights=True) == 18 * weights / 4


def test_a_recomputed_layer_keeps_its_input():
    assert kept_bytes(SMALL, replace(WORK, checkpointing="full")) == 4096 * 2048 * 2


def test_a_layer_keeps_29_values_of_its_width():
    # inputs of two norms and of the products behind them 4, queries keys and values 9, inner values 4 x 4
    assert kept_bytes(SMALL, WORK) == 4096 * 2048 * 2 * 29


def test_the_first_stage_of_a_pipeline_holds_as_many_micro_batches_as_there_are_stages():
    piped = replace(WORK, axes=Axes(pp=4), grad_accum=16)
    assert logit_bytes(SMALL, piped) == 4096 * 131072 * 10
    first = state_bytes(SMALL, piped, 4, 1) + 4 * 4 * kept_bytes(SMALL, piped)
    assert likely_bytes(SMALL, piped) == first


def test_what_waits_on_the_host_is_all_that_a_layer_saves():
    copied = replace(WORK, activation_offload=True)
    weights = SMALL.dense_layer_parameters * 2
    assert offloaded_bytes(SMALL, copied) == SAVED_AGAIN * kept_bytes(SMALL, WORK) + weights
    assert offloaded_bytes(SMALL, replace(copied, copies_beside=True)) == kept_bytes(SMALL, WORK)
    assert offloaded_bytes(SMALL, replace(copied, quantized=True)) == SAVED_AGAIN * kept_bytes(SMALL, WORK)


def test_a_layer_that_runs_again_gives_away_its_input():
    for way in ("full", "selective"):
        assert offloaded_bytes(SMALL, replace(WORK, activation_offload=True, checkpointing=way)) == 4096 * 2048 * 2
    every_other = replace(WORK, activation_offload=True, checkpointing="full", checkpointed_fraction=1 / 2)
    plain = offloaded_bytes(SMALL, replace(WORK, activation_offload=True))
    assert offloaded_bytes(SMALL, every_other) == (plain + 4096 * 2048 * 2) / 2
