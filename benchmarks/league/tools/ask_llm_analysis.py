"""llm-analysis: a closed form for training in mixed precision, states and activations."""

import json
import tempfile
from pathlib import Path
from typing import Any

from answering import GIB, answer
from llm_analysis import config as tables
from llm_analysis.analysis import train

from tonnage.catalog.models import find_model

CARD = "a100-sxm-80gb"
IMAGINARY_GB = 8192
"""Memory that the card is given, for it asserts that the job fits."""


WHOLE_LAYERS = 2
"""The tool's word for recomputing all of each layer."""


def ask(row: dict[str, Any]) -> tuple[float, str]:
    tables.gpu_configs[CARD].mem_per_GPU_in_GB = IMAGINARY_GB
    known = find_model(row["model"])
    assert known is not None
    config = known.config()
    described = {
        "name": row["model"],
        "num_layers": config["num_hidden_layers"],
        "n_head": config["num_attention_heads"],
        "num_key_value_heads": config.get("num_key_value_heads", config["num_attention_heads"]),
        "hidden_dim": config["hidden_size"],
        "ffn_embed_dim": config["intermediate_size"],
        "expansion_ratio": config["intermediate_size"] / config["hidden_size"],
        "vocab_size": config["vocab_size"],
        "max_seq_len": row["seq_len"],
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{row['model']}.json"
        path.write_text(json.dumps(described))
        summary = train(
            model_name=str(path),
            gpu_name=CARD,
            batch_size_per_gpu=row["micro_batch"],
            seq_len=row["seq_len"],
            total_num_gpus=1,
            mlp_gated_linear_units=True,
            activation_recomputation=WHOLE_LAYERS if row["checkpointing"] == "full" else 0,
            total_num_tokens=row["seq_len"],
        )
    found = summary["weight_memory_per_gpu"] + summary["optimizer_state_memory_per_gpu"]
    found += summary["gradient_memory_per_gpu"] + summary["activation_memory_per_gpu"]
    return found, f"weights, gradients, states and activations added; {found / GIB:.0f} GiB at no one moment"


answer(ask)
