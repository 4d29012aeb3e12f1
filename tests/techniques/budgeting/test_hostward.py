"""Results that wait on the host: which are sent, and when they are on the GPU."""

import pytest
import torch

from tonnage.techniques.budgeting import hostward


@pytest.mark.parametrize(("room", "sent"), [(0, []), (4, [1]), (6, [2]), (9, [1, 2]), (11, [0, 2]), (99, [0, 1, 2])])
def test_as_much_is_sent_as_the_link_copies(room, sent):
    sizes = [5 << 20, 3 << 20, 6 << 20, 1000]
    assert sorted(hostward.fitting(sizes, room << 20)) == sent


def test_on_the_card_are_those_of_two_layers():
    host = hostward.Host(torch.device("cpu"))
    given = [torch.randn(3, 4, requires_grad=True).t() for _ in range(3)]
    layers, sent = [], []
    for tensor in given:
        layers.append(host.begin_layer())
        sent.append(layers[-1].send(tensor))
        if (earlier := layers[-1].previous()) is not None:
            earlier.free_on_card()
    assert [piece.card is None for piece in sent] == [True, True, False]
    for place in (2, 1, 0):
        layers[place].fetch()
        if (earlier := layers[place].previous()) is not None:
            earlier.fetch()
        back = layers[place].take(sent[place])
        assert torch.equal(back, given[place])
        assert back.stride() == given[place].stride()
        assert back.grad_fn is None
        assert not layers[place].pieces
    assert all(piece.card is None for piece in sent)


def test_layers_that_are_gone_are_not_asked():
    host = hostward.Host(torch.device("cpu"))
    host.begin_layer().send(torch.ones(2))
    assert host.begin_layer().previous() is None
