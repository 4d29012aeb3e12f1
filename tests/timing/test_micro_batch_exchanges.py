"""Exchanges inside a micro-batch: tensor parallelism, and tokens handed to experts."""

from dataclasses import replace

import pytest

from timed_steps import EAGER, EIGHT, LLAMA, MANY, MIXTRAL, PLAIN
from tonnage.catalog.devices import find_device
from tonnage.cluster import Cluster
from tonnage.mesh import Mesh
from tonnage.timing.software import software
from tonnage.timing.timing import time_step


def test_tensor_parallelism_across_machines_is_slower_than_within():
    within = replace(PLAIN, axes=Mesh(tp=8, dp_replicate=8), shard="ddp", micro_batch=4)
    across = replace(PLAIN, axes=Mesh(tp=16, dp_replicate=4), shard="ddp", micro_batch=8)
    near, far = (time_step(LLAMA, work, MANY, EAGER) for work in (within, across))
    assert far.communication_seconds > 1.3 * near.communication_seconds


def test_cards_without_their_optional_bridge_exchange_over_the_host():
    work = replace(PLAIN, dtype="fp16", axes=Mesh(dp_replicate=2), shard="ddp")
    card = find_device("rtx-3090")
    apart = time_step(LLAMA, work, Cluster(device=card, gpus_per_node=2), EAGER)
    bridged = time_step(LLAMA, work, Cluster(device=replace(card, nvlink_bridged=False), gpus_per_node=2), EAGER)
    assert apart.communication_seconds > 3 * bridged.communication_seconds
    assert any("no NVLink bridges" in line for line in apart.assumed)
    assert not any("bridges" in line for line in bridged.assumed)


def test_latencies_between_machines_add_to_the_work_and_not_to_the_waiting_host():
    near = replace(software("megatron"), far_hop_seconds=0.0, kernel_seconds=0.0)
    far = replace(near, far_hop_seconds=1e-4)
    work = replace(PLAIN, axes=Mesh(tp=16, dp_replicate=4), sequence_parallel=True, shard="ddp")
    slow, fast = (time_step(LLAMA, work, MANY, code).step_seconds for code in (far, near))
    rings = 10 * LLAMA.layers + 2 + 3 + 6  # of the layers, the embedding, the head, the loss
    assert slow - fast == pytest.approx(rings * 15 * 1e-4)


def test_beside_a_pipeline_the_host_waits_in_a_collective_for_each_of_its_ranks():
    """10 collectives a layer, of 16 layers on the first of two stages; two more of the embedding."""
    code = replace(software("nanotron"), balanced=False, kernel_seconds=0.0, handing_seconds=0.0)
    far_too = {"piped_far_rank_seconds": 2e-2}
    slow, fast = (replace(code, piped_rank_seconds=each, **far_too) for each in (2e-2, 1e-2))

    def waits(tp):
        work = replace(PLAIN, axes=Mesh(pp=2, dp_replicate=32 // tp, tp=tp), sequence_parallel=True, shard="none")
        return time_step(LLAMA, work, MANY, slow).step_seconds - time_step(LLAMA, work, MANY, fast).step_seconds

    ends = 2 + 3 + 6
    assert waits(8) == pytest.approx(8 * 1e-2 * (10 * LLAMA.layers + ends))
    assert waits(4) == pytest.approx(waits(8) / 2)
    assert waits(16) == 0


def test_a_token_goes_to_another_machine_once_or_once_for_each_of_its_experts_there():
    work = replace(PLAIN, axes=Mesh(dp_replicate=64, ep=64), shard="zero1", experts_once=True)
    code = replace(software("megatron"), far_part=1.0, expert_overlap=1.0)
    two, one = (handing(shape, work, code) for shape in (MIXTRAL, replace(MIXTRAL, experts_per_token=1)))
    tokens, n = 4096 * 4096 * 2, 8  # bytes, machines
    assert one == pytest.approx(4 * 32 * tokens * (n - 1) / n / (0.9 * 50e9))
    assert two == pytest.approx(4 * 32 * tokens * (n - 1) * (1 - (1 - 1 / n) ** 2) / (0.9 * 50e9))
    assert handing(MIXTRAL, replace(work, experts_once=False), code) == pytest.approx(2 * one)
    assert handing(MIXTRAL, replace(work, checkpointing="full"), code) == pytest.approx(6 / 4 * two)
    half = replace(code, expert_overlap=0.5)  # hides half of what it computes, and half of the exchange at most
    assert handing(MIXTRAL, work, half) == pytest.approx(two / 2)


def handing(shape, work, code):
    """Return the seconds of a step's exchanges with experts that overlapping hides."""
    overlapped = replace(work, experts_overlapped=True)
    return time_step(shape, work, MANY, code).step_seconds - time_step(shape, overlapped, MANY, code).step_seconds


def test_tensor_parallelism_that_nothing_hides_takes_longer():
    work = replace(PLAIN, micro_batch=4, axes=Mesh(tp=8))
    beside, alone = (
        time_step(LLAMA, replace(work, tensor_beside=overlapped), EIGHT, software("megatron"))
        for overlapped in (True, False)
    )
    assert alone.communication_seconds > 1.5 * beside.communication_seconds
