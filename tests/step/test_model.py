import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from networks import EVERY_KIND, TINY, one_thread, tiny, tiny_job  # noqa: F401
from tonnage.errors import CannotEstimate, UnreadableModel, UsageError
from tonnage.job import Job
from tonnage.model import ModelRef
from tonnage.step import model

CPU = torch.device("cpu")
META = torch.device("meta")


def built(name: str, device: torch.device = CPU, **changes: Any) -> nn.Module:
    return model.build(tiny(name, **changes), dtype=torch.float32, attention=None, device=device)


def initialised(name: str) -> nn.Module:
    torch.manual_seed(0)
    network = built(name)
    model.initialise(network)
    return network


@pytest.mark.parametrize("name", TINY)
def test_every_architecture_trains(name: str) -> None:
    network = initialised(name)
    loss = model.loss_of(network(**model.batch(tiny_job(name), network, torch.float32)))
    loss.backward()
    assert math.isfinite(loss.item())
    without = [key for key, p in network.named_parameters() if p.grad is None and p.requires_grad]
    if name in ("llava", "llava_next"):  # which take what the last but one layer of the tower says
        without = [key for key in without if not key.startswith("model.vision_tower")]
    # DeepSeek-V3's router bias is moved by a rule of its own, not by gradients; it is a buffer
    assert not without


@pytest.mark.parametrize("name", EVERY_KIND)
def test_nothing_is_allocated_on_meta(name: str) -> None:
    network = built(name, META)
    assert all(tensor.is_meta for tensor in (*network.parameters(), *network.buffers()))


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "bert", "t5"])
def test_tied_weights_stay_tied_and_are_counted_once(name: str) -> None:
    network: Any = built(name)
    assert network.get_input_embeddings().weight is network.get_output_embeddings().weight
    assert len({id(p) for p in network.parameters()}) == len(list(network.parameters()))


def test_initialised_as_transformers_does_it() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {key: value for key, value in TINY["llama"].items() if key != "model_type"}
    expected = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **fields), dtype=torch.float32)
    network = initialised("llama")
    for (name, ours), (_, theirs) in zip(network.named_buffers(), expected.named_buffers(), strict=True):
        assert torch.equal(ours, theirs), name  # the frequencies of the rotary positions
    for (name, ours), (_, theirs) in zip(network.named_parameters(), expected.named_parameters(), strict=True):
        if ours.ndim == 1:
            assert torch.equal(ours, theirs), name  # norms
        else:
            assert ours.std().item() == pytest.approx(theirs.std().item(), rel=0.15), name


@pytest.mark.parametrize("name", EVERY_KIND)
def test_layers_are_found_in_every_architecture(name: str) -> None:
    lists = model.layer_lists(built(name, META))
    assert [len(found) for found in lists] == ([3, 3] if name == "t5" else [3])


def test_layers_are_outermost_uniform_lists() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))

    network = nn.Sequential(nn.Linear(2, 2), nn.ModuleList(Layer() for _ in range(2)), nn.ModuleList())
    assert [type(layer).__name__ for layer in model.layers(network)] == ["Layer", "Layer"]


@pytest.mark.parametrize(
    ("config", "task"),
    [
        ({"model_type": "bert"}, "masked-lm"),
        ({"model_type": "bert", "is_decoder": True}, "causal-lm"),
        ({"model_type": "bert", "architectures": ["BertLMHeadModel"]}, "causal-lm"),
        ({"model_type": "t5"}, "seq2seq"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "causal-lm"),
        ({"model_type": "vit", "architectures": ["ViTModel"]}, "image-classification"),
        ({"model_type": "qwen2_5_vl"}, "image-text-to-text"),
    ],
)
def test_task(config: dict[str, Any], task: str) -> None:
    assert model.task(config) == task


def test_batches_are_full_sequences_without_a_mask() -> None:
    made = model.batch(tiny_job("llama"), built("llama", META), torch.float32)
    assert {key: tuple(tensor.shape) for key, tensor in made.items()} == {"input_ids": (2, 24), "labels": (2, 24)}
    assert all(tensor.device == CPU for tensor in made.values())


def test_images_come_in_the_dtype_asked_for() -> None:
    made = model.batch(tiny_job("vit"), built("vit", META), torch.bfloat16)
    assert made["pixel_values"].shape == (2, 3, 16, 16)
    assert made["pixel_values"].dtype == torch.bfloat16


def test_images_take_tokens_of_the_text() -> None:
    made = model.batch(tiny_job("gemma3"), built("gemma3", META), torch.float32)
    assert made["pixel_values"].shape == (2, 3, 32, 32)
    assert (made["input_ids"] == 60).sum(1).tolist() == [4, 4]
    assert torch.equal(made["token_type_ids"] == 1, made["input_ids"] == 60)
    with pytest.raises(UsageError, match="takes 5 tokens"):
        model.batch(tiny_job("gemma3", seq_len=4), built("gemma3", META), torch.float32)


@pytest.mark.parametrize(
    ("name", "tokens", "pixels"),
    [
        ("llava", 4, (2, 3, 16, 16)),  # (16 / 8)^2
        (
            "llava_next",
            14,
            (2, 3, 3, 16, 16),
        ),  # 4 each of the whole and 2 tiles, 1 for each of 2 rows
        ("paligemma", 4, (2, 3, 16, 16)),
        ("idefics3", 3, (2, 3, 3, 16, 16)),  # 2 tiles and the whole, (16 / 8 / 2)^2 each
        ("mistral3", 2, (2, 3, 16, 32)),  # 4 x 2 patches, 2 x 2 of them a token
        ("qwen2_5_vl", 8, (64, 96)),  # 8 x 4 patches of 3 channels, 2 frames, 4 x 4 pixels
        ("mllama", 0, (2, 1, 4, 3, 16, 16)),  # seen by cross-attention
    ],
)
def test_images_come_as_the_family_wants_them(name: str, tokens: int, pixels: tuple[int, ...]) -> None:
    made = model.batch(tiny_job(name), built(name, META), torch.float32)
    assert made["pixel_values"].shape == pixels
    assert (made["input_ids"] == 60).sum(1).tolist() == [tokens, tokens] or tokens == 0
    assert ((made["labels"] == -100) == (made["input_ids"] == 60)).all() or tokens == 0


def test_images_may_be_several_or_none() -> None:
    network = built("qwen2_5_vl", META)
    made = model.batch(tiny_job("qwen2_5_vl", images=2), network, torch.float32)
    assert made["image_grid_thw"].tolist() == [[1, 4, 8]] * 4
    assert set(model.batch(tiny_job("qwen2_5_vl", images=0), network, torch.float32)) == {"input_ids", "labels"}
    with pytest.raises(UsageError, match=r"3 x an image .* takes 27 tokens"):
        model.batch(tiny_job("qwen2_5_vl", images=3), network, torch.float32)


def test_a_size_that_the_family_does_not_take_is_refused() -> None:
    with pytest.raises(UsageError, match="16x16 pixels whatever their size"):
        model.batch(tiny_job("llava", image_size="32x16"), built("llava", META), torch.float32)


def test_sounds_have_the_frames_that_the_encoder_hears() -> None:
    made = model.batch(tiny_job("whisper"), built("whisper", META), torch.float32)
    assert {key: tuple(tensor.shape) for key, tensor in made.items()} == {
        "input_features": (2, 8, 24),
        "labels": (2, 24),
    }


def test_sequences_longer_than_learned_positions_are_refused() -> None:
    with pytest.raises(UsageError, match=r"64 tokens, and seq_len is 65"):
        model.check_positions(tiny_job("gpt2", seq_len=65), built("gpt2", META))
    model.check_positions(tiny_job("llama", seq_len=65), built("llama", META))  # rotary positions have no table


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "no-such-type"},
        {},
        {**TINY["llama"], "hidden_act": "no-such-activation"},
        {**TINY["llama"], "vocab_size": "many"},
    ],
)
def test_unusable_configurations_end_in_one_line(config: dict[str, Any]) -> None:
    reference = ModelRef(name="mine", kind="config", config=config)
    with pytest.raises(UnreadableModel) as caught:
        model.build(reference, dtype=torch.float32, attention=None, device=META)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"hidden_act": "zork"}, "hidden_act is 'zork'"),
        ({"rope_scaling": {"rope_type": "zork", "factor": 2.0}}, "rope_scaling.rope_type is 'zork'"),
        ({"pad_token_id": 10**6}, "Padding_idx"),
        ({"id2label": 3}, "(id2label is 3; without it, it works)"),
        ({"text_config": {"a": 1}}, "(text_config is {'a': 1}; without it, it works)"),
        ({"rope_theta": "8"}, "(rope_theta is '8'; without it, it works)"),
    ],
)
def test_what_transformers_does_not_know_is_named_by_its_field(changed: dict[str, Any], said: str) -> None:
    reference = ModelRef(name="mine", kind="config", config={**TINY["llama"], **changed})
    with pytest.raises(UnreadableModel) as caught:
        model.build(reference, dtype=torch.float32, attention=None, device=META)
    assert said in str(caught.value)


def test_attention_that_a_network_has_no_code_for_is_refused_with_what_it_has() -> None:
    config = {"model_type": "gemma2", **{key: value for key, value in TINY["llama"].items() if key != "model_type"}}
    reference = ModelRef(name="mine", kind="config", config=config)
    with pytest.raises(UsageError) as caught:
        model.build(reference, dtype=torch.float32, attention="sdpa", device=META)
    assert str(caught.value) == (
        "transformers' Gemma2ForCausalLM has no sdpa attention, which mine would need for --attention math, "
        "efficient, flash, cudnn; possible: auto, eager, flex."
    )
    assert model.build(reference, dtype=torch.float32, attention="eager", device=META) is not None


def test_a_configuration_that_cannot_be_built_is_not_blamed_on_the_attention() -> None:
    reference = ModelRef(name="mine", kind="config", config={**TINY["llama"], "hidden_act": "no-such-activation"})
    with pytest.raises(UnreadableModel, match="hidden_act"):
        model.build(reference, dtype=torch.float32, attention="sdpa", device=META)


def test_more_tokens_than_a_host_holds_are_refused() -> None:
    with pytest.raises(UsageError, match="134,217,728"):
        model.batch(replace(tiny_job("llama"), seq_len=10**20), nn.Identity(), torch.float32)


class Regression(nn.Module):
    """A user's own network, which makes its own batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def batch(self, job: Job) -> dict[str, torch.Tensor]:
        return {"points": torch.ones(job.micro_batch, 4)}

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            points = layer(points)
        return points.square().mean()


def silent() -> nn.Module:
    return nn.Linear(2, 2)


def not_a_module() -> int:
    return 3


def factory(name: str) -> ModelRef:
    return ModelRef(name=name, kind="factory", factory=f"{__name__}:{name}")


@pytest.mark.parametrize(
    ("made", "named"), [([1, 2], "list"), ({"points": torch.ones(1), "scale": 2}, "int as 'scale'")]
)
def test_what_a_factory_makes_must_be_a_batch(made: Any, named: str) -> None:
    module = nn.Linear(2, 2)
    module.batch = lambda job: made  # type: ignore[assignment]
    with pytest.raises(CannotEstimate, match=f"Linear returned {named}; it must return a dict of CPU tensors"):
        model.batch(tiny_job("llama"), module, torch.float32)


def test_a_factory_is_called_with_dtype_and_device() -> None:
    module = model.build(factory("Regression"), dtype=torch.bfloat16, attention=None, device=META)
    assert {(p.dtype, p.device) for p in module.parameters()} == {(torch.bfloat16, META)}
    assert torch.get_default_dtype() == torch.float32


def test_a_factory_that_returns_no_module_is_refused() -> None:
    with pytest.raises(UnreadableModel, match="returned int"):
        model.build(factory("not_a_module"), dtype=torch.float32, attention=None, device=CPU)
    with pytest.raises(UnreadableModel, match="META is a device; give a function"):
        model.build(factory("META"), dtype=torch.float32, attention=None, device=CPU)


def test_a_factory_that_cannot_be_imported_is_refused() -> None:
    with pytest.raises(UnreadableModel, match=r"Cannot import.*no_such_thing"):
        model.build(factory("no_such_thing"), dtype=torch.float32, attention=None, device=CPU)


def test_a_module_without_a_batch_is_refused() -> None:
    module = model.build(factory("silent"), dtype=torch.float32, attention=None, device=CPU)
    job = Job(model=factory("silent"))
    with pytest.raises(CannotEstimate, match=r"batch\(job\)"):
        model.batch(job, module, torch.float32)


def test_a_forward_without_a_loss_is_refused() -> None:
    with pytest.raises(CannotEstimate, match="without a loss"):
        model.loss_of(torch.ones(3))
    assert model.loss_of((torch.tensor(2.0), "rest")).item() == 2.0
