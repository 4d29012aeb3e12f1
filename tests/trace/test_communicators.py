"""Communicators and direct peers are reported at their first exchange."""

from tonnage.trace.communicators import Communicators, First


def test_first_exchange_of_a_communicator_is_reported():
    used = Communicators()
    assert used.use((8, 0, 3), "AllReduce", 0) == First(ranks=8)
    assert not any(used.use((8, 0, 3), "AllGather", 0))
    assert used.use((2, 1, 0), "Send", 1) == First(ranks=2), "a group of two has no buffers besides its communicator"
    assert (used.sizes, used.peers) == ([2, 8], 0)


def test_peers_count_once_in_each_communicator():
    used = Communicators()
    assert used.use((4, 0, 1), "Send", 2) == First(ranks=4, peers=1)
    assert not any(used.use((4, 0, 1), "Recv", 2))
    assert not any(used.use((4, 0, 1), "Recv", 1)), "the rank itself"
    assert used.use((4, 0, 1), "AllToAll", 0) == First(peers=2)
    assert used.use((4, 5, 1), "Send", 2) == First(ranks=4, peers=1)
    assert used.peers == 4
