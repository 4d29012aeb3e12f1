"""The cuts of a network into stages, and what each stage holds."""

import pytest
import torch

from networks import tiny
from tonnage.errors import CannotEstimate, UsageError
from tonnage.step import model
from tonnage.step.stages import Stage, cut, layers_of_stage


def stage(index: int, count: int, name: str = "llama", **changes: object) -> Stage:
    reference = tiny(name, **changes)
    network = model.build(reference, dtype=torch.float32, attention=None, device=torch.device("meta"))
    return cut(network, index=index, count=count)


@pytest.mark.parametrize(
    ("layers", "count", "sizes"),
    [(8, 4, [2, 2, 2, 2]), (9, 4, [2, 3, 2, 2]), (11, 4, [2, 3, 3, 3]), (3, 2, [1, 2]), (3, 3, [1, 1, 1])],
)
def test_layers_are_dealt_out_evenly_and_the_first_stage_gets_none_of_the_rest(
    layers: int, count: int, sizes: list[int]
) -> None:
    parts = [layers_of_stage(layers, index, count) for index in range(count)]
    assert [len(part) for part in parts] == sizes
    assert [layer for part in parts for layer in part] == list(range(layers))


def test_every_parameter_is_on_one_stage_under_its_name() -> None:
    whole = model.build(tiny("llama"), dtype=torch.float32, attention=None, device=torch.device("meta"))
    held = [{name for name, _ in stage(index, 3).network.named_parameters()} for index in range(3)]
    assert sorted(name for names in held for name in names) == sorted(name for name, _ in whole.named_parameters())
    assert {name.split(".")[2] for name in held[1]} == {"1"}
    assert "model.embed_tokens.weight" in held[0]
    assert {"model.norm.weight", "lm_head.weight"} <= held[2]


def test_layers_of_other_stages_are_not_among_the_repeated_ones() -> None:
    assert len(model.layers(stage(1, 2, num_hidden_layers=4))) == 2


def test_a_weight_that_is_embedding_and_head_has_two_copies() -> None:
    first, middle, last = (stage(index, 3, "qwen3") for index in range(3))
    assert first.copied is not None
    assert last.copied is not None
    assert first.copied.shape == last.copied.shape
    assert middle.copied is None
    assert stage(0, 3).copied is None


def test_networks_that_are_not_cut_say_why() -> None:
    with pytest.raises(UsageError, match="3 layers cannot be cut into 4 stages"):
        stage(0, 4)
    with pytest.raises(CannotEstimate, match=r"GPT2LMHeadModel .* is not known"):
        stage(0, 2, "gpt2")
    with pytest.raises(CannotEstimate, match="A pipeline needs a causal language model, not masked-lm"):
        stage(0, 2, "bert")
