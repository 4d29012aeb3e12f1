"""Every kind of network is counted as transformers builds it: its weights, its norms and their kind."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.catalog.models import find_model
from tonnage.estimates.step_time import price
from tonnage.job import Job
from tonnage.model import ModelRef
from tonnage.plans import Plan
from tonnage.timing.kinds import KINDS, TIMED, read_shape

STATED = {
    "hunyuan_v1_dense": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "dots1": {"n_shared_experts": 2, "n_routed_experts": 16, "num_experts_per_tok": 2},
    "deepseek_v2": {"n_shared_experts": 2, "n_routed_experts": 16, "num_experts_per_tok": 2},
    "bloom": {"hidden_size": 256},
    "qwen2_moe": {"decoder_sparse_step": 2},
    "stablelm": {"use_qkv_bias": True},
    "glm4_moe": {"attention_bias": True, "use_qk_norm": True},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 8, "num_attention_heads": 64, "hidden_size": 4096},
    "granitemoeshared": {"shared_intermediate_size": 1024},
    "electra": {"embedding_size": 256},
    "olmo": {"attention_bias": True},
}
"""Fields that a kind's usual configuration lacks, or that only some of its networks have."""


def build(kind, **stated):
    """Return the configuration of a kind, and the network on the meta device."""
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        pytest.skip(f"this transformers has no {kind}")
    config = AutoConfig.for_model(kind, **stated)
    encoder = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not read_shape(config.to_dict()).causal
    with torch.device("meta"):
        return config, (AutoModelForMaskedLM if encoder else AutoModelForCausalLM).from_config(config)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_counted_as_transformers_builds_them(kind):
    config, network = build(kind, **STATED.get(kind, {}))
    assert read_shape(config.to_dict()).parameters == sum(one.numel() for one in network.parameters())


@pytest.mark.parametrize("kind", ["electra", "falcon", "stablelm", "granitemoeshared", "cohere", "glm4_moe"])
def test_weights_are_counted_without_the_stated_fields(kind):
    config, network = build(kind, **({"use_qk_norm": True} if kind == "cohere" else {}))
    assert read_shape(config.to_dict()).parameters == sum(one.numel() for one in network.parameters())


WITHOUT_WEIGHTS = ("olmo", "modernbert")
"""Kinds whose norms lack a weight or a bias that Shape counts and takes off again."""


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in WITHOUT_WEIGHTS])
def test_norms_are_those_of_a_layer(kind):
    config, network = build(kind, **STATED.get(kind, {}))
    shape = read_shape(config.to_dict())
    layers = next(one for one in network.modules() if isinstance(one, nn.ModuleList) and len(one) == shape.layers)
    norms = [one for one in layers[-1].modules() if "norm" in type(one).__name__.lower()]
    weights = sum(one.numel() for norm in norms for one in norm.parameters(recurse=False))
    assert weights == shape.norm_parameters + shape.query_rank + shape.latent_rank
    assert shape.rms_norm == all(getattr(one, "bias", None) is None for one in norms)


def test_an_unmeasured_kind_has_a_wider_interval_and_says_so():
    config = find_model("llama-3.2-1b").config()
    llama, smollm = (
        price(
            Case(
                Job(model=ModelRef(name=kind, kind="config", config={**config, "model_type": kind}), seq_len=2048),
                Plan(),
                parse_cluster("h200"),
            ),
        )
        for kind in ("llama", "smollm3")
    )
    assert smollm.step_seconds == pytest.approx(llama.step_seconds)
    assert smollm.low_seconds < llama.low_seconds
    assert smollm.high_seconds > llama.high_seconds
    assert [one for one in smollm.assumed if "no step of a 'smollm3' network" in one]
    assert not [one for one in llama.assumed if "no step of" in one]


def test_timed_kinds_are_known():
    assert set(KINDS) >= TIMED


@pytest.mark.parametrize("kind", KINDS)
def test_flex_attention_is_available_where_the_shape_says_so(kind):
    config, network = build(kind, **STATED.get(kind, {}))
    shape = read_shape(config.to_dict())
    if shape.keeps_scores:
        assert shape.flexible == network._supports_flex_attn
        assert not network._supports_sdpa
