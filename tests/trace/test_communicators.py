"""Which communicators a rank has used, and whom it met."""

from tonnage.trace.communicators import Communicators, First


def test_the_first_exchange_of_a_communicator_is_told():
    used = Communicators()
    assert used.use((8, 0, 3), "AllReduce", 0) == First(ranks=8)
    assert not any(used.use((8, 0, 3), "AllGather", 0))
    assert used.use((2, 1, 0), "Send", 1) == First(ranks=2), "two have nothing besides their communicator"
    assert (used.sizes, used.peers) == ([2, 8], 0)


def test_peers_are_met_once_in_each_communicator():
    used = Communicators()
    assert used.use((4, 0, 1), "Send", 2) == First(ranks=4, peers=1)
    assert not any(used.use((4, 0, 1), "Recv", 2))
    assert not any(used.use((4, 0, 1), "Recv", 1)), "itself"
    assert used.use((4, 0, 1), "AllToAll", 0) == First(peers=2)
    assert used.use((4, 5, 1), "Send", 2) == First(ranks=4, peers=1)
    assert used.peers == 4
