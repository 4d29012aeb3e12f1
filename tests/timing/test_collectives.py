"""Collectives: the bytes of a ring by hand, and what slows them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.catalog.devices import find_device
from tonnage.errors import CannotEstimate
from tonnage.timing.collectives import Fabric, Group, has_links

FABRIC = Fabric(
    near_bytes_per_second=100e9, far_bytes_per_second=10e9, half_bytes=0.0, call_seconds=1e-5, hop_seconds=1e-6,
    far_hop_seconds=1e-5, near_hidden=0.5,
)  # fmt: skip


def test_a_ring_moves_all_parts_but_one_over_each_link():
    # 8 ranks, 800 MB: each link carries 700 MB; 7 hops
    assert FABRIC.gather(Group(8, 8), 800e6) == pytest.approx(1e-5 + 7e-6 + 700e6 / 100e9)


def test_between_machines_each_rank_of_a_machine_has_its_adapter():
    # 16 ranks in 2 machines: 15/16 of 1.6 GB through 8 adapters of 10 GB/s
    assert FABRIC.moving(Group(16, 8), 1.6e9) == pytest.approx(1.5e9 / 80e9)
    assert FABRIC.moving(Group(16, 1), 1.6e9) == pytest.approx(1.5e9 / 10e9)


def test_one_rank_exchanges_nothing():
    assert FABRIC.gather(Group(1, 1), 1e9) == 0.0


def test_an_unknown_network_is_refused():
    alone = replace(FABRIC, far_bytes_per_second=None)
    assert alone.gather(Group(8, 8), 1e6) > 0
    with pytest.raises(CannotEstimate, match="network between the machines"):
        alone.gather(Group(16, 8), 1e6)


@given(st.integers(2, 512), st.floats(1, 1e12), st.floats(1, 1e12))
def test_more_bytes_never_take_less(ranks, some, more):
    group = Group(ranks, min(ranks, 8))
    low, high = sorted((some, more))
    assert FABRIC.gather(group, low) <= FABRIC.gather(group, high)


def test_an_exchange_slows_down_the_computation_beside_it():
    # 8 ranks: 0.06 of its seconds, and 0.44 of the seconds in which 700 MB pass a link
    near = FABRIC.gather(Group(8, 8), 800e6)
    assert FABRIC.slowing(Group(8, 8), 800e6) == pytest.approx(0.06 * near + 0.44 * 7e-3)
    # over a slow network as many bytes take of the memory what they take within a machine, however long they last
    far = FABRIC.gather(Group(8, 1), 800e6)
    assert FABRIC.slowing(Group(8, 1), 800e6) == pytest.approx(0.06 * far + 0.44 * 7e-3)
    assert FABRIC.slowing(Group(8, 1), 800e6) / far < 0.12
    assert FABRIC.slowing(Group(1, 1), 800e6) == 0.0


@pytest.mark.parametrize(("card", "linked"), [("a100-80gb", True), ("a100-pcie-80gb", False), ("rtx-4090", False)])
def test_links_are_those_of_the_board(card, linked):
    assert has_links(find_device(card)) == linked
