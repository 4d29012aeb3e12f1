"""Tiny networks of the architectures that the tests train, built from configurations, without dropout."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tonnage.job import Job
from tonnage.model import ModelRef

_GROUPED = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}

TINY: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_GROUPED},
    "qwen3": {"model_type": "qwen3", **_GROUPED, "head_dim": 16, "tie_word_embeddings": True},
    "gemma2": {"model_type": "gemma2", **_GROUPED, "head_dim": 8, "final_logit_softcapping": 3.0},
    "granite": {"model_type": "granite", **_GROUPED, "logits_scaling": 4.0},
    "cohere": {"model_type": "cohere", **_GROUPED, "logit_scale": 0.5},
    "mixtral": {"model_type": "mixtral", **_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_GROUPED,
        "head_dim": 16,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        **_GROUPED,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **_GROUPED,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "vocab_size": 61,
        "n_positions": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "bert": {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 61,
        "max_position_embeddings": 64,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "t5": {
        "model_type": "t5",
        "is_encoder_decoder": True,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 3,
        "num_heads": 4,
        "vocab_size": 61,
        "dropout_rate": 0.0,
    },
    "vit": {
        "model_type": "vit",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 4,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
}
TINY["gemma3"] = {
    "model_type": "gemma3",
    "text_config": {"model_type": "gemma3_text", **_GROUPED, "head_dim": 8},
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
        "vision_use_head": False,
    },
    "mm_tokens_per_image": 4,
    "image_token_index": 60,
}

_TEXT = {"model_type": "llama", **_GROUPED, "head_dim": 8}
_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "projection_dim": 32,
    "image_size": 16,
    "patch_size": 8,
}
_SIGLIP = {**TINY["gemma3"]["vision_config"], "image_size": 16}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}

SEEING: dict[str, dict[str, Any]] = {
    "llava": {
        "model_type": "llava",
        "text_config": _TEXT,
        "vision_config": _CLIP,
        "image_token_index": 60,
    },
    "llava_next": {
        "model_type": "llava_next",
        "text_config": _TEXT,
        "vision_config": _CLIP,
        "image_token_index": 60,
        "image_grid_pinpoints": [[16, 32], [32, 16]],
    },
    "paligemma": {
        "model_type": "paligemma",
        "text_config": {**_TEXT, "model_type": "gemma"},
        "vision_config": _SIGLIP,
        "image_token_index": 60,
        "projection_dim": 32,
    },
    "idefics3": {
        "model_type": "idefics3",
        "text_config": _TEXT,
        "vision_config": {**_SIGLIP, "model_type": "idefics3_vision"},
        "image_token_id": 60,
        "scale_factor": 2,
    },
    "mistral3": {
        "model_type": "mistral3",
        "text_config": {**_TEXT, "model_type": "mistral"},
        "vision_config": {**_CLIP, "model_type": "pixtral", "head_dim": 8},
        "image_token_index": 60,
        "spatial_merge_size": 2,
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        "text_config": {**_TEXT, "model_type": "qwen2_5_vl_text", "rope_parameters": _ROPE},
        "vision_config": {
            **{"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32},
            **{"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]},
        },
        "image_token_id": 60,
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "text_config": {**_TEXT, "model_type": "qwen3_vl_text", "rope_parameters": _ROPE},
        "vision_config": {
            **{"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32},
            **{"patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        },
        "image_token_id": 60,
    },
    "mllama": {
        "model_type": "mllama",
        "text_config": {
            **{**_TEXT, "model_type": "mllama_text_model", "cross_attention_layers": [1]},
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        },
        "vision_config": {
            **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_global_layers": 1},
            **{"attention_heads": 4, "vision_output_dim": 64, "image_size": 16, "patch_size": 8},
            **{"intermediate_layers_indices": [0]},
        },
    },
}
"""Networks that see images, one of each way in which they get them."""

TINY |= SEEING
TINY["whisper"] = {
    "model_type": "whisper",
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 8, "vocab_size": 61},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
    **{"max_source_positions": 12, "max_target_positions": 32},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
}

EVERY_KIND = ("llama", "qwen3", "mixtral", "gpt2", "bert", "t5", "vit")
"""One of each kind of network that is trained differently."""


def tiny(name: str, **changes: Any) -> ModelRef:
    """Return a reference to a tiny network, with some fields of its configuration changed."""
    return ModelRef(name=name, kind="config", config={**TINY[name], **changes})


def tiny_job(name: str = "llama", **fields: Any) -> Job:
    """Return a job on a tiny network with sequences of 24 tokens."""
    size = {"image_size": "32x16"} if name in ("llava_next", "idefics3", "mistral3", "qwen2_5_vl", "qwen3_vl") else {}
    return Job(**{"model": tiny(name), "seq_len": 24, "micro_batch": 2, **size, **fields})


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Limit a module that imports this to one thread: small tensors gain nothing from threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
