"""llm-analysis: a closed form for training in mixed precision, states and activations."""

import json
import tempfile
from pathlib import Path
from typing import Any

from answering import GIB, answer
from llm_analysis.analysis import train

from tonnage.catalog import find_model


def ask(row: dict[str, Any]) -> tuple[float, str]:
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
        "vocab_size": config["vocab_size"],
        "max_seq_len": row["seq_len"],
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{row['model']}.json"
        path.write_text(json.dumps(described))
        summary = train(
            model_name=str(path),
            gpu_name="a100-sxm-80gb",
            batch_size_per_gpu=row["micro_batch"],
            seq_len=row["seq_len"],
            total_num_gpus=1,
            mlp_gated_linear_units=True,
            total_num_tokens=row["seq_len"],
        )
    found = summary["weight_memory_per_gpu"] + summary["optimizer_state_memory_per_gpu"]
    found += summary["gradient_memory_per_gpu"] + summary["activation_memory_per_gpu"]
    return found, f"weights, gradients, states and activations added; {found / GIB:.0f} GiB at no one moment"


answer(ask)
