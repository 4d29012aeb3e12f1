"""SimuMax: Megatron's mixed precision on one GPU, which is the nearest that it can be asked for."""

import json
import tempfile
from pathlib import Path
from typing import Any

from answering import answer
from simumax.core.config import ModelConfig, StrategyConfig, SystemConfig
from simumax.core.perf_llm import PerfLLM
from simumax.utils import get_simu_strategy_config, get_simu_system_config

from tonnage.catalog.models import find_model


def written(folder: str, name: str, document: dict[str, Any]) -> str:
    path = Path(folder) / name
    path.write_text(json.dumps(document))
    return str(path)


def ask(row: dict[str, Any]) -> tuple[float, str]:
    known = find_model(row["model"])
    assert known is not None
    config = known.config()
    model = {
        "model_type": "dense",
        "model_name": row["model"],
        "hidden_size": config["hidden_size"],
        "head_num": config["num_attention_heads"],
        "kv_head_num": config.get("num_key_value_heads", config["num_attention_heads"]),
        "head_size": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "intermediate_size": config["intermediate_size"],
        "layer_num": config["num_hidden_layers"],
        "vocab_size": config["vocab_size"],
        "use_swiglu": True,
    }
    strategy = json.loads(Path(get_simu_strategy_config("tp1_pp1_dp8_mbs1")).read_text())
    strategy |= {
        "seq_len": row["seq_len"],
        "micro_batch_size": row["micro_batch"],
        "micro_batch_num": 1,
        "world_size": 1,
        "enable_recompute": False,
    }
    if row["checkpointing"] == "full":
        layers = config["num_hidden_layers"]
        whole = {"recompute_granularity": "full_block", "recompute_layer_num": layers}
        strategy |= {"enable_recompute": True, **whole}
    with tempfile.TemporaryDirectory() as folder:
        perf = PerfLLM()
        perf.configure(
            strategy_config=StrategyConfig.init_from_config_file(written(folder, "strategy.json", strategy)),
            model_config=ModelConfig.init_from_config_file(written(folder, "model.json", model)),
            system_config=SystemConfig.init_from_config_file(get_simu_system_config("a100_pcie")),
        )
        perf.run_estimate()
        peak = perf.get_pp_stage_peak_mem(perf.analysis_mem(), "peak_mem")
    return max(peak.values()), "peak allocated of Megatron's mixed precision: fp32 master weights and gradients"


answer(ask)
