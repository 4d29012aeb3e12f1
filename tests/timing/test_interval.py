"""The interval of a prediction, and the sentences about what was assumed."""

from dataclasses import replace

import pytest

from timed_steps import EAGER, EIGHT, LLAMA, ONE, PLAIN
from tonnage.catalog.devices import find_device
from tonnage.catalog.models import find_model
from tonnage.cluster import Cluster
from tonnage.mesh import Mesh
from tonnage.timing import rates
from tonnage.timing.kinds import read_shape
from tonnage.timing.software import software
from tonnage.timing.timing import time_step


def relative(step):
    """Return the ends of the interval / the prediction."""
    return tuple(round(end / step.step_seconds, 12) for end in (step.low_seconds, step.high_seconds))


@pytest.mark.parametrize("device", ["t4", "rtx-4090", "b300"])
def test_a_card_never_measured_widens_the_interval_and_says_so(device):
    work = replace(PLAIN, dtype="fp16")
    low, high = relative(time_step(LLAMA, work, ONE, EAGER))
    elsewhere_low, elsewhere_high = relative(time_step(LLAMA, work, Cluster(device=find_device("rtx-4090")), EAGER))
    step = time_step(LLAMA, work, Cluster(device=find_device(device)), EAGER)
    measured = find_device(device).capability in ((8, 9), (10, 3))
    assert relative(step)[0] <= elsewhere_low < low < high < elsewhere_high <= relative(step)[1]
    assert (relative(step) == (elsewhere_low, elsewhere_high)) == measured
    assert any("was measured" in line for line in step.assumed) != measured
    assert any("no steps of this code on such a cluster" in line for line in step.assumed)


@pytest.mark.parametrize("device", ["rtx-5090", "rtx-pro-6000"])
def test_blackwells_cards_for_games_reach_what_ada_does_and_not_what_a_data_centers_do(device):
    card = rates.card(find_device(device))
    assert (card.capability, card.known) == ("8.9", False)
    assert rates.card(find_device("b300")).capability == "10.3"
    step = time_step(LLAMA, PLAIN, Cluster(device=find_device(device)), EAGER)
    assert any("no card of capability 12.0 was measured" in line and "one of 8.9" in line for line in step.assumed)


def test_the_interval_is_that_of_the_clusters_that_calibrated_the_code():
    megatron = software("megatron")
    on_its_own = time_step(LLAMA, replace(PLAIN, axes=Mesh(dp_replicate=8), shard="ddp"), EIGHT, megatron)
    assert relative(on_its_own) == pytest.approx((megatron.low_factor, megatron.high_factor))
    places = [(ONE.device.id, 1, 1), ("a100-80gb", 1, 1), ("h200", 8, 1), ("h200", 8, 2)]
    highs = []
    for card, gpus, nodes in places:
        cluster = Cluster(device=find_device(card), gpus_per_node=gpus, nodes=nodes)
        work = replace(PLAIN, axes=Mesh(dp_replicate=cluster.gpus), shard="ddp" if cluster.gpus > 1 else "none")
        highs.append(relative(time_step(LLAMA, work, cluster, EAGER))[1])
    assert highs == pytest.approx([EAGER.high_factor, 1.2, 1.3, 1.25])


def test_adapters_and_experts_widen_the_interval():
    low, high = EAGER.low_factor, EAGER.high_factor
    adapters = time_step(LLAMA, replace(PLAIN, lora_rank=16), ONE, EAGER)
    assert relative(adapters) == pytest.approx((low**1.2, high**1.2))
    mixtral = read_shape(find_model("mixtral-8x7b").config())
    assert relative(time_step(mixtral, PLAIN, ONE, EAGER)) == pytest.approx((low**2.5, high**2.5))


def test_steps_that_wait_for_the_host_have_a_wider_interval_and_say_so():
    short, long = (time_step(LLAMA, replace(PLAIN, seq_len=s), ONE, EAGER) for s in (16, 8192))
    assert any("waits for the host" in text for text in short.assumed)
    assert not any("waits for the host" in text for text in long.assumed)
    width = [one.high_seconds / one.low_seconds for one in (short, long)]
    assert width[0] > 1.4 > 1.25 > width[1]
