"""Which layers run again under a budget: sums one can do by hand, brute force, and a network that keeps to it."""

import itertools
import random

import pytest
import torch

from networks import one_thread, tiny_job  # noqa: F401
from tonnage import model as models
from tonnage import step as steps
from tonnage.errors import CannotEstimate
from tonnage.plans import Plan
from tonnage.techniques import budget
from tonnage.techniques.budget import WAYS, LayerBytes, NetworkBytes, choose

LAYER = LayerBytes(full=1, selective=6, none=10, again=11, idle=1)
NETWORK = NetworkBytes(layers=(LAYER,) * 4, before=2, after=5)


@pytest.mark.parametrize(
    ("ways", "peak"),
    [
        ("none none none none", 2 + 4 * 10 + 5),  # the end of the forward
        ("full full full full", 2 + 3 * 1 + 11),  # the last layer runs again behind the inputs of three
        ("full full full none", 2 + 3 * 1 + 10 + 5),
        ("none full full full", 2 + 10 + 2 * 1 + 11),  # the first kept: still there when the last runs again
    ],
)
def test_the_highest_moment(ways: str, peak: int) -> None:
    assert NETWORK.peak(ways.split()) == peak


@pytest.mark.parametrize(
    ("budget_bytes", "ways"),
    [
        (15, None),
        (16, "full full full full"),
        (17, "full full full selective"),  # 2 + 3 + 11 + 1 while the last runs again
        (32, "selective selective selective selective"),  # 2 + 3 * 6 + 11 + 1
        (35, "selective selective selective none"),
        (46, "selective none none none"),  # 2 + 6 + 3 * 10 + 5 = 43
        (47, "none none none none"),
    ],
)
def test_as_much_as_fits_is_kept_at_the_end(budget_bytes: int, ways: str | None) -> None:
    assert choose(NETWORK, budget_bytes) == (tuple(ways.split()) if ways else None)


def test_no_choice_is_over_the_budget_and_the_last_keep_most() -> None:
    draw = random.Random(5)
    for _ in range(200):
        full, more, most = draw.randint(1, 4), draw.randint(0, 9), draw.randint(0, 9)
        layer = LayerBytes(full=full, selective=full + more, none=full + most, again=full + most, idle=more)
        network = NetworkBytes(layers=(layer,) * 4, before=draw.randint(0, 5), after=draw.randint(0, 30))
        limit = draw.randint(5, 80)
        chosen = choose(network, limit)
        possible = [ways for ways in itertools.product(WAYS, repeat=4) if network.peak(ways) <= limit]
        if chosen is None:
            assert ("full",) * 4 not in possible
        else:
            assert chosen in possible
            assert list(chosen) == sorted(chosen, key=WAYS.index), "the last layers keep the most"


def run(budget_text: str, batches: int = 2) -> tuple[list[str], dict[str, torch.Tensor]]:
    """The ways chosen for the layers, and the gradients of all micro-batches."""
    plan = Plan(precision="fp32", optimizer="sgd", checkpointing=budget_text)
    torch.manual_seed(0)
    made = steps.build(tiny_job(), plan, device="cpu", initialise=True)
    torch.manual_seed(1)
    for _ in range(batches):
        made.micro_batch(made.next_batch())
    states = [layer.forward.func.__self__ for layer in models.layers(made.model) if budget_text != "none"]
    gradients = {name: p.grad for name, p in made.model.named_parameters() if p.grad is not None}
    return list(states[0].ways) if states else [], gradients


@pytest.mark.parametrize(
    ("text", "ways"),
    [
        ("budget=155KiB", ["full", "full", "none"]),
        ("budget=250KiB", ["selective", "selective", "none"]),
        ("budget=10MiB", ["none", "none", "none"]),
    ],
)
def test_gradients_are_those_of_plain_training(text: str, ways: list[str]) -> None:
    chosen, ours = run(text)
    _, plain = run("none")
    assert chosen == ways
    for name, tensor in plain.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-7, msg=name)


def test_a_layer_is_measured_as_autograd_saves_it() -> None:
    """y = gelu(x w) w: x and x w (twice: for gelu and for its product), all of 8 x 128 fp32 values."""
    weight = torch.randn(128, 128, requires_grad=True)
    entering = torch.randn(8, 128, requires_grad=True)
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight.detach())

    def forward(entering: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(entering @ layer.weight) @ layer.weight

    one = 8 * 128 * 4
    found = budget._measure(layer, forward, (entering,), {})
    assert found == LayerBytes(full=one, selective=3 * one, none=3 * one, again=3 * one, idle=one)


def test_too_small_a_budget_says_what_is_needed() -> None:
    with pytest.raises(CannotEstimate, match=r"at least 106\.5 KiB with every layer checkpointed"):
        run("budget=60KiB")
