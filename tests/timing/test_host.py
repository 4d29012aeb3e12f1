"""The host's part of a step: an optimizer whose memory all ranks of a machine share, and copies."""

from dataclasses import replace

import pytest

from tonnage.catalog.devices import find_device
from tonnage.catalog.models import find_model
from tonnage.cluster import Cluster
from tonnage.job import Job
from tonnage.mesh import Axes
from tonnage.model import ModelRef
from tonnage.plans import Plan
from tonnage.timing.host import copy_seconds, update_seconds
from tonnage.timing.kinds import read_shape
from tonnage.timing.software import software
from tonnage.timing.timing import timing
from tonnage.timing.work import Work

LLAMA = read_shape(find_model("llama-3.1-8b").config())
ONE = Cluster(device=find_device("h200"))
EIGHT = Cluster(device=find_device("h200"), gpus_per_node=8)
SIXTEEN = Cluster(device=find_device("h200"), gpus_per_node=8, nodes=2)
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
    step = timing(LLAMA, whole, ONE, software("eager")).optimizer_seconds
    divided = timing(LLAMA, replace(whole, axes=Axes(dp_shard=8)), EIGHT, software("eager")).optimizer_seconds
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
        timing(LLAMA, replace(FUSED, optimizer_offload=part), ONE, software("eager")).optimizer_seconds
        for part in (0.0, 0.5, 1.0)
    ]
    assert steps[0] < steps[1] < steps[2]
    assert steps[1] == pytest.approx((steps[0] + steps[2]) / 2)


@pytest.mark.parametrize(
    ("plan", "part"), [(Plan(), 0.0), (Plan(optimizer_offload="cpu"), 1.0), (Plan(optimizer_offload="cpu=0.5"), 0.5)]
)
def test_what_a_plan_says_of_the_part(plan, part):
    model = find_model("llama-3.1-8b")
    job = Job(model=ModelRef(name=model.id, kind="config", config=model.config()))
    assert Work.of(job, plan, ONE).optimizer_offload == part


def test_deepspeeds_adam_is_one_pass():
    model = find_model("llama-3.1-8b")
    job = Job(model=ModelRef(name=model.id, kind="config", config=model.config()))
    plan = Plan(engine="deepspeed", shard="zero3", optimizer_offload="cpu")
    assert Work.of(job, plan, EIGHT).optimizer == "adamw-fused"
    found = timing(LLAMA, Work.of(job, plan, EIGHT), EIGHT, software("eager"))
    # what is left of ml-engineering's steps besides computation is 2.1 s
    assert found.optimizer_seconds + found.copy_seconds == pytest.approx(2.14, rel=0.05)
    assert found.bound_by == "host"
