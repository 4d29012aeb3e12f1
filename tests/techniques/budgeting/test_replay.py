"""A layer that runs again in part: what runs, what is returned from memory, and what happens if it deviates."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tonnage.errors import CannotEstimate
from tonnage.techniques.budgeting import recording, replay
from tonnage.techniques.budgeting.replay import Action


def free(operation, args, kwargs, output):
    """Return prices that do not matter here."""
    return 1.0, 0.0


def written(forward, *given):
    """Return the recorded operations of a function, and what is saved of them."""
    writing = recording.Recording(given, torch.device("cpu"), free)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: writing.save(t), lambda t: t), writing.mode():
        forward(*given)
    return writing.layer()


class Counting(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the names of the operations that ran."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.append(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


def chain(given):
    """Four pieces: sine (reads its input), doubled, exponential (keeps its result), sum."""
    return ((given.sin() * 2).exp()).sum()


@pytest.fixture
def given():
    return torch.randn(4, 4, requires_grad=True)


def again(layer, kept, given, forward=chain):
    """Return the gradients, and what ran in backward, with these pieces kept."""
    does = replay.decisions(layer, frozenset(kept))
    output = checkpoint(forward, given, use_reentrant=False, context_fn=lambda: replay.contexts(layer, does))
    with Counting() as counting:
        (gradient,) = torch.autograd.grad(output, given)
    return gradient, counting.names


def test_only_what_is_needed_runs_again(given):
    layer = written(chain, given)
    assert [piece.saved for piece in layer.pieces] == [False, False, True, False]
    assert replay.decisions(layer, frozenset({2})) == (Action.SPARED, Action.SPARED, Action.KEPT, Action.SPARED)
    (plain,) = torch.autograd.grad(chain(given), given)
    for kept, ran in (((), {"sin", "exp"}), ((2,), set()), ((1,), {"exp"})):
        gradient, names = again(layer, kept, given)
        torch.testing.assert_close(gradient, plain)
        assert {name for name in names if name in ("sin", "exp")} == ran


def test_a_layer_that_does_something_else_is_not_spared(given):
    """It is recorded as one function and run as another: gradients are right nevertheless."""

    def longer(given):
        return ((given.sin() * 2).exp() * given.sin()).sum()

    layer = written(chain, given)
    (plain,) = torch.autograd.grad(longer(given), given)
    gradient, names = again(layer, (2,), given, longer)
    torch.testing.assert_close(gradient, plain)
    assert names.count("sin") >= 1


def test_running_twice_is_refused(given):
    layer = written(chain, given)
    does = replay.decisions(layer, frozenset({2}))
    output = checkpoint(chain, given, use_reentrant=False, context_fn=lambda: replay.contexts(layer, does))
    torch.autograd.grad(output, given, retain_graph=True)
    with pytest.raises(CannotEstimate, match="choose checkpointing full"):
        torch.autograd.grad(output, given)


def test_what_is_looked_at_runs_again(given):
    """A value decides: what leads to it may not be spared."""
    layer = written(lambda given: (given * 3).exp() if (given * 2).sum().item() > 0 else given.exp(), given)
    looked_at = [index for index, piece in enumerate(layer.pieces) if piece.wanted]
    assert looked_at == [1]  # the sum


def test_drawing_random_numbers(given):
    layer = written(lambda given: torch.nn.functional.dropout(given, 0.5, True), given)
    assert layer.pieces[0].fixed
    query = torch.randn(1, 2, 4, 8)
    attention = torch.nn.functional.scaled_dot_product_attention
    layer = written(lambda query: attention(query, query, query), query)
    assert not any(piece.fixed for piece in layer.pieces)
