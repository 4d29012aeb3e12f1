"""The number of tokens of an image, from a network with one layer in each tower."""

from typing import Any

import pytest
import torch

from tonnage.catalog.configurations import resolve
from tonnage.job import Job
from tonnage.model import ModelRef
from tonnage.step import model
from tonnage.step.inputs import asking, image_shapes, images


def network_of(job: Job) -> Any:
    return model.build(job.model, dtype=torch.bfloat16, attention=None, device=torch.device("meta"))


def tokens_of_all(job: Job) -> int:
    """Return the rows of one sequence's images."""
    network = network_of(job)
    asked = image_shapes.make_images(job, network).tensors
    return asking.rows_of(job, network, "get_image_features", lambda: asked, images._vision_options(network))


@pytest.mark.parametrize("name", ["gemma-3-4b", "llava-1.5-7b"])
def test_a_tower_of_one_layer_gives_as_many_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(model=resolve(name, offline=True), seq_len=4096)
    shallow = tokens_of_all(job)
    monkeypatch.setattr(asking, "_shallow", lambda config, perception=False: config)
    assert tokens_of_all(job) == shallow > 0


def test_a_network_that_takes_what_a_certain_layer_gives_is_asked_as_a_whole() -> None:
    small = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    config = {
        "model_type": "vipllava",
        "text_config": {"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 99} | small,
        "vision_config": {"num_hidden_layers": 5, "image_size": 28, "patch_size": 14} | small,
        "vision_feature_layers": [-2, -5],
        "image_token_index": 98,
    }
    job = Job(model=ModelRef(name="mine", kind="config", config=config), seq_len=64)
    assert tokens_of_all(job) == (28 // 14) ** 2


def test_who_watches_the_program_does_not_hear_of_it() -> None:
    """Otherwise the call would count as an evaluation before the first step, and be repeated with it."""
    job = Job(model=resolve("llava-1.5-7b", offline=True), seq_len=4096)
    heard = []
    modules = torch.nn.modules.module
    with (
        modules.register_module_forward_pre_hook(lambda module, args: heard.append("enter")),
        modules.register_module_forward_hook(lambda module, args, output: heard.append("leave")),
    ):
        tokens_of_all(job)
        assert heard == []
        torch.nn.Linear(1, 1)(torch.ones(1))
    assert heard == ["enter", "leave"]
