"""A plan: the chosen techniques, as plain values that save to JSON.

The values of each option are here as data; `tonnage.techniques` and `tonnage.trainers` implement them.
"""

import re
from dataclasses import dataclass
from typing import Final, Literal, TypedDict, get_args

from tonnage.options import amount, check, number, repr_of_changes, switch, word

Precision = Literal["bf16-mixed", "bf16-true", "fp16-mixed", "fp16-true", "fp32", "fp8", "megatron-bf16"]
PRECISIONS: Final[tuple[str, ...]] = get_args(Precision)
Optimizer = Literal[
    "adamw",
    "adamw-loop",
    "adamw-foreach",
    "adamw-fused",
    "sgd",
    "sgd-plain",
    "adafactor",
    "muon",
    "adamw-8bit",
    "paged-adamw",
    "paged-adamw-8bit",
    "lion",
    "lion-8bit",
    "adamw-8bit-ao",
    "adamw-4bit",
    "adamw-fp8-ao",
]
OPTIMIZERS: Final[tuple[str, ...]] = get_args(Optimizer)
Checkpointing = Literal["none", "full", "full-reentrant", "selective", "attention-module", "attention", "sqrt"] | str
CHECKPOINTINGS: Final = (
    "none",
    "full",
    "full-reentrant",
    "every-N",
    "selective",
    "attention-module",
    "attention",
    "sqrt",
    "budget=SIZE",
)
ActivationOffload = Literal["none", "cpu", "cpu-streamed", "nvme"]
ACTIVATION_OFFLOADS: Final[tuple[str, ...]] = get_args(ActivationOffload)
OptimizerOffload = Literal["none", "cpu", "nvme"] | str
OPTIMIZER_OFFLOADS: Final = ("none", "cpu", "cpu=FRACTION", "nvme", "nvme=FRACTION")
Shard = Literal["none", "ddp", "zero1", "zero2", "zero3", "hsdp"]
SHARDS: Final[tuple[str, ...]] = get_args(Shard)
ParamOffload = Literal["none", "cpu", "nvme"]
PARAM_OFFLOADS: Final[tuple[str, ...]] = get_args(ParamOffload)
Attention = Literal["auto", "eager", "math", "efficient", "flash", "cudnn", "flex"]
ATTENTIONS: Final[tuple[str, ...]] = get_args(Attention)
Loss = Literal["plain", "chunked", "fused", "torch", "liger"]
LOSSES: Final[tuple[str, ...]] = get_args(Loss)
Compile = Literal["none", "layers", "model"]
COMPILES: Final[tuple[str, ...]] = get_args(Compile)
Outputs = Literal["freed", "step", "loop"]
OUTPUTS: Final[tuple[str, ...]] = get_args(Outputs)
Allocator = Literal["default", "expandable"]
ALLOCATORS: Final[tuple[str, ...]] = get_args(Allocator)
Engine = Literal["tonnage", "hf-trainer", "trl", "accelerate", "deepspeed", "torchtitan", "megatron", "axolotl"]
ENGINES: Final[tuple[str, ...]] = get_args(Engine)
Dtype = Literal["fp32", "bf16", "fp16"]
DTYPES: Final[tuple[str, ...]] = get_args(Dtype)
PipelineSchedule = Literal["1f1b", "interleaved", "gpipe"]
PP_SCHEDULES: Final[tuple[str, ...]] = get_args(PipelineSchedule)
CHUNK_TOKENS: Final = 1024
"""Tokens of one slice of a chunked loss; its logits in fp32 take 0.5 GiB for a vocabulary of 128,256.

Ranks that divide the vocabulary take as many times more tokens, so that each has the same bytes of logits: the fixed
cost of a slice, which is the host's work and two all-reduces, does not shrink with its length.
"""

HEADROOM: Final = 0.04
"""Fraction of a GPU's memory that is left free by default."""
Quant = Literal["nf4", "nf4-double", "fp4", "fp4-double", "int8"]
QUANTS: Final[tuple[str, ...]] = get_args(Quant)

UnquantizedDtype = Literal["fp32", "compute"]
SequenceParallel = Literal["auto", "on", "off"]

_EVERY = re.compile(r"every-([1-9][0-9]*)")


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """One value of every technique family; the defaults are what a plain PyTorch loop does under autocast."""

    precision: Precision = word(
        "bf16-mixed",
        "Dtypes of weights and computation: -mixed keeps fp32 weights and computes under autocast; -true has both in "
        "the named dtype; fp8 is bf16-mixed with fp8 linear layers (torchao); megatron-bf16 has bf16 weights beside "
        "fp32 main weights and gradients.",
        PRECISIONS,
    )
    weights_dtype: Dtype | None = word(None, "Dtype of the trained weights. Default: that of --precision.", DTYPES)
    reduce_dtype: Dtype | None = word(
        None, "Dtype in which ranks average gradients. Default: that of --precision.", DTYPES
    )
    base_dtype: Dtype | None = word(
        None, "Dtype of the frozen weights under LoRA. Default: the dtype of computation.", DTYPES
    )
    quant: Quant = word(
        "nf4",
        "Format of the frozen weights under qlora: 4 bits (nf4, fp4) or 8 bits (int8); -double also quantizes the "
        "scales.",
        QUANTS,
    )
    unquantized_dtype: UnquantizedDtype = word(
        "fp32",
        "Dtype of the weights that qlora does not quantize: fp32, as PEFT casts them, or the dtype of computation "
        "(compute).",
        get_args(UnquantizedDtype),
    )
    optimizer: Optimizer = word(
        "adamw",
        "The optimizer: adamw lets torch choose the implementation, -loop, -foreach and -fused force one; 8bit, 4bit "
        "and fp8 hold smaller states (bitsandbytes, -ao and 4bit: torchao); paged keeps states in managed memory; "
        "sgd-plain has no momentum.",
        OPTIMIZERS,
    )
    clip_grad_norm: float | None = amount(
        None, "Maximum norm of the gradients: larger ones are scaled down before each step. Default: no clipping."
    )
    checkpointing: Checkpointing = word(
        "none",
        "What backward recomputes instead of keeping it (activation checkpointing): every layer (full, or "
        "full-reentrant: torch's older implementation), each N-th layer (every-N), segments of sqrt(L) of the L "
        "layers (sqrt), every layer except its matrix products and attention (selective), attention modules "
        "(attention-module), attention scores alone (attention), or just enough to keep activations within SIZE "
        "(budget).",
        CHECKPOINTINGS,
    )
    activation_offload: ActivationOffload = word(
        "none",
        "Where activations of the layers wait for backward: on the GPU (none), in host memory, copied in line (cpu) "
        "or beside the computation (cpu-streamed), or in files (nvme).",
        ACTIVATION_OFFLOADS,
    )
    optimizer_in_backward: bool = switch(
        "Update each parameter in backward, as soon as its gradient exists, and free the gradient."
    )
    optimizer_offload: OptimizerOffload = word(
        "none",
        "Where optimizer states are kept: on the GPU (none), in host memory (cpu) or in files (nvme), where the "
        "optimizer then runs on the host; cpu=0.5 moves only half of them.",
        OPTIMIZER_OFFLOADS,
    )
    shard: Shard = word(
        "none",
        "What the data-parallel ranks divide: nothing (none: independent copies; ddp: averaged gradients), optimizer "
        "states (zero1), also gradients (zero2), also parameters (zero3); hsdp is zero3 within each machine.",
        SHARDS,
    )
    accum_sync: bool = switch(
        "Average gradients after each micro-batch, not only after the last one: more communication, and less memory "
        "where gradients are sharded."
    )
    tp: int = number(1, "Tensor parallelism: GPUs of a machine that divide each weight matrix.")
    sequence_parallel: SequenceParallel = word(
        "auto",
        "Divide the sequence among the ranks of --tp in the parts between matrices; auto: on if --tp is above 1.",
        get_args(SequenceParallel),
    )
    pp: int = number(1, "Pipeline parallelism: number of ranks in a row, each with a part of the layers.")
    pp_schedule: PipelineSchedule = word(
        "1f1b",
        "Order in which pipeline stages run micro-batches: all forwards first (gpipe), forwards and backwards in "
        "turn (1f1b), or the same with several stages on each rank (interleaved).",
        PP_SCHEDULES,
    )
    pp_stages: int = number(2, "Stages on each rank under --pp-schedule interleaved.", least=2)
    cp: int = number(1, "Context parallelism: ranks that divide each sequence, with ring attention.")
    ep: int = number(
        1, "Expert parallelism: ranks that divide the experts of each layer; needs zero2, zero3 or hsdp."
    )
    param_offload: ParamOffload = word(
        "none",
        "Where sharded parameters, gradients and optimizer states are kept: on the GPU (none), in host memory (cpu), "
        "or in files (nvme; only with --engine deepspeed).",
        PARAM_OFFLOADS,
    )
    attention: Attention = word(
        "auto",
        "The attention backend: torch's choice (auto), the model's own code with all scores (eager), one backend of "
        "scaled_dot_product_attention (math, efficient, flash, cudnn), or compiled flex_attention (flex).",
        ATTENTIONS,
    )
    loss: Loss = word(
        "plain",
        "How the head and the loss run: on all logits at once (plain), in slices of tokens that backward recomputes "
        "(chunked), in slices with gradients computed in forward (fused), by torch's linear_cross_entropy (torch), "
        "or by Liger's kernel (liger).",
        LOSSES,
    )
    compile: Compile = word(
        "none",
        "What torch.compile compiles: nothing (none), each layer (layers), or the whole network (model).",
        COMPILES,
    )
    outputs: Outputs = word(
        "freed",
        "How long the training loop keeps the model's outputs, mostly logits: freed before backward (freed), kept "
        "through the step (step), or through the next forward (loop).",
        OUTPUTS,
    )
    engine: Engine = word(
        "tonnage",
        "Whose training loop runs the step: a plain PyTorch loop (tonnage), or that of the named trainer.",
        ENGINES,
    )
    allocator: Allocator = word(
        "default", "Mode of PyTorch's caching allocator; expandable sets expandable_segments:True.", ALLOCATORS
    )

    __repr__ = repr_of_changes

    def __post_init__(self) -> None:
        check(self)

    @property
    def checkpoint_interval(self) -> int | None:
        """Return the N of `every-N`, where each N-th layer is checkpointed; None for the other choices."""
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


class PlanOptions(TypedDict, total=False):
    """The options of a Plan as typed keywords, for functions that take options by name."""

    precision: Precision
    weights_dtype: Dtype | None
    reduce_dtype: Dtype | None
    base_dtype: Dtype | None
    quant: Quant
    unquantized_dtype: UnquantizedDtype
    optimizer: Optimizer
    clip_grad_norm: float | None
    checkpointing: Checkpointing
    activation_offload: ActivationOffload
    optimizer_in_backward: bool
    optimizer_offload: OptimizerOffload
    shard: Shard
    accum_sync: bool
    tp: int
    sequence_parallel: SequenceParallel
    pp: int
    pp_schedule: PipelineSchedule
    pp_stages: int
    cp: int
    ep: int
    param_offload: ParamOffload
    attention: Attention
    loss: Loss
    compile: Compile
    outputs: Outputs
    engine: Engine
    allocator: Allocator
