"""Every architecture that transformers can train, one after the other, for two steps on a ghost.

    python benchmarks/architectures.py [TYPE ...]

Each model type that has a class with a head is built from its own default configuration, with at most four layers,
and run on a ghost card that is larger than any.  Prints Markdown for docs/reference/models.md: by task how many run,
and what the others say, in one line each.  A default configuration need not fit together: where fields are known that
make it, they are in FITTING; where transformers alone cannot build the network either, the type is counted apart.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections import Counter
from typing import Any, Final

from tonnage.catalog.devices import parse_cluster
from tonnage.errors import CannotEstimate, TonnageError
from tonnage.job import Job
from tonnage.model import ModelRef
from tonnage.options import replace_checked
from tonnage.plans import Plan
from tonnage.workers.worker import Worker

LAYERS: Final = 4
"""Enough for every kind of layer that the default patterns hold."""

COUNTS: Final = (
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "num_blocks"),
    *("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"),
)
"""Fields of a configuration that count layers."""

NAMED_BY_LAYERS: Final = ("out_features", "out_indices", "stage_names", "per_layer_config")
"""Fields that follow from the number of layers."""

SEQ_LEN: Final = {
    **{"image-text-to-text": 8192, "speech-seq2seq": 256, "ctc": 128},
    **{"blip": 512, "git": 1024, "udop": 512, "idefics": 2048, "vision-encoder-decoder": 512, "pix2struct": 512},
    **dict.fromkeys(("audioflamingo3", "glmasr", "granite_speech", "granite_speech_plus", "musicflamingo"), 2048),
    **dict.fromkeys(("moss_transcribe_diarize", "qwen2_audio", "qwen3_asr", "voxtral", "fun_asr_nano"), 2048),
    **dict.fromkeys(("nemo_speechlm", "vibevoice_asr"), 2048),
    **{"reformer": 4096, "perceiver": 2048, "blip-2": 2048, "instructblip": 2048, "instructblipvideo": 2048},
    **{"emu3": 16384, "florence2": 1024, "pp_formulanet": 512, "kosmos-2": 1024, "kosmos-2.5": 4096},
}
"""Of a type or a task: room for an image or a sound and text, no more than there are positions.  Others: 128."""

CARD_BYTES: Final = 1 << 45


def shortened(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with at most LAYERS layers; lists with an entry for each layer are cut with them."""
    cuts = any(isinstance(config.get(name), int) and config[name] > LAYERS for name in COUNTS)
    kept = {key: value for key, value in config.items() if not (cuts and key in NAMED_BY_LAYERS)}
    cut: dict[str, Any] = {key: shortened(value) if isinstance(value, dict) else value for key, value in kept.items()}
    if "intermediate_layers_indices" in cut:  # Llama 3.2's vision tower names layers by their numbers
        return cut
    for name in COUNTS:
        count = cut.get(name)
        if isinstance(count, int) and count > LAYERS:
            cut |= {key: value[:LAYERS] for key, value in cut.items() if _one_each(value, count)}
            cut[name] = LAYERS
    return cut


def _one_each(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count


_SIGLIP: Final = {"image_size": 896, "patch_size": 14, "vision_use_head": False}
_RESNET: Final = {
    **{"backbone": None, "use_timm_backbone": False, "use_pretrained_backbone": False},
    "backbone_config": {"model_type": "resnet", "out_features": ["stage2", "stage3", "stage4"]},
}
_LAST: Final = {
    **_RESNET,
    "backbone_config": {"model_type": "resnet", "out_features": ["stage4"], "out_indices": [4]},
}
_FOUR: Final = {"model_type": "resnet", "out_features": ["stage1", "stage2", "stage3", "stage4"]}
_FORECAST: Final = {"prediction_length": 24, "context_length": 48}

FITTING: Final[dict[str, dict[str, Any]]] = {
    "aria": {"vision_config": {"image_size": 980, "patch_size": 14}},
    "autoformer": _FORECAST,
    "aya_vision": {"vision_config": {"num_attention_heads": 16, "image_size": 364}},
    "blip-2": {"image_token_index": 50265, "text_config": {"vocab_size": 50304}},
    "chameleon": {"image_token_id": 8711, "vocabulary_map": {"<image>": 8711, "IMGIMGBZ": 4}},
    "conditional_detr": _LAST,
    "dab-detr": _LAST,
    "dbrx": {"attn_config": {"rope_theta": 500000.0, "kv_n_heads": 8, "clip_qkv": 8}},
    "deepseek_v2": {
        **{"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "topk_method": "greedy"},
        **{"first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 512, "moe_intermediate_size": 1408},
    },
    "deformable_detr": _RESNET,
    "detr": _LAST,
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "dpt": {"is_hybrid": False, "backbone_out_indices": [0, 1, 2, 3]},
    "emu3": {"vocabulary_map": {"<image>": 151851}},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "gemma3": {"vision_config": _SIGLIP},
    "gemma4": {"vision_config": {"model_type": "gemma4_vision"}},
    "gemma4_unified": {"vision_config": {"model_type": "gemma4_unified_vision"}},
    "glm46v": {"text_config": {"rope_parameters": {"mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}}},
    "glm4v": {"text_config": {"rope_parameters": {"mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}}},
    "glm4v_moe": {
        "text_config": {
            "head_dim": 128,
            "rope_parameters": {"mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5},
        }
    },
    "glmga": {"text_config": {"rope_parameters": {"mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}}},
    "granite_speech": {"projector_config": {"encoder_hidden_size": 1024}, "text_config": {"vocab_size": 49160}},
    "granite_speech_plus": {"projector_config": {"encoder_hidden_size": 1024}, "text_config": {"vocab_size": 49160}},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "hunyuan_vl": {"text_config": {"head_dim": 128, "rope_parameters": {"mrope_section": [16, 16, 16, 16]}}},
    "idefics3": {"vision_config": {"image_size": 364, "patch_size": 14}},
    "informer": _FORECAST,
    "instructblip": {"image_token_index": 32000, "text_config": {"vocab_size": 32001}},
    "instructblipvideo": {"video_token_index": 32000, "text_config": {"vocab_size": 32001}},
    "janus": {
        "text_config": {
            **{"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400}
        }
    },
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lw_detr": {
        "backbone_config": {"out_indices": [2, 4]},
        "projector_scale_factors": [1.0],
        "num_feature_levels": 1,
    },
    "llama4": {
        "vision_config": {
            **{"hidden_size": 1408, "image_size": 336, "projector_input_dim": 4096, "projector_output_dim": 4096},
            **{"vision_output_dim": 4096},
        }
    },
    "ministral": {"head_dim": 128},
    "molmo2": {"adapter_config": {"vision_feature_layer": [3, 2]}},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "nemotron_h_omni": {"image_token_id": 18},
    "ovis2": {"hidden_size": 4096},
    "pp_doclayout_v2": {"class_thresholds": [0.5] * 25, "class_order": [*range(25)]},
    "qwen2_vl": {"text_config": {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}},
    "qwen3_asr": {"audio_config": {"output_dim": 2048}},
    "qwen3_omni_moe_thinker": {
        "text_config": {"num_attention_heads": 32, "vocab_size": 152064, "head_dim": 128},
        "vision_config": {"out_hidden_size": 2048},
        "audio_config": {"output_dim": 2048},
    },
    "shieldgemma2": {"vision_config": _SIGLIP},
    "smolvlm": {"vision_config": {"image_size": 512, "patch_size": 16}},
    "step3p7": {"text_config": {"sliding_window": 512}},
    "t5gemma2": {"encoder": {"vision_config": _SIGLIP}},
    "table-transformer": _LAST,
    "time_series_transformer": _FORECAST,
    "tipsv2_dpt": {"backbone_config": {"out_indices": [1, 2, 3, 4]}},
    "upernet": {"backbone_config": _FOUR},
    "vipllava": {"vision_feature_layers": [-2, -3], "vision_config": {"hidden_size": 1024}},
    "voxtral": {"audio_token_id": 24},
    "wav2vec2-bert": {"vocab_size": 32},
    "wav2vec2-conformer": {"vocab_size": 32},
    "zamba": {"num_hidden_layers": 12, "layers_block_type": ["mamba"] * 5 + ["hybrid"] + ["mamba"] * 5 + ["hybrid"]},
}
"""Fields without which a type's default configuration does not fit together; their values are published ones."""


def configuration(model_type: str) -> dict[str, Any]:
    """The default configuration of a type, shortened; projections into the text model as wide as the text model."""
    from transformers import CONFIG_MAPPING

    plain = CONFIG_MAPPING[model_type]().to_dict()
    config = shortened(json.loads(json.dumps(plain, default=str)))
    vision, text = config.get("vision_config"), config.get("text_config")
    if isinstance(vision, dict) and isinstance(text, dict) and "out_hidden_size" in vision:
        vision["out_hidden_size"] = text["hidden_size"]
    return merged(config, FITTING.get(model_type, {}))


def merged(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The configuration with fields changed, within its parts too."""
    whole = dict(config)
    for name, value in changes.items():
        inner = whole.get(name)
        whole[name] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return whole


def types() -> dict[str, str]:
    """All model types that have a class with a head, each with the first task that it is listed for."""
    from tonnage.step.heads import TASKS, head, trainable_types

    names = dict.fromkeys(name for task in TASKS if task != "features" for name in trainable_types()[task])
    return {name: head({"model_type": name}).task for name in names}


def outcome(worker: Worker, model_type: str) -> str | None:
    """None when two steps run, FP32 when only without autocast; else why not, in one line.

    Code that does not survive autocast (RuntimeErrors about bfloat16, on a real card too) is run in fp32.
    """
    try:
        config = configuration(model_type)
    except Exception as error:  # transformers' validation raises classes of several packages
        return f"{OWN} {' '.join(str(error).split())[:160]}"
    reason = _ran(worker, model_type, config, "bf16-mixed")
    if reason is not None and "BFloat16" in reason:
        reason = _ran(worker, model_type, config, "fp32") or FP32
    if reason is not None and reason != FP32:
        own = _transformers_alone(model_type, config)
        return reason if own is None else f"{OWN} {own}"
    return reason


FP32: Final = "in fp32 alone"
"""The outcome of a type whose code does not survive autocast."""

OWN: Final = "the default configuration:"
"""What precedes a reason that transformers alone gives as well."""


def _ran(worker: Worker, model_type: str, config: dict[str, Any], precision: str) -> str | None:
    reference = ModelRef(name=model_type, kind="config", config=config)
    seq_len = SEQ_LEN.get(model_type, SEQ_LEN.get(types()[model_type], 128))
    job = Job(model=reference, seq_len=seq_len, micro_batch=2)
    cluster = parse_cluster("h200", gpu_memory_bytes=CARD_BYTES)
    try:
        worker.run(job, replace_checked(Plan(), {"precision": precision}), cluster, steps=2)
    except CannotEstimate as error:
        if "ended early" in str(error):
            raise
        return str(error)
    except TonnageError as error:
        return str(error)
    return None


def _transformers_alone(model_type: str, config: dict[str, Any]) -> str | None:
    """What transformers says to the network without tonnage; None if it can be built."""
    import torch
    import transformers

    from tonnage.step.heads import head

    fields = {key: value for key, value in config.items() if key != "model_type"}
    try:
        with torch.device("meta"):
            made = getattr(transformers, head({"model_type": model_type}).class_name)
            made._from_config(transformers.AutoConfig.for_model(model_type, **fields))
    except Exception as error:  # whatever it says
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return None


KINDS: Final = ("run", "fp32", "library", "no loss", "default", "refused")
"""What becomes of a type; see `kind`."""

_NO_LOSS: Final = ("does not support training", "Training is not implemented", "without a loss")


def kind(reason: str | None) -> str:
    """Of KINDS the one that an outcome belongs to."""
    if reason is None or reason == FP32:
        return "run" if reason is None else "fp32"
    if reason.startswith(OWN):
        return "library" if "requires the" in reason or "No module named" in reason else "default"
    if "requires the" in reason:
        return "library"
    return "no loss" if any(text in reason for text in _NO_LOSS) else "refused"


def table(found: dict[str, str | None]) -> str:
    """By task how many types there are of each kind, then every type that does not run, with what it says."""
    known = types()
    counts = Counter((known[name], kind(reason)) for name, reason in found.items())
    head = ("task", "types", "run", "in fp32 alone", "a library is missing", "no loss in transformers")
    lines = [f"| {' | '.join((*head, 'the default does not fit together', 'refused'))} |", "|---|" + "---:|" * 7]
    tasks = list(dict.fromkeys(known[name] for name in found))
    for task in (*tasks, "all"):
        cells = [sum(counts[each, what] for each in tasks if task in (each, "all")) for what in KINDS]
        lines.append(f"| {task} | {sum(cells)} | {' | '.join(map(str, cells))} |")
    lines += ["", "| model type | task | what it says |", "|---|---|---|"]
    for name, reason in found.items():
        if reason is not None and kind(reason) != "fp32":
            told = textwrap.shorten(reason.removeprefix(OWN), 160, placeholder=" ...")
            lines.append(f"| {name} | {known[name]} | {told} |")
    return "\n".join(lines)


def main() -> None:
    wanted = sys.argv[1:] or list(types())
    with Worker() as worker:
        print(table({name: outcome(worker, name) for name in wanted}))


if __name__ == "__main__":
    main()
