"""Learned positions read from a configuration equal those of the network built from it."""

from dataclasses import replace

import pytest

from tonnage.catalog.families import learned_positions, types_with
from tonnage.errors import UsageError
from tonnage.job import Job, check_sequences
from tonnage.model import ModelRef
from tonnage.trainers.cases import request

SMALL = {
    **{
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "vocab_size": 64,
    },
    **{"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "n_embd": 32, "n_layer": 1, "n_head": 2},
    **{"embedding_size": 32, "num_layers": 1, "attention_types": [[["global"], 1]], "word_embed_proj_dim": 32},
    **{"ffn_dim": 32, "dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 32, "attention_window": 2},
}


@pytest.mark.parametrize("kind", types_with("learned_positions"))
def test_learned_positions_equal_those_of_the_built_network(kind: str) -> None:
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSpeechSeq2Seq

    from tonnage.step.model import longest_text

    small = SMALL | ({"pad_token_id": 0} if kind == "whisper" else {})  # its default is beyond the small vocabulary
    config = CONFIG_MAPPING[kind](
        **{name: value for name, value in small.items() if _has(CONFIG_MAPPING[kind], name)}
    )
    masked = kind in ("albert", "distilbert", "longformer", "mpnet", "layoutlm", "convbert", "mobilebert")
    head = AutoModelForMaskedLM if masked else AutoModelForCausalLM
    head = AutoModelForSpeechSeq2Seq if kind == "whisper" else head
    with torch.device("meta"):
        network = head.from_config(config)
    model = ModelRef(name=kind, kind="config", config=config.to_dict())
    assert learned_positions(model) == longest_text(network)


def _has(kind: type, name: str) -> bool:
    return name in kind.__init__.__code__.co_varnames or name in getattr(kind, "__annotations__", {})


def test_table_with_room_for_padding_alone_is_unknown() -> None:
    for positions in (1, 2):
        model = ModelRef(
            name="a", kind="config", config={"model_type": "roberta", "max_position_embeddings": positions}
        )
        assert learned_positions(model) is None
    assert learned_positions(replace(model, config={**model.config, "max_position_embeddings": 3})) == 1


def test_default_sequence_length_is_at_most_the_learned_positions() -> None:
    assert request("gpt2", offline=True)[0].seq_len == 1024
    assert request("gpt2", offline=True, seq_len=512)[0].seq_len == 512
    assert request("whisper-large-v3", offline=True)[0].seq_len == 448
    assert request("llama-3.2-1b", offline=True)[0].seq_len == Job().seq_len
    job, _ = request("gpt2", offline=True, seq_len=1025)
    with pytest.raises(
        UsageError, match="learned positions for 1024 tokens, and seq_len is 1025; choose at most 1024"
    ):
        check_sequences(job, learned_positions(job.model))
    check_sequences(replace(job, seq_len=1024), learned_positions(job.model))
