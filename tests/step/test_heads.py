"""The class that is built for a configuration, and the report's notes about it."""

from typing import Any

import pytest
import torch

from networks import one_thread, tiny  # noqa: F401
from tonnage.catalog.families import types_with
from tonnage.errors import CannotEstimate, UnreadableModel
from tonnage.job import Job
from tonnage.model import ModelRef
from tonnage.step import heads, model
from tonnage.step.remarks import list_remarks, remark

META = torch.device("meta")
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
DUAL = {
    "model_type": "siglip",
    "text_config": {"model_type": "siglip_text_model", **TOWER, "vocab_size": 61, "max_position_embeddings": 16},
    "vision_config": {"model_type": "siglip_vision_model", **TOWER, "image_size": 16, "patch_size": 8},
}


def reference(**config: Any) -> ModelRef:
    return ModelRef(name="mine", kind="config", config=config)


def on_meta(**config: Any) -> Any:
    return model.build(reference(**config), dtype=torch.float32, attention=None, device=META)


@pytest.mark.parametrize(
    ("config", "task", "class_name"),
    [
        ({"model_type": "llama"}, "causal-lm", "LlamaForCausalLM"),
        (
            {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
            "sequence-classification",
            "LlamaForSequenceClassification",
        ),
        (
            {"model_type": "bert", "architectures": ["BertForTokenClassification"]},
            "token-classification",
            "BertForTokenClassification",
        ),
        ({"model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"]}, "features", "XLMRobertaModel"),
        ({"model_type": "clip", "architectures": ["CLIPModel"]}, "image-text-contrast", "CLIPModel"),
        (
            {"model_type": "clip", "architectures": ["CLIPForImageClassification"]},
            "image-classification",
            "CLIPForImageClassification",
        ),
        ({"model_type": "wav2vec2"}, "ctc", "Wav2Vec2ForCTC"),
        ({"model_type": "bert", "architectures": ["BertForPreTraining"]}, "pretraining", "BertForPreTraining"),
        ({"model_type": "patchtst"}, "time-series", "PatchTSTForPrediction"),
        ({"model_type": "dinov3_vit"}, "features", "DINOv3ViTModel"),
    ],
)
def test_the_class_that_is_named_is_built(config: dict[str, Any], task: str, class_name: str) -> None:
    found = heads.head(config)
    assert (found.task, found.class_name, found.note) == (task, class_name, None)


def test_what_is_built_in_place_of_a_class_is_said() -> None:
    assert heads.head({"model_type": "vit", "architectures": ["ViTModel"]}).note == (
        "ViTModel has no loss: ViTForImageClassification is trained"
    )
    strange = heads.head({"model_type": "llama", "architectures": ["MyOwnLlama"]})
    assert strange.class_name == "LlamaForCausalLM"
    assert "MyOwnLlama is not a class that tonnage trains" in (strange.note or "")


def test_types_without_any_class_are_refused() -> None:
    with pytest.raises(UnreadableModel, match="no trainable class for model_type 'no-such-type'"):
        heads.head({"model_type": "no-such-type"})


def test_types_that_transformers_does_not_name_are_refused_before_it_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UnreadableModel, match="no trainable class for model_type 'no-such-type'; upgrade") as refused:
        heads.check_type({"model_type": "no-such-type"})
    assert refused.value.exit_code == 3
    for model_type in {
        *types_with("trained_part"),
        *(name for found in heads.trainable_types().values() for name in found),
    }:
        heads.check_type({"model_type": model_type})
    monkeypatch.setattr(heads, "_listing_source", lambda: "")  # not installed, which is said where it is wanted
    heads.check_type({"model_type": "no-such-type-either"})
    heads._may_be_listed.cache_clear()


def test_every_type_has_the_class_that_its_task_lists() -> None:
    for task, found in heads.trainable_types().items():
        assert task in heads.TASKS
        assert all(classes and all(isinstance(name, str) for name in classes) for classes in found.values())


def test_of_an_omni_model_the_thinker_is_trained() -> None:
    config = {
        "model_type": "qwen2_5_omni",
        "thinker_config": {"text_config": {"hidden_size": 8}},
        "dtype": "bfloat16",
    }
    part, note = heads.trained_part(config)
    assert part["model_type"] == "qwen2_5_omni_thinker"
    assert part["text_config"] == {"hidden_size": 8}
    assert "only the thinker of qwen2_5_omni is trained" in (note or "")
    assert heads.trained_part({"model_type": "llama"}) == ({"model_type": "llama"}, None)


def test_remarks_live_as_long_as_their_network() -> None:
    network = torch.nn.Identity()
    remark(network, "a sentence of its own")
    remark(network, "a sentence of its own")
    assert list_remarks().count("a sentence of its own") == 1
    del network
    assert "a sentence of its own" not in list_remarks()


def test_weights_of_old_constructors_get_memory_where_the_others_do() -> None:
    """Wav2Vec2 makes one by torch.Tensor(size), which ignores the meta device."""
    network = on_meta(
        model_type="wav2vec2", **TOWER, vocab_size=16, conv_dim=[8], conv_kernel=[10], conv_stride=[5], layerdrop=0.1,
        num_feat_extract_layers=1, num_conv_pos_embedding_groups=4, mask_time_prob=0.05,
    )  # fmt: skip
    assert all(parameter.is_meta for parameter in network.parameters())
    assert network.config.layerdrop == 0.0
    assert "layerdrop drops no layer: the step that needs most" in list_remarks()


@pytest.mark.parametrize(("text", "whole", "tied"), [(False, None, False), (True, None, True), (False, True, True)])
def test_the_text_model_says_whether_the_head_is_tied(text: bool, whole: bool | None, tied: bool) -> None:
    """Mistral 3's default is yes for the whole and no for the text model, whose checkpoints have two matrices."""
    config = dict(tiny("mistral3").config)
    config["text_config"] = {**config["text_config"], "tie_word_embeddings": text}
    if whole is not None:
        config["tie_word_embeddings"] = whole
    network = on_meta(**config)
    assert (network.get_input_embeddings().weight is network.get_output_embeddings().weight) is tied


def trained(job: Job) -> dict[str, torch.Tensor]:
    """Run one forward and backward on the host with real values; return the batch."""
    torch.manual_seed(0)
    network = model.build(job.model, dtype=torch.float32, attention=None, device=torch.device("cpu"))
    model.initialise(network)
    batch = model.batch(job, network, torch.float32)
    loss = model.loss_of(network(**batch))
    loss.backward()
    assert torch.isfinite(loss)
    return batch


@pytest.mark.parametrize(
    ("config", "inputs"),
    [
        (DUAL, {"input_ids": (2, 16), "pixel_values": (2, 3, 16, 16)}),
        (
            {**tiny("llama").config, "architectures": ["LlamaForSequenceClassification"], "num_labels": 1},
            {"input_ids": (2, 24), "labels": (2,)},
        ),
        (
            {**tiny("bert").config, "architectures": ["BertForQuestionAnswering"]},
            {"input_ids": (2, 24), "start_positions": (2,), "end_positions": (2,)},
        ),
        ({**tiny("bert").config, "architectures": ["BertModel"]}, {"input_ids": (2, 24)}),
        (
            {
                **{"model_type": "patchtst", "d_model": 16, "num_attention_heads": 2, "num_hidden_layers": 1},
                **{
                    "ffn_dim": 16,
                    "context_length": 32,
                    "patch_length": 8,
                    "patch_stride": 8,
                    "num_input_channels": 2,
                },
            },
            {"past_values": (2, 32, 2), "past_observed_mask": (2, 32, 2), "future_values": (2, 24, 2)},
        ),
        (
            {
                **{"model_type": "segformer", "depths": [1, 1], "num_encoder_blocks": 2, "hidden_sizes": [8, 8]},
                **{"num_attention_heads": [1, 1], "sr_ratios": [2, 1], "patch_sizes": [3, 3], "strides": [4, 2]},
                **{"mlp_ratios": [2, 2], "decoder_hidden_size": 8, "image_size": 32},
                "architectures": ["SegformerForSemanticSegmentation"],
            },
            {"pixel_values": (2, 3, 32, 32), "labels": (2, 32, 32)},
        ),
    ],
    ids=["contrast", "reward", "answers", "features", "series", "segments"],
)
def test_every_head_gets_what_it_learns_from(config: dict[str, Any], inputs: dict[str, tuple[int, ...]]) -> None:
    batch = trained(Job(model=reference(**config), seq_len=24, micro_batch=2))
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == inputs


def test_sounds_take_tokens_of_the_text() -> None:
    """Their number comes from the network's own code, which computes it from a mask."""
    audio = {
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4},
        **{"num_mel_bins": 8, "max_source_positions": 20},
    }
    config = {"model_type": "audioflamingo3", "text_config": {**tiny("qwen3").config, "model_type": "qwen2"}}
    job = Job(
        model=reference(**config, audio_config={"model_type": "audioflamingo3_encoder", **audio}, audio_token_id=60),
        seq_len=24,
        micro_batch=2,
    )
    batch = trained(job)
    assert batch["input_features"].shape == (2, 8, 40)
    assert (batch["input_ids"] == 60).sum(1).tolist() == [10, 10]  # 40 frames, halved by a convolution and a pool
    assert ((batch["labels"] == -100) == (batch["input_ids"] == 60)).all()


def test_networks_whose_inputs_are_not_known_are_refused_in_one_line() -> None:
    network = on_meta(model_type="lxmert", architectures=["LxmertForQuestionAnswering"], hidden_size=48)
    with pytest.raises(CannotEstimate, match=r"regions that a detector found.*batch\(job\)"):
        model.batch(Job(model=reference(model_type="lxmert")), network, torch.float32)


def test_positions_behind_the_padding_are_not_counted() -> None:
    """RoBERTa's first position is the one behind its padding's: 62 tokens for 64 rows."""
    network = on_meta(
        model_type="roberta", **TOWER, vocab_size=61, max_position_embeddings=64, pad_token_id=1
    )  # fmt: skip
    with pytest.raises(Exception, match="learned positions for 62 tokens"):
        model.check_positions(Job(model=reference(model_type="roberta"), seq_len=63), network)
    model.check_positions(Job(model=reference(model_type="roberta"), seq_len=62), network)
