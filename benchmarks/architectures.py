"""Every architecture that transformers can train, one after the other, for two steps on a ghost.

    python benchmarks/architectures.py [TYPE ...]

Each model type of the mappings that tonnage trains from is built from its own default configuration, with at most
four layers, and run on a ghost card that is larger than any.  Prints Markdown: how many run, and what the others say,
in one line each.  A default configuration need not fit together: transformers then says so in its own words.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any, Final

from tonnage.device import parse_cluster
from tonnage.errors import CannotEstimate, TonnageError
from tonnage.ghost.pool import Worker
from tonnage.job import Job, ModelRef
from tonnage.plans import Plan

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
    **{"reformer": 4096, "perceiver": 2048, "phi4_multimodal": 2048},
}
"""Of a type or a task: room for an image or a sound and text, no more than there are positions.  Others: 128."""

CARD_BYTES: Final = 1 << 45


def shortened(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with at most LAYERS layers; lists with an entry for each layer are cut with them."""
    kept = {key: value for key, value in config.items() if key not in NAMED_BY_LAYERS}
    cut = {key: shortened(value) if isinstance(value, dict) else value for key, value in kept.items()}
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


FITTING: Final[dict[str, dict[str, Any]]] = {}
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
    from tonnage.heads import TASKS, head, trainable_types

    names = dict.fromkeys(name for task in TASKS if task != "features" for name in trainable_types()[task])
    return {name: head({"model_type": name}).task for name in names}


def outcome(worker: Worker, model_type: str) -> str | None:
    """None when two steps run; else why not, in one line."""
    try:
        config = configuration(model_type)
    except Exception as error:  # transformers' validation raises classes of several packages
        return f"transformers' own default: {' '.join(str(error).split())[:160]}"
    reference = ModelRef(name=model_type, kind="config", config=config)
    job = Job(model=reference, seq_len=SEQ_LEN.get(model_type, SEQ_LEN.get(types()[model_type], 128)))
    try:
        worker.run(job, Plan(), parse_cluster("h200", gpu_memory_bytes=CARD_BYTES), steps=2, log=False)
    except CannotEstimate as error:
        if "ended early" in str(error):
            raise
        return str(error)
    except TonnageError as error:
        return str(error)
    return None


def main() -> None:
    known = types()
    wanted = sys.argv[1:] or list(known)
    ran, asked = Counter[str](), Counter(known[name] for name in wanted)
    print("| model type | task | what it says |\n|---|---|---|")
    with Worker() as worker:
        for name in wanted:
            reason = outcome(worker, name)
            if reason is None:
                ran[known[name]] += 1
            else:
                print(f"| {name} | {known[name]} | {reason} |", flush=True)
    print("\n| task | types | run |\n|---|---|---|")
    for task, count in asked.items():
        print(f"| {task} | {count} | {ran[task]} |")
    print(f"| all | {asked.total()} | {ran.total()} |")


if __name__ == "__main__":
    main()
