"""Settings that trainers have and tonnage neither runs nor writes.

    >>> find_not_run("hf-trainer", "shard", "zero1")
    'TrainingArguments.deepspeed'

A refusal then says that tonnage does not run the setting, not that the trainer has none.  A setting that the
installed version has not is not named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tonnage.trainers import packages


@dataclass(frozen=True)
class Setting:
    """A field of a trainer's dataclass."""

    package: str
    """The package that is imported."""
    file: str
    """The file of the class within the package."""
    owner: str
    """The name of the class."""
    field: str
    """The name of the field."""

    def is_absent(self) -> bool:
        """Return whether the installed version has the class, and not the field."""
        known = packages.fields(self.package, self.file, self.owner)
        return bool(known) and self.field not in known

    def __str__(self) -> str:
        return f"{self.owner}.{self.field}"


def _trainer(field: str) -> Setting:
    return Setting("transformers", "training_args.py", "TrainingArguments", field)


def _accelerate(owner: str, field: str) -> Setting:
    file = "parallelism_config.py" if owner == "ParallelismConfig" else "utils/dataclasses.py"
    return Setting("accelerate", file, owner, field)


def _deepspeed(file: str, owner: str, field: str) -> Setting:
    return Setting("deepspeed", f"runtime/{file}.py", owner, field)


def _axolotl(field: str) -> Setting:
    return Setting("axolotl", "utils/schemas/config.py", "AxolotlInputConfig", field)


def _llama_factory(file: str, owner: str, field: str) -> Setting:
    return Setting("llamafactory", f"hparams/{file}.py", owner, field)


def _megatron(file: str, owner: str, field: str) -> Setting:
    return Setting("megatron", f"core/{file}.py", owner, field)


_BY_DEEPSPEED: Final = ("shard=zero1", "optimizer_offload", "param_offload=nvme")
"""Values that trainers have by DeepSpeed, a configuration of which they all take."""

_REGIONAL: Final = {"compile=layers": _accelerate("TorchDynamoPlugin", "use_regional_compilation")}

_POLICY: Final = {"reduce_dtype": _accelerate("FullyShardedDataParallelPlugin", "mixed_precision_policy")}

_TRAINER: Final = {
    **dict.fromkeys(_BY_DEEPSPEED, _trainer("deepspeed")),
    **_REGIONAL,
    **_POLICY,
    "checkpointing=full-reentrant": _trainer("activation_checkpointing_kwargs"),
    "tp": _accelerate("ParallelismConfig", "tp_size"),
    "eval_batch": _trainer("per_device_eval_batch_size"),
    "eval_logits": _trainer("eval_accumulation_steps"),
    "resume": _trainer("resume_from_checkpoint"),
    "save_checkpoint": _trainer("save_strategy"),
}

_MEGATRON: Final = {
    "precision=fp8": _megatron("transformer/transformer_config", "TransformerConfig", "fp8"),
    "activation_offload": _megatron("model_parallel_config", "ModelParallelConfig", "cpu_offloading"),
    "optimizer_offload": _megatron("optimizer/optimizer_config", "OptimizerConfig", "optimizer_cpu_offload"),
    "optimizer": _megatron("optimizer/optimizer_config", "OptimizerConfig", "optimizer"),
    "pp_schedule=interleaved": _megatron(
        "model_parallel_config", "ModelParallelConfig", "virtual_pipeline_model_parallel_size"
    ),
    **dict.fromkeys(
        ("shard=zero2", "shard=zero3", "shard=hsdp"),
        _megatron(
            "distributed/distributed_data_parallel_config", "DistributedDataParallelConfig", "use_megatron_fsdp"
        ),
    ),
}

NOT_RUN: Final[Mapping[str, Mapping[str, Setting | str]]] = {
    "hf-trainer": _TRAINER,
    "trl": {
        **_TRAINER,
        "activation_offload": Setting("trl", "trainer/sft_config.py", "SFTConfig", "activation_offloading"),
    },
    "accelerate": {
        "shard=zero1": _accelerate("DeepSpeedPlugin", "zero_stage"),
        "optimizer_offload": _accelerate("DeepSpeedPlugin", "offload_optimizer_device"),
        "param_offload=nvme": _accelerate("DeepSpeedPlugin", "offload_param_device"),
        "compile=model": _accelerate("TorchDynamoPlugin", "backend"),
        **_REGIONAL,
        **_POLICY,
        "tp": _accelerate("ParallelismConfig", "tp_size"),
        "cp": _accelerate("ParallelismConfig", "cp_size"),
        "pp": _accelerate("MegatronLMPlugin", "pp_degree"),
        "ep": _accelerate("MegatronLMPlugin", "expert_model_parallel_size"),
    },
    "deepspeed": {
        "precision=bf16-true": _deepspeed("precision_config", "DeepSpeedBF16Config", "bf16_master_weights_and_grads"),
        "precision=fp16-true": _deepspeed("precision_config", "DeepSpeedFP16Config", "fp16_master_weights_and_grads"),
        "shard=hsdp": _deepspeed("zero/config", "DeepSpeedZeroConfig", "zero_hpz_partition_size"),
        "optimizer_offload=cpu": _deepspeed("zero/offload_config", "DeepSpeedZeroOffloadOptimizerConfig", "ratio"),
        "tp": _deepspeed("tensor_parallel/config", "TPTrainingConfig", "autotp_size"),
        "reduce_dtype": "communication_data_type of its configuration",
        "activation_offload=cpu": "activation_checkpointing.cpu_checkpointing of its configuration",
        "optimizer=lion": "its optimizer Lion",
        "optimizer=muon": "its optimizer Muon",
        "compile": "DeepSpeedEngine.compile",
        "pp": "deepspeed.pipe.PipelineModule",
        "cp": "deepspeed.sequence.layer.DistributedAttention",
        "ep": "deepspeed.moe.layer.MoE",
    },
    "torchtitan": {
        "pp": Setting("torchtitan", "config/configs.py", "ParallelismConfig", "pipeline_parallel_degree"),
        "cp": Setting("torchtitan", "config/configs.py", "ParallelismConfig", "context_parallel_degree"),
        "checkpointing=budget": "MemoryBudgetAC",
        "precision=fp8": "Float8LinearConverter",
    },
    "axolotl": {
        **dict.fromkeys(_BY_DEEPSPEED, _axolotl("deepspeed")),
        "precision=fp8": _axolotl("fp8"),
        "activation_offload": _axolotl("activation_offloading"),
        "packing": _axolotl("sample_packing"),
        "tp": _axolotl("tensor_parallel_size"),
        "cp": _axolotl("context_parallel_size"),
        "resume": _axolotl("resume_from_checkpoint"),
        "save_checkpoint": _axolotl("save_strategy"),
        "eval_batch": _axolotl("eval_strategy"),
        "loss=fused": "axolotl.integrations.cut_cross_entropy",
    },
    "llama-factory": {
        **{option: setting for option, setting in _TRAINER.items() if option != "checkpointing=full-reentrant"},
        "precision=fp8": _llama_factory("training_args", "Fp8Arguments", "fp8"),
        "optimizer=muon": _llama_factory("finetuning_args", "FinetuningArguments", "use_muon"),
        "packing": _llama_factory("data_args", "DataArguments", "neat_packing"),
    },
    "megatron": {
        **_MEGATRON,
        "cp": _megatron("model_parallel_config", "ModelParallelConfig", "context_parallel_size"),
    },
    "megatron-bridge": {
        **_MEGATRON,
        "ep": _megatron("model_parallel_config", "ModelParallelConfig", "expert_model_parallel_size"),
        "method=lora": "megatron.bridge.peft",
    },
}
"""For each engine and target the setting that does what an option says, or one value of it (`shard=zero1`)."""


def find_not_run(trainer: str, option: str, value: Any) -> str | None:
    """Return the trainer's setting for this value of an option, if it has one that tonnage does not run."""
    known = NOT_RUN.get(trainer, {})
    kind = str(value).partition("=")[0]  # `budget` of `budget=4GiB`
    setting = known.get(f"{option}={kind}", known.get(option))
    return None if setting is None or (isinstance(setting, Setting) and setting.is_absent()) else str(setting)
