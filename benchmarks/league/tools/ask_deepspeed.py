"""DeepSpeed's estimator for ZeRO-2 on one GPU without offload: 18 bytes a parameter."""

from typing import Any

from answering import answer, meta_model
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs


def ask(row: dict[str, Any]) -> tuple[float, str]:
    parameters = sum(parameter.numel() for parameter in meta_model(row["model"]).parameters())
    _cpu, gpu = estimate_zero2_model_states_mem_needs(parameters, num_gpus_per_node=1, cpu_offload=False)
    return gpu, "model states of ZeRO-2, fp16; no activations"


answer(ask)
