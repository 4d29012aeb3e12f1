"""Networks whose course depends on integers on the card take on a ghost the course that they take on the host."""

import pytest

from networks import SEEING, tiny, tiny_job
from tonnage.catalog.devices import parse_cluster
from tonnage.job import Job
from tonnage.model import ModelRef
from tonnage.plans import Plan
from tonnage.workers.worker import Worker

pytestmark = pytest.mark.ghost

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}

COUNTING: dict[str, dict[str, object]] = {
    "jetmoe": {
        **{"model_type": "jetmoe", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_key_value_heads": 2, "kv_channels": 16, "num_local_experts": 4, "vocab_size": 61},
    },
    "switch_transformers": {
        **{
            "model_type": "switch_transformers",
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
        },
        **{"num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 4},
        **{"num_heads": 4, "vocab_size": 61},
    },
    "wav2vec2": {
        **{"model_type": "wav2vec2", **SMALL, "vocab_size": 16, "conv_dim": [8], "conv_kernel": [400]},
        **{"conv_stride": [320], "num_feat_extract_layers": 1, "num_conv_pos_embedding_groups": 4},
    },
    "ibert": {"model_type": "ibert", **SMALL, "vocab_size": 61, "max_position_embeddings": 64},
}
"""Networks that read what they counted on the card: tokens of experts, lengths of transcripts, NaNs."""


@pytest.mark.parametrize("name", [*SEEING, "gemma3", "whisper", "deepseek_v3"])
def test_nothing_about_sizes_is_assumed(worker: Worker, name: str) -> None:
    """Their own checks of tokens against features hold; tests/test_model.py trains the same batches on the host."""
    trace = worker.run(tiny_job(name), Plan(), parse_cluster("h100-80gb"), steps=1)
    assert trace.unknown_calls == {}
    made_up = ("checked", "selects every", "balanced")
    assert [text for text in trace.assumed if any(word in text for word in made_up)] == []
    pictures = [text for text in trace.assumed if "every sequence holds 1 image of" in text]
    assert len(pictures) == (name in SEEING or name == "gemma3")


def test_layers_that_run_again_in_backward_meet_the_same_sizes(worker: Worker) -> None:
    """Qwen 2.5's images are cut into windows in each layer; the engine's threads know their lengths too."""
    trace = worker.run(tiny_job("qwen2_5_vl"), Plan(checkpointing="full"), parse_cluster("h100-80gb"), steps=1)
    assert any(mark.phase == "recompute" for mark in trace.marks)


@pytest.mark.parametrize("name", COUNTING)
def test_what_is_counted_on_the_card_is_read_as_of_real_data(worker: Worker, name: str) -> None:
    job = Job(model=ModelRef(name=name, kind="config", config=COUNTING[name]), seq_len=24, micro_batch=2)
    trace = worker.run(job, Plan(precision="fp32"), parse_cluster("h100-80gb"), steps=1)
    assert any("balanced" in text for text in trace.assumed) is (name in ("jetmoe", "switch_transformers"))
    assert [text for text in trace.assumed if "selects every" in text] == []


def test_images_too_large_to_be_remembered_are_no_padding(worker: Worker) -> None:
    """Idefics 3 leaves out images that are zero everywhere; 1,025 tiles have 3 MiB of pixels."""
    job = Job(model=tiny("idefics3"), seq_len=1100, image_size="512x512")
    trace = worker.run(job, Plan(), parse_cluster("h100-80gb"), steps=1)
    assert "no computed number equals the constant that it is compared with" in trace.assumed
    assert "every sequence holds 1 image of 512 x 512 pixels, 1,025 tokens each" in trace.assumed
