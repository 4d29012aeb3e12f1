"""A budget of activations: the measurements of a layer, and networks that stay within it and learn the same."""

import pytest
import torch

from networks import one_thread, tiny, tiny_job  # noqa: F401
from tonnage.errors import CannotEstimate
from tonnage.plans import Plan
from tonnage.step import model
from tonnage.techniques import budget, build
from tonnage.techniques.budgeting import hostward, prices
from tonnage.techniques.budgeting.frontier import Piece
from tonnage.techniques.budgeting.layerwise import Network, Way
from tonnage.techniques.budgeting.recording import Layer
from tonnage.timing.software import CHOOSING


def run(budget_text, batches=2, name="llama", offload="none", **job):
    """Return the treatments chosen for the layers, and the gradients of all micro-batches."""
    plan = Plan(precision="fp32", optimizer="sgd", checkpointing=budget_text, activation_offload=offload)
    torch.manual_seed(0)
    made = build(tiny_job(name, **job), plan, device="cpu", initialise=True)
    torch.manual_seed(1)
    for _ in range(batches):
        made.micro_batch(made.next_batch())
    states = [layer.forward.func.__self__ for layer in model.layers(made.model) if budget_text != "none"]
    gradients = {name: p.grad for name, p in made.model.named_parameters() if p.grad is not None}
    return list(states[0].chosen) if states else [], gradients


def word(way):
    return "none" if way.treatment is None else "part" if way.treatment.kept else "full"


@pytest.mark.parametrize(
    ("text", "ways"),
    [
        ("budget=107KiB", "full part part"),
        ("budget=155KiB", "part part part"),
        ("budget=10MiB", "none none none"),
    ],
)
def test_gradients_are_those_of_plain_training(text, ways):
    chosen, ours = run(text)
    _, plain = run("none")
    assert " ".join(word(way) for way in chosen) == ways
    for name, tensor in plain.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("name", ["mixtral", "t5", "gpt2"])
def test_experts_two_stacks_and_random_numbers(name):
    """With gpt2's dropout: masks are drawn again, in the same order, whatever is kept."""
    changes = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1} if name == "gpt2" else {}
    job = {"model": tiny(name, **changes)}
    chosen, ours = run("budget=380KiB", name=name, **job)
    assert "part" in {word(way) for way in chosen}
    _, plain = run("none", name=name, **job)
    for parameter, tensor in plain.items():
        torch.testing.assert_close(ours[parameter], tensor, rtol=1e-4, atol=1e-6, msg=parameter)


def test_losses_of_routers_do_not_see_the_run_that_is_measured():
    """transformers collects the logits of routers in forward; the run has some, which nothing may be learned from."""
    job = {"model": tiny("qwen3_moe", output_router_logits=True, router_aux_loss_coef=10.0)}
    _, ours = run("budget=380KiB", name="qwen3_moe", **job)
    _, plain = run("none", name="qwen3_moe", **job)
    for parameter, tensor in plain.items():
        torch.testing.assert_close(ours[parameter], tensor, rtol=1e-4, atol=1e-6, msg=parameter)


def test_a_part_waits_on_the_host(monkeypatch):
    """Gradients stay the same; with the link's help more is kept within the same budget."""
    monkeypatch.setattr(hostward, "SMALL_BYTES", 512)
    monkeypatch.setattr(prices, "link_bytes_per_second", lambda device: 1e11)
    chosen, ours = run("budget=180KiB", batches=3, offload="cpu-streamed")
    assert any(way.treatment and way.treatment.sent for way in chosen)
    alone, _ = run("budget=180KiB")
    assert sum(way.seconds for way in chosen) < sum(way.seconds for way in alone)
    _, plain = run("none", batches=3)
    for name, tensor in plain.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-7, msg=name)


def test_what_is_on_its_way_has_room():
    layer = Layer(operations=(), makers=(), pieces=(Piece(7, 1.0, saved=True),), flops=(0.0,))
    facts = budget.Measured(layer=layer, given=1, saved=8, again=8)
    what = budget.Checkpointed(facts, frozenset({0}), frozenset(), frozenset({0}))
    ways = (
        Way(1, 8, 1.0, budget.Checkpointed(facts, frozenset(), frozenset({0}))),
        Way(1, 8, 0.0, what),
        Way(8, None, 0.0),
    )
    network = budget.in_transit(Network((ways, ways), before=0, after=2))
    assert network.after == 2 + 2 * 7
    assert [way.again for way in network.layers[0]] == [15, 15, None]
    assert network.layers[0] is network.layers[1]


def measured(forward, *more):
    """A layer with a weight of 128 x 128 on an input of 8 x 128, all in fp32."""
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.randn(128, 128))
    entering = torch.randn(8, 128, requires_grad=True)
    return budget.measure(layer, lambda given: forward(given, layer.weight), (entering, *more), {})


ONE = 8 * 128 * 4
"""Bytes of a result."""


def test_a_layer_is_measured_as_autograd_saves_it():
    """y = gelu(x w) w: x and x w (twice: for gelu and for its product)."""
    found = measured(lambda given, weight: torch.nn.functional.gelu(given @ weight) @ weight)
    assert (found.given, found.saved, found.again) == (ONE, 3 * ONE, 3 * ONE)
    product, gelu, end = found.layer.pieces
    assert (product.saved, gelu.saved, end.saved) == (True, True, False)
    assert [piece.bytes for piece in found.layer.pieces] == [ONE] * 3
    assert gelu.reads == (0,)
    assert found.layer.flops == (2 * 8 * 128 * 128, 0.0, 2 * 8 * 128 * 128)


def test_ways_go_from_the_input_alone_to_everything():
    found = budget.ways(measured(lambda given, weight: torch.nn.functional.gelu(given @ weight) @ weight))
    assert [way.kept for way in found] == [ONE, 2 * ONE, 3 * ONE]
    assert [way.again for way in found] == [3 * ONE, 3 * ONE, None]
    assert [way.treatment and way.treatment.again for way in found] == [{0, 1}, {1}, None]
    assert found[0].seconds > found[1].seconds > found[2].seconds == 0.0


def test_where_the_host_is_slower_a_part_costs_more_than_everything():
    """3 products and activations: launched 3 times, a fourth time to run again, and looked at twice."""
    found = measured(lambda given, weight: torch.nn.functional.gelu(given @ weight) @ weight)
    full, part, none = budget.ways(found, kernel_seconds=1.0)
    assert full.seconds == pytest.approx(3.0)
    assert part.seconds == pytest.approx(3.0 + 2 * CHOOSING * 3.0)
    assert none.seconds == 0.0


def test_what_was_written_to_is_not_kept():
    found = measured(lambda given, weight: (given @ weight).relu_() @ weight)
    assert [piece.fixed for piece in found.layer.pieces] == [True, False]


def test_nothing_is_spared_where_memory_is_filled_unseen():
    """Empty memory that a product reads: a kernel must have filled it."""
    plain = measured(lambda given, weight: (given + 1) @ weight)
    hidden = measured(lambda given, weight: (given + 1) @ weight + torch.empty_like(given))
    assert {piece.wanted for piece in plain.layer.pieces} == {False}
    assert {piece.wanted for piece in hidden.layer.pieces} == {True}


def test_too_small_a_budget_says_what_is_needed():
    with pytest.raises(CannotEstimate, match=r"at least 106\.5 KiB with every layer checkpointed"):
        run("budget=60KiB")


def made(budget_text):
    plan = Plan(precision="fp32", optimizer="sgd", checkpointing=budget_text)
    torch.manual_seed(0)
    return build(tiny_job("llama"), plan, device="cpu", initialise=True)


def with_new_weights(step, when):
    """Make every layer's down projection replace its weight when told so."""
    for layer in model.layers(step.model):
        projection = layer.mlp.down_proj
        projection.calls, plain = 0, projection.forward

        def forward(given, projection=projection, plain=plain):
            projection.calls += 1
            if when(projection):
                projection.weight.data = projection.weight.data.clone()
            return plain(given)

        projection.forward = forward


def test_what_a_layer_does_once_is_not_measured():
    """bitsandbytes' layers cast their biases when they first run."""
    step = made("budget=155KiB")
    with_new_weights(step, lambda projection: projection.calls == 1)
    for _ in range(2):
        step.micro_batch(step.next_batch())
    plain = made("budget=155KiB")
    for _ in range(2):
        plain.micro_batch(plain.next_batch())
    assert step.model.run_again == plain.model.run_again
    assert step.model.run_again["layers_in_part"] == 3


def test_layers_that_do_something_else_later_run_again_whole():
    step = made("budget=155KiB")
    later: list[bool] = []
    with_new_weights(step, lambda projection: bool(later))
    for _ in range(2):
        step.micro_batch(step.next_batch())
    assert step.model.run_again["layers_in_part"] == 3
    later.append(True)
    step.micro_batch(step.next_batch())
    found = step.model.run_again
    assert (found["layers_again"], found["layers_in_part"], found["seconds_fraction"]) == (3, 0, 1.0)
