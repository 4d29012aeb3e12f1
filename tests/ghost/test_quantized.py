"""Quantized weights and states in fewer bits on the ghost, counted by hand."""

from dataclasses import replace
from importlib.util import find_spec

import pytest

from networks import tiny_job
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.cluster import Cluster
from tonnage.estimates.estimate import Estimate
from tonnage.estimates.predict import estimate
from tonnage.plans import Plan
from tonnage.workers.worker import Worker

CARD, EIGHT = parse_cluster("a100-40gb"), parse_cluster("8xa100-40gb")
LAYERS, WIDTH, INNER, KEYS, WORDS, RANK = 3, 32, 48, 16, 61, 16  # the tiny Llama of tests/networks.py
LINEAR = [(WIDTH, WIDTH)] * 2 + [(WIDTH, KEYS)] * 2 + [(WIDTH, INNER)] * 3
PARAMETERS = 2 * WORDS * WIDTH + LAYERS * (sum(a * b for a, b in LINEAR) + 2 * WIDTH) + WIDTH
bitsandbytes = pytest.mark.skipif(
    not all(map(find_spec, ("bitsandbytes", "accelerate", "peft"))),
    reason="bitsandbytes, accelerate or peft is missing",
)


def block(count_bytes: int) -> int:
    """What the caching allocator hands out for a small request: a multiple of 512 bytes."""
    return -(-count_bytes // 512) * 512


def held(worker: Worker, plan: Plan, method: str = "full", cluster: Cluster = CARD, words: int = WORDS) -> Estimate:
    job = tiny_job(method=method)
    wide = replace(job, model=replace(job.model, config={**job.model.config, "vocab_size": words}))
    return estimate(Case(wide, plan, cluster), worker=worker).estimate


@bitsandbytes
@pytest.mark.parametrize(("quant", "double"), [("nf4", False), ("nf4-double", True)])
def test_what_qlora_holds(worker: Worker, quant: str, double: bool) -> None:
    found = held(worker, Plan(precision="bf16-true", quant=quant), "qlora")
    layer = 2 * block(4 * WIDTH)  # norms, which PEFT casts to fp32
    for rows, columns in LINEAR:
        scales = rows * columns // 64
        layer += block(rows * columns // 2) + block(scales if double else 4 * scales) + block(4 * 16)
        layer += (2 * block(4) + block(4 * 256)) * double  # the scale of the scales, their mean, their table
        layer += block(4 * rows * RANK) + block(4 * columns * RANK)
    rest = 2 * block(4 * WORDS * WIDTH) + block(4 * WIDTH) + 2 * block(4 * WIDTH // 8)  # and rotary frequencies
    assert found.peak.by_category["parameter"] == LAYERS * layer + rest


@bitsandbytes
def test_ranks_divide_packed_weights(worker: Worker) -> None:
    plan = Plan(precision="bf16-true", shard="zero3", unquantized_dtype="compute")
    found = held(worker, plan, "qlora", EIGHT)
    assert found.model["parameters"] == PARAMETERS + found.model["trainable_parameters"]
    whole = held(worker, replace(plan, shard="none"), "qlora")
    assert found.peak.by_category["parameter"] < whole.peak.by_category["parameter"]


@bitsandbytes
def test_packed_weights_rest_on_the_host(worker: Worker) -> None:
    plan = Plan(precision="bf16-true", shard="zero3", unquantized_dtype="compute")
    kept, offloaded = (
        held(worker, replace(plan, param_offload=place), "qlora", cluster=EIGHT) for place in ("none", "cpu")
    )
    assert kept.peak.by_category["optimizer_state"] > offloaded.peak.by_category["optimizer_state"] == 0
    assert kept.peak.by_category["parameter"] > offloaded.peak.by_category["parameter"]
    packed, adapters = LAYERS * sum(a * b for a, b in LINEAR) // 2, kept.model["trainable_parameters"] * 4
    whole_words = PARAMETERS - LAYERS * sum(a * b for a, b in LINEAR)
    assert offloaded.host.pinned_bytes >= (packed + adapters + 2 * whole_words) // 8


@bitsandbytes
@pytest.mark.parametrize("quant", ["int8", "nf4"])
def test_that_no_column_is_kept_in_16_bits_is_said_of_8_bits_alone(worker: Worker, quant: str) -> None:
    found = held(worker, Plan(quant=quant), "qlora")
    assert any("LLM.int8 finds no column" in text for text in found.coverage.assumed) == (quant == "int8")


@bitsandbytes
def test_paged_states_are_managed_memory(worker: Worker) -> None:
    words = 4096  # embedding and head have 131,072 elements each: only from 100,000 on is a state paged
    plain, paged = (held(worker, Plan(optimizer=name), words=words) for name in ("adamw-8bit", "paged-adamw-8bit"))
    assert plain.host is not None
    assert paged.host is not None
    assert (plain.host.managed_bytes, paged.host.managed_bytes) == (0, 2 * 2 * words * WIDTH)
    saved = plain.peak.by_category["optimizer_state"] - paged.peak.by_category["optimizer_state"]
    assert saved == 2 * 2 * words * WIDTH


def test_megatrons_distributed_optimizer(worker: Worker) -> None:
    piece = -(-PARAMETERS // 8)
    found = held(worker, Plan(precision="megatron-bf16", shard="zero1"), cluster=EIGHT)
    assert found.peak.by_category["gradient"] == block(4 * 8 * piece)
    states = found.peak.by_category["optimizer_state"]
    assert 12 * piece <= states < 12 * piece + 3 * 512 * 20  # main weights and two moments, rounded for each tensor
