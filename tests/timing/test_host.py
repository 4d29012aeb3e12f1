"""The host's part of a step: an optimizer whose memory all ranks of a machine share, and copies."""

from dataclasses import replace

import pytest

from timed_steps import EAGER, LLAMA, ONE, PLAIN, llama_job
from tonnage.catalog.devices import find_device
from tonnage.cluster import Cluster
from tonnage.mesh import Mesh
from tonnage.plans import Plan
from tonnage.timing.host import copy_seconds, update_seconds
from tonnage.timing.memory import offloaded_bytes
from tonnage.timing.timing import time_step
from tonnage.timing.work import Work

EIGHT = replace(ONE, gpus_per_node=8)
SIXTEEN = replace(EIGHT, nodes=2)
FUSED = Work(seq_len=4096, weight_bytes=4, gradient_bytes=4, optimizer="adamw-fused", optimizer_offload=1.0)
BILLION = 1e9


def test_one_pass_by_hand():
    # 28 bytes of a billion weights at 105 GB/s
    assert update_seconds(BILLION, FUSED, ONE) == pytest.approx(28 / 105)
    assert update_seconds(BILLION, replace(FUSED, optimizer_offload=0.25), ONE) == pytest.approx(7 / 105)
    assert update_seconds(BILLION, replace(FUSED, optimizer_offload=0.0), ONE) == 0.0
    assert update_seconds(BILLION, replace(FUSED, optimizer_offload=0.0, param_offload=True), ONE) == pytest.approx(
        28 / 105
    )


def test_ranks_of_a_machine_share_its_memory_and_machines_do_not():
    alone = update_seconds(BILLION, FUSED, ONE)
    assert update_seconds(BILLION, FUSED, EIGHT) == pytest.approx(8 * alone)
    assert update_seconds(BILLION, FUSED, SIXTEEN) == pytest.approx(8 * alone)
    # so a network divided among the ranks of one machine takes as long as on one card
    whole = replace(FUSED, param_offload=True, shard="zero3")
    step = time_step(LLAMA, whole, ONE, EAGER).optimizer_seconds
    divided = time_step(LLAMA, replace(whole, axes=Mesh(dp_shard=8)), EIGHT, EAGER).optimizer_seconds
    assert divided == pytest.approx(step)


def test_half_the_bytes_in_pure_bf16_but_not_with_main_weights():
    pure = replace(FUSED, weight_bytes=2, gradient_bytes=2)
    assert update_seconds(BILLION, pure, ONE) == pytest.approx(14 / 105)
    assert update_seconds(BILLION, replace(pure, main_weights=True), ONE) == pytest.approx(28 / 105)


def test_torchs_loop_and_a_workstation_are_slower():
    looped = update_seconds(BILLION, replace(FUSED, optimizer="adamw"), ONE)
    assert looped > 4 * update_seconds(BILLION, FUSED, ONE)
    desktop = Cluster(device=find_device("rtx-4090"))
    assert update_seconds(BILLION, FUSED, desktop) == pytest.approx(28 / 35)


def test_part_of_the_states_is_part_of_the_copies():
    def copies(part):
        return copy_seconds(LLAMA, replace(FUSED, optimizer_offload=part), ONE, BILLION, BILLION, 1.0)

    # gradients there, weights back, 4 bytes each over 85 % of 64 GB/s
    assert copies(1.0) == pytest.approx(8 / (0.85 * 64))
    assert copies(0.5) == pytest.approx(copies(1.0) / 2)
    assert copies(0.0) == 0.0


def test_a_fraction_is_divided_between_card_and_host():
    steps = [
        time_step(LLAMA, replace(FUSED, optimizer_offload=part), ONE, EAGER).optimizer_seconds
        for part in (0.0, 0.5, 1.0)
    ]
    assert steps[0] < steps[1] < steps[2]
    assert steps[1] == pytest.approx((steps[0] + steps[2]) / 2)


@pytest.mark.parametrize(
    ("plan", "part"), [(Plan(), 0.0), (Plan(optimizer_offload="cpu"), 1.0), (Plan(optimizer_offload="cpu=0.5"), 0.5)]
)
def test_the_plan_decides_which_part_of_the_states_is_offloaded(plan, part):
    assert Work.of(llama_job(), plan, ONE).optimizer_offload == part


def test_deepspeeds_adam_is_one_pass():
    work = Work.of(llama_job(), Plan(engine="deepspeed", shard="zero3", optimizer_offload="cpu"), EIGHT)
    assert work.optimizer == "adamw-fused"
    step = time_step(LLAMA, work, EIGHT, EAGER)
    # ml-engineering's steps take 2.1 s besides computation
    assert step.optimizer_seconds + step.copy_seconds == pytest.approx(2.14, rel=0.05)
    assert step.bound_by == "host"


def test_torchs_own_offload_of_activations_hides_no_copy():
    """`save_on_cpu` waits for each: 60 GB there and back take longer than the layers, however long those take."""

    def copies(**changes):
        return time_step(LLAMA, replace(PLAIN, activation_offload=True, **changes), ONE, EAGER).copy_seconds

    there_and_back = 2 * 32 * offloaded_bytes(LLAMA, replace(PLAIN, activation_offload=True))
    assert copies() == pytest.approx(there_and_back / (0.85 * ONE.device.pcie_bytes_per_second))
    assert copies() > time_step(LLAMA, replace(PLAIN, checkpointing="full"), ONE, EAGER).recompute_seconds
    assert copies(copies_beside=True) < copies() / 2
    assert copies(checkpointing="full") < copies() / 20


def test_weights_of_one_gpu_come_from_its_host():
    """Twice and their gradients once a micro-batch; half of it, and what is longer than its computation, shows."""
    plan = Plan(shard="zero3", param_offload="cpu", accum_sync=True)
    rate = 0.85 * ONE.device.pcie_bytes_per_second

    def copies(seq_len, **changes):
        work = replace(Work.of(llama_job(seq_len=seq_len), plan, ONE), **changes)
        return time_step(LLAMA, work, ONE, EAGER).copy_seconds

    whole = 3 * 4 * LLAMA.parameters / rate
    assert copies(16384) == pytest.approx(whole / 2)
    assert whole / 2 < copies(8) < whole
    assert copies(16384, grad_accum=4) == pytest.approx(4 * whole / 2)
    assert copies(16384, grad_accum=4, averages_each=False) == pytest.approx((4 * 2 / 3 + 1 / 3) * whole / 2)
    assert copies(16384, shard="zero2") == pytest.approx(2 / 3 * whole / 2)
    assert time_step(LLAMA, Work.of(llama_job(seq_len=16384), plan, ONE), ONE, EAGER).communication_seconds == 0
