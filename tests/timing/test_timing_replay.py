"""Replay of a recorded step, on cases that can be computed by hand."""

import struct
from array import array
from dataclasses import replace

import pytest

from tonnage.catalog.devices import find_device
from tonnage.cluster import Cluster
from tonnage.errors import CannotEstimate
from tonnage.timing import rates
from tonnage.timing.collectives import Group
from tonnage.timing.data_parallel import GATHERED_TENSOR_SECONDS
from tonnage.timing.fabrics import data_fabric
from tonnage.timing.replay import Pace, replay_step
from tonnage.timing.software import software_of
from tonnage.trace.operations import Operation, StepOperations

H200 = find_device("h200")
ONE = Cluster(device=H200)
EIGHT = Cluster(device=H200, gpus_per_node=8)
CODE = software_of("tonnage")
CARD = rates.card(H200)
PACE = replace(
    Pace.usual(),
    kernel_seconds=1e-6,
    updating_kernel_seconds=1e-6,
    product=1.0,
    attention=1.0,
    passing=1.0,
    updating=1.0,
)
KERNEL, TO_CARD, COLLECTIVE, EVENT, WAIT, SYNCHRONISE = 1, 2, 12, 14, 15, 16
NAMES = ("", "AllGather", "Send")


def record(kind, stream=0, *, name=0, ranks=0, moved=0, address=0, mark=0, flags=0):
    return struct.pack("<BBHIIIIIIIQQQQ", kind, 0, flags, mark, name, ranks, 0, 0, 0, 0, stream, moved, address, 0)


def step(records, operations=(), places=(), phases=None, passed_on=None):
    """Return records with operations at places (number, first record, the one behind)."""
    numbers = array("q", [number for place in places for number in place])
    return StepOperations(
        operations=tuple(operations),
        numbers=numbers,
        phases=phases or {0: "forward"},
        passed_on=passed_on or {},
        names=NAMES,
        log=b"".join(records),
    )


def moving(moved, phase="forward", kernels=1):
    return Operation(phase, "mul", "pass", "bfloat16", 0, moved, kernels, True, False, 0, 2)


def multiplying(flops, moved=0, phase="forward"):
    return Operation(phase, "mm", "product", "bfloat16", flops, moved, 1, True, False, 0, 2)


def passing_seconds(moved, kernels=1):
    return moved / (H200.bandwidth_bytes_per_second * CARD.memory) + kernels * CARD.pass_seconds


def seconds(worked, cluster=ONE, pace=PACE):
    return replay_step(worked, cluster, CODE, pace).step_seconds


def test_passes_one_after_the_other_take_their_bytes():
    worked = step([record(KERNEL)] * 3, [moving(10**9)], [(0, place, place + 1) for place in range(3)])
    assert seconds(worked) == pytest.approx(3 * passing_seconds(10**9))


def test_an_operation_of_several_kernels_takes_its_bytes_once():
    worked = step([record(KERNEL)] * 3, [moving(10**9, kernels=3)], [(0, 0, 3)])
    assert seconds(worked) == pytest.approx(passing_seconds(10**9, 3))


def test_a_product_takes_its_operations_and_fills_the_card():
    flops = 10**13
    worked = step([record(13)], [multiplying(flops)], [(0, 0, 1)])
    peak = H200.peak_flops.bf16 * CARD.matmul
    played = replay_step(worked, ONE, CODE, PACE)
    assert played.step_seconds == pytest.approx(flops / peak + CARD.fill_seconds)
    assert played.mfu == pytest.approx(flops / played.step_seconds / H200.peak_flops.bf16)
    assert played.bound_by == "compute"
    assert played.low_seconds < played.step_seconds < played.high_seconds


def test_recomputation_does_not_count_as_model_flops():
    operations = [multiplying(10**13), multiplying(10**13, phase="recompute")]
    worked = step([record(13)] * 2, operations, [(0, 0, 1), (1, 1, 2)])
    played = replay_step(worked, ONE, CODE, PACE)
    assert played.mfu == pytest.approx(10**13 / played.step_seconds / H200.peak_flops.bf16)


def test_the_card_waits_for_a_host_that_launches_more_slowly():
    worked = step([record(KERNEL)] * 50, [moving(1)], [(0, place, place + 1) for place in range(50)])
    played = replay_step(worked, ONE, CODE, replace(PACE, kernel_seconds=1e-3))
    assert played.step_seconds == pytest.approx(50 * 1e-3)
    assert played.bound_by == "host"
    assert any("waits for the host" in one for one in played.assumed)


def test_an_optimizers_kernels_are_launched_at_their_own_pace():
    worked = step(
        [record(KERNEL, mark=0)] * 10, [moving(1, "optimizer")], [(0, place, place + 1) for place in range(10)]
    )
    optimizer = replace(worked, phases={0: "optimizer"})
    pace = replace(PACE, kernel_seconds=1e-3, updating_kernel_seconds=1e-4)
    assert seconds(worked, pace=pace) == pytest.approx(10 * 1e-3)
    assert seconds(optimizer, pace=pace) == pytest.approx(10 * 1e-4)


def test_parts_that_run_again_take_the_host_longer():
    worked = step([record(KERNEL, mark=mark) for mark in (0, 1, 1, 0, 1)], phases={0: "backward", 1: "recompute"})
    pace = replace(PACE, kernel_seconds=1e-3, again_seconds=0.1)
    assert seconds(worked, pace=pace) == pytest.approx(5 * 1e-3 + 2 * 0.1)


def test_gathered_and_passed_on_tensors_take_the_host_time():
    gather = Operation("forward", "all_gather_copy_in", "pass", "bfloat16", 0, 1, 1, True, False, 0, 9)
    pace = replace(PACE, kernel_seconds=1e-3, updating_kernel_seconds=1e-3, passed_on_seconds=1e-4)
    phases = {0: "forward", 1: "optimizer"}
    records = [record(KERNEL), record(KERNEL, mark=1), record(KERNEL, mark=1)]
    plain = step(records, phases=phases)
    assert seconds(plain, pace=pace) == pytest.approx(3e-3)
    gathered = step(records, [gather], [(0, 0, 1)], phases)
    assert seconds(gathered, pace=pace) == pytest.approx(3e-3 + 9 * GATHERED_TENSOR_SECONDS)
    passed_on = step(records, phases=phases, passed_on={"optimizer": 40, "backward": 7})
    assert seconds(passed_on, pace=pace) == pytest.approx(3e-3 + 40 * 1e-4)


def test_kernels_launched_past_torch_are_reported():
    seen_alone = step([record(KERNEL)] * 4, [moving(1, kernels=4)], [(0, 0, 4)])
    assert not any("launched past" in one for one in replay_step(seen_alone, ONE, CODE, PACE).assumed)
    half = step([record(KERNEL)] * 4, [moving(1, kernels=2)], [(0, 0, 2)])
    assert any(
        "2 of 4 kernels and copies were launched past" in one for one in replay_step(half, ONE, CODE, PACE).assumed
    )
    two = Cluster(device=H200, gpus_per_node=8, nodes=2)
    assert any("fill a machine before the next" in one for one in replay_step(half, two, CODE, PACE).assumed)


def gathering(waits):
    """Return a gather of 7 GB on a stream of its own, and a pass of 200 GB that waits for it, or does not.

    The gather itself waits for what was computed before, as that of updated weights does.
    """
    gather = [record(EVENT, 0, address=98), record(WAIT, 7, address=98)]
    gather += [record(COLLECTIVE, 7, name=1, ranks=8, moved=875_000_000)]
    waiting = [record(EVENT, 7, address=99), record(WAIT, 0, address=99)]
    records = [*gather, *waiting, record(KERNEL)] if waits else [*gather, record(KERNEL), *waiting]
    at = records.index(record(KERNEL))
    return step(records, [moving(200 * 10**9)], [(0, at, at + 1)])


def test_an_exchange_on_another_stream_hides_behind_independent_work():
    pass_seconds = passing_seconds(200 * 10**9)
    hidden, waited = gathering(False), gathering(True)
    alone = step([record(COLLECTIVE, 7, name=1, ranks=8, moved=875_000_000)])
    gather = seconds(alone, EIGHT)
    assert 0.005 < gather < pass_seconds
    slowed = data_fabric(EIGHT, CARD, CODE).slowing(Group(8, 8), 7 * 10**9)
    assert 0 < slowed < gather
    assert seconds(hidden, EIGHT) == pytest.approx(pass_seconds + slowed, rel=1e-3)
    assert seconds(waited, EIGHT) == pytest.approx(gather + pass_seconds, rel=1e-3)
    assert replay_step(alone, EIGHT, CODE, PACE).bound_by == "communication"


def test_the_host_waits_where_it_synchronises():
    """Each step: a pass of 10 ms, a wait for it, and 50 launches of 1 ms of the host that take the card nothing."""
    operations = [moving(int(0.01 * H200.bandwidth_bytes_per_second * CARD.memory)), moving(1)]
    launches = [record(KERNEL)] * 50
    places = [(0, 0, 1), *((1, 2 + place, 3 + place) for place in range(50))]
    pace = replace(PACE, kernel_seconds=1e-3)
    synchronising = step([record(KERNEL), record(SYNCHRONISE), *launches], operations, places)
    assert seconds(synchronising, pace=pace) == pytest.approx(0.01 + 0.051, rel=0.01)
    places = [(0, 0, 1), *((1, 1 + place, 2 + place) for place in range(50))]
    assert seconds(step([record(KERNEL), *launches], operations, places), pace=pace) == pytest.approx(0.051, rel=0.01)


def test_copies_cross_the_link():
    worked = step([record(TO_CARD, moved=10**9)])
    assert seconds(worked) == pytest.approx(10**9 / H200.pcie_bytes_per_second, rel=0.01)


def test_sends_between_ranks_are_refused():
    worked = step([record(COLLECTIVE, name=2, ranks=2, moved=10)])
    with pytest.raises(CannotEstimate, match="what others send"):
        replay_step(worked, EIGHT, CODE, PACE)


def test_half_of_a_causal_attention_is_computed_and_all_of_a_masked_one():
    def attending(name, causal):
        flops, tokens = 4 * 10**12, 8192
        return step(
            [record(KERNEL)],
            [Operation("forward", name, "attention", "bfloat16", flops, 0, 1, True, causal, tokens, 3)],
            [(0, 0, 1)],
        )

    name = "_scaled_dot_product_cudnn_attention"
    causal, whole = seconds(attending(name, True)), seconds(attending(name, False))
    masked = seconds(attending(f"{name} masked", False))
    assert whole == pytest.approx(2 * causal, rel=0.01)
    assert causal < masked < 1.5 * whole
