"""A plan: the chosen techniques, as plain values that save to JSON.

The words of each option are here as data; `tonnage.techniques` and `tonnage.trainers` implement them.
"""

import re
from dataclasses import dataclass
from typing import Final

from tonnage.options import amount, check, number, switch, word

PRECISIONS: Final = ("bf16-mixed", "bf16-true", "fp16-mixed", "fp16-true", "fp32", "fp8", "megatron-bf16")
OPTIMIZERS: Final = (
    *("adamw", "adamw-loop", "adamw-foreach", "adamw-fused", "sgd", "sgd-plain", "adafactor", "muon"),
    *(
        "adamw-8bit",
        "paged-adamw",
        "paged-adamw-8bit",
        "lion",
        "lion-8bit",
        "adamw-8bit-ao",
        "adamw-4bit",
        "adamw-fp8-ao",
    ),
)
CHECKPOINTINGS: Final = (
    *("none", "full", "full-reentrant", "every-N", "selective", "attention-module", "attention", "sqrt"),
    "budget=SIZE",
)
ACTIVATION_OFFLOADS: Final = ("none", "cpu", "cpu-streamed", "nvme")
OPTIMIZER_OFFLOADS: Final = ("none", "cpu", "cpu=FRACTION", "nvme", "nvme=FRACTION")
SHARDS: Final = ("none", "ddp", "zero1", "zero2", "zero3", "hsdp")
PARAM_OFFLOADS: Final = ("none", "cpu", "nvme")
ATTENTIONS: Final = ("auto", "eager", "math", "efficient", "flash", "cudnn", "flex")
LOSSES: Final = ("plain", "chunked", "fused", "torch", "liger")
COMPILES: Final = ("none", "layers", "model")
OUTPUTS: Final = ("freed", "step", "loop")
ALLOCATORS: Final = ("default", "expandable")
ENGINES: Final = ("tonnage", "hf-trainer", "trl", "accelerate", "deepspeed", "torchtitan", "megatron", "axolotl")
DTYPES: Final = ("fp32", "bf16", "fp16")
PP_SCHEDULES: Final = ("1f1b", "interleaved", "gpipe")
CHUNK_TOKENS: Final = 1024
"""Tokens of one slice of a chunked loss; its logits in fp32 take 0.5 GiB for a vocabulary of 128,256.

Ranks that divide the vocabulary take as many times more tokens, so that each has the same bytes of logits: the fixed
cost of a slice, which is the host's work and two all-reduces, does not shrink with its length.
"""

HEADROOM: Final = 0.04
"""Fraction of a GPU's memory that is left free by default."""
QUANTS: Final = ("nf4", "nf4-double", "fp4", "fp4-double", "int8")

_EVERY = re.compile(r"every-([1-9][0-9]*)")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One value of every technique family; the defaults are what a plain PyTorch loop does under autocast."""

    precision: str = word("bf16-mixed", "Dtypes of weights and computation.", PRECISIONS)
    weights_dtype: str | None = word(None, "Dtype of weights that are trained; default: the precision's.", DTYPES)
    reduce_dtype: str | None = word(None, "Dtype in which gradients are averaged; default: the precision's.", DTYPES)
    base_dtype: str | None = word(None, "Dtype of LoRA's frozen weights; default: that of computation.", DTYPES)
    quant: str = word("nf4", "How qlora keeps frozen weights; -double: their scales in 8 bits too.", QUANTS)
    unquantized_dtype: str = word(
        "fp32",
        "Dtype of what qlora does not quantize: as PEFT casts it, or that of computation.",
        ("fp32", "compute"),
    )
    optimizer: str = word("adamw", "The optimizer; adamw is as torch chooses it.", OPTIMIZERS)
    clip_grad_norm: float | None = amount(None, "Norm to which gradients are scaled down before each step.")
    checkpointing: str = word("none", "Layers that recompute activations in backward.", CHECKPOINTINGS)
    activation_offload: str = word("none", "Where the layers' activations wait for backward.", ACTIVATION_OFFLOADS)
    optimizer_in_backward: bool = switch("Update each parameter in backward, and let its gradient go.")
    optimizer_offload: str = word(
        "none",
        "Where optimizer states rest, all or a part; the optimizer runs there.",
        OPTIMIZER_OFFLOADS,
    )
    shard: str = word("none", "What is divided among the data-parallel ranks.", SHARDS)
    accum_sync: bool = switch("Average gradients after each micro-batch, not only after the last.")
    tp: int = number(1, "Ranks that share each matrix: tensor parallelism, within a machine.")
    sequence_parallel: str = word(
        "auto",
        "Whether ranks of tp divide the sequence between the matrices; auto: with tp above 1.",
        ("auto", "on", "off"),
    )
    pp: int = number(1, "Ranks one behind the other, each with some layers: pipeline parallelism.")
    pp_schedule: str = word("1f1b", "In which order stages work on micro-batches.", PP_SCHEDULES)
    pp_stages: int = number(2, "Stages on each rank of an interleaved pipeline.", least=2)
    cp: int = number(1, "Ranks that share a sequence: context parallelism by ring attention.")
    ep: int = number(1, "Ranks that share the experts, among those that divide parameters: expert parallelism.")
    param_offload: str = word("none", "Where sharded parameters, gradients and states rest.", PARAM_OFFLOADS)
    attention: str = word("auto", "The attention backend; auto: torch chooses.", ATTENTIONS)
    loss: str = word("plain", "The loss on all logits, or in slices.", LOSSES)
    compile: str = word("none", "What torch.compile works on: each layer, or the network.", COMPILES)
    outputs: str = word(
        "freed",
        "How long the loop keeps what the network returned: not in backward, through the step, or the next forward.",
        OUTPUTS,
    )
    engine: str = word("tonnage", "Who runs the step; tonnage: its own plain loop.", ENGINES)
    allocator: str = word("default", "The caching allocator's mode.", ALLOCATORS)

    def __post_init__(self) -> None:
        check(self)

    @property
    def checkpoint_interval(self) -> int | None:
        """Return N of `every-N`: each N-th layer is checkpointed; None for the other choices."""
        match = _EVERY.fullmatch(self.checkpointing)
        return int(match[1]) if match else None

    @property
    def compute_dtype(self) -> str:
        """Return the dtype in which matrix products run: `bf16`, `fp16` or `fp32`."""
        return {"fp8": "bf16", "megatron-bf16": "bf16"}.get(self.precision, self.precision.split("-")[0])

    def adapters_dtype(self, method: str) -> str:
        """Return the dtype of LoRA's adapters under `method`: `fp32`, unless the precision is a narrow one.

        Adapters beside fp16 weights stay fp32, because fp16 would lose their small steps.
        """
        beside_fp32 = self.unquantized_dtype == "fp32" if method == "qlora" else self.compute_dtype == "fp16"
        usual = "fp32" if beside_fp32 or self.precision.endswith("-mixed") else self.compute_dtype
        return self.weights_dtype or usual
