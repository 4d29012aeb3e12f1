"""examples/lora.py or examples/qlora.py, as a user would run it, for two steps.

They take the steps of fitcheck-llm's scripts/measure.py.  No weights are read: the model's folder holds its
configuration and nothing else.  Where transformers reads in threads, their order is that of `reading`.
"""

from __future__ import annotations

import runpy
import shutil
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

import torch
from benchmarks.accuracy.scripts.reading import Readers

IMPORTS = ("transformers.models.llama.modeling_llama", "peft", "bitsandbytes.nn")
EXAMPLES = Path(__file__).parents[3] / "examples"


def measure(
    model: str,
    attention: str,
    quantized: bool,
    micro_batch: int,
    seq_len: int,
    lora_rank: int,
    double_quant: bool = False,
) -> dict[str, int]:
    """Bytes at the peak of the whole run of fp16 LoRA under checkpointing."""
    from transformers import core_model_loading

    core_model_loading.ThreadPoolExecutor = Readers
    script = EXAMPLES / ("qlora.py" if quantized else "lora.py")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(str(files("tonnage") / "catalog" / "configs" / f"{model}.json"), Path(folder) / "config.json")
        sys.argv = [str(script), folder, "--attention", attention, "--rank", str(lora_rank), "--steps", "2"]
        sys.argv += ["--micro-batch", str(micro_batch), "--seq-len", str(seq_len)]
        sys.argv += ["--double"] if double_quant else []
        sys.path.insert(0, str(EXAMPLES))
        runpy.run_path(str(script), run_name="__main__")
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }
