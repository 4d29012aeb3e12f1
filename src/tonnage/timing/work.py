"""What a rank has to do in one optimizer step, in the terms that decide how long it takes."""

from dataclasses import dataclass, field, fields
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final

from tonnage.catalog.conventions import averages_by_ddp, conventions_of
from tonnage.cluster import Cluster
from tonnage.job import Job
from tonnage.mesh import SHARDING, Axes, axes
from tonnage.options import varied
from tonnage.plans import Plan
from tonnage.timing.adapted import adapted
from tonnage.timing.operations import ELEMENT_BYTES

RECOMPUTED: Final = (
    *("none", "full", "attention", "attention-module", "selective", "alternate", "latent", "norms", "experts"),
)
"""What of a checkpointed layer runs again: nothing, all, its attention without and with the projections, all but its
matrix products, the same and every second of these, what widens compressed queries, keys and values, its norms and
activation, its norms and experts."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A step's batch, its layout on ranks, and the techniques that cost or save time."""

    seq_len: int
    """Tokens s of a sequence."""
    micro_batch: int = 1
    """Sequences b of a micro-batch on one data-parallel rank."""
    grad_accum: int = 1
    """Micro-batches of a step."""
    packing: int = 1
    """Documents of a sequence."""
    axes: Axes = field(default_factory=Axes)
    """The ranks."""
    schedule: str = "1f1b"
    """Of the pipeline."""
    virtual_stages: int = 1
    """Stages on each rank of an interleaved pipeline."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each stage, where a recipe divides them otherwise than its code does."""
    sequence_parallel: bool = True
    """With tensor parallelism: whether norms and residuals are divided too."""
    tensor_beside: bool = True
    """Whether exchanges of tensor parallelism run beside products, where the code does that."""
    dtype: str = "bf16"
    """Of matrix products; `tf32` and `fp8` among them."""
    weight_bytes: int = 4
    """Of a stored weight."""
    gradient_bytes: int = 4
    """Of a gradient as it is kept and averaged."""
    whole_gradient_bytes: int = 0
    """Of one that is not divided yet, as FSDP2 sums and reduces it; 0: as it is kept."""
    main_weights: bool = False
    """Whether the optimizer has fp32 weights of its own beside stored ones of 16 bits."""
    autocast: bool = True
    """Whether weights are cast in each forward pass and the residual stream is fp32."""
    accumulated_bytes: int = 0
    """Moved for each weight and micro-batch to add its gradient to the sum, where that takes its own pass."""
    lora_rank: int = 0
    """Rank of adapters; 0: the weights themselves are trained."""
    adapted: frozenset[str] | None = None
    """Products of a layer that have them, by `adapted.adapted`; None: all."""
    wide_adapters: bool = False
    """Whether they are fp32 beside weights of 16 bits, without autocast."""
    quantized: bool = False
    """Whether frozen weights have 4 bits."""
    int8: bool = False
    """Whether they have 8, and are multiplied as LLM.int8 does."""
    wide_between: bool = False
    """Whether all that is not quantized is fp32, without autocast, and so is what quantized products return."""
    checkpointing: str = "none"
    """What runs again, of RECOMPUTED."""
    checkpointed_fraction: float = 1.0
    """Part of the layers that run again."""
    repeats_to_end: bool = False
    """Whether a layer that runs again does so to its end, whatever its software stops at."""
    attention: str = "auto"
    """The backend; `auto`: what torch chooses on the card."""
    masked: bool = False
    """Whether attention that keeps no scores is given a mask, and so computes what it hides."""
    experts_overlapped: bool = False
    """Whether tokens are handed to experts while another micro-batch computes."""
    experts_fused: bool = False
    """Whether experts' products, their activation and casts are one kernel for all experts of a rank."""
    experts_whole: bool = False
    """Whether tensor-parallel ranks have experts of their own, rather than parts of each."""
    experts_once: bool = False
    """Whether a token goes once to each machine and each rank, however many of its experts are there (DeepEP,
    HybridEP), rather than once for each expert (an all-to-all)."""
    experts_even: bool = False
    """Whether each expert gets equally many rows and is multiplied by a product of its own."""
    captured: str = "none"
    """Launches that a CUDA graph replays: `none`, `part` (all but those of experts' products) or `all`."""
    compiled: str = "none"
    """What Inductor made kernels of: `none`, `layers` (one by one) or `model` (the network as a whole)."""
    loss: str = "plain"
    """`plain`, `compiled` (where it is divided by words), `chunked`, `sliced` (by a trainer's own code), `fused`."""
    optimizer: str = "adamw"
    """Its name as in a Plan."""
    clipped: bool = False
    """Whether the norm of all gradients is taken before the step."""
    shard: str = "none"
    """`none`, `ddp`, `zero1`, `zero2`, `zero3` or `hsdp`."""
    bucketed: bool = False
    """Whether gradients are copied into buckets and back, as torch's DDP does."""
    unpacked: bool = False
    """Whether gathered weights are copied out of the buffer that they came in, as torch's FSDP2 does."""
    hooked: bool = False
    """Whether a trainer's hooks gather weights module by module: DeepSpeed's stage 3."""
    weights_stay: bool = False
    """Whether `zero2` leaves weights whole (ZeRO's second stage), where FSDP2 gathers them for each micro-batch."""
    averages_each: bool = False
    """Whether gradients are averaged after each micro-batch."""
    optimizer_offload: float = 0.0
    """Part of the states that rests on the host, where the optimizer runs for them."""
    param_offload: bool = False
    """Whether sharded weights rest on the host."""
    activation_offload: bool = False
    """Whether activations wait on the host."""
    copies_beside: bool = False
    """Whether those are copied on a stream of their own; else, as by torch's save_on_cpu, each copy is waited for."""

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank, after context parallelism."""
        return self.seq_len * self.micro_batch // self.axes.cp

    @property
    def step_tokens(self) -> int:
        """Tokens of a step on all ranks."""
        return self.seq_len * self.micro_batch * self.grad_accum * self.axes.data_parallel

    @property
    def sharded(self) -> bool:
        """Whether weights are gathered before they are used, from other ranks or from the host."""
        apart = self.axes.shards > 1 or self.param_offload
        return self.shard in SHARDING and apart and not self.weights_stay

    @property
    def resting_bytes(self) -> float:
        """Of a weight of the layers while it is not used: half a byte in 4 bits, without what scales it."""
        return 0.5 if self.quantized else float(self.weight_bytes)

    @property
    def reduced_bytes(self) -> int:
        """Of a gradient that is not divided yet."""
        return self.whole_gradient_bytes or self.gradient_bytes

    @property
    def gradient_shards(self) -> int:
        """Parts into which averaging divides gradients."""
        return self.axes.shards if self.shard in SHARDING else 1

    @property
    def state_shards(self) -> int:
        """Parts into which the optimizer's states are divided."""
        return self.axes.data_parallel if self.shard == "zero1" else self.gradient_shards

    @property
    def gradients_whole(self) -> bool:
        """Whether ranks that divide gradients keep whole ones from one micro-batch to the next."""
        divides = self.shard in SHARDING and self.axes.pp == 1
        return divides and self.grad_accum > 1 and not self.averages_each

    @property
    def gathers_again(self) -> bool:
        """Whether weights are gathered for the backward pass too."""
        return self.shard in ("zero3", "hsdp")

    @property
    def of_layers(self) -> "Work":
        """The same for all steps whose layers take as long for a micro-batch, whatever becomes of its gradients.

        Of a pipeline's stages it says only whether there are several.
        """
        laid = self.axes
        return _of_layers(_LAYER_FACTS(self), min(laid.pp, 2), laid.cp, laid.tp, laid.ep)

    @property
    def of_weights(self) -> "Work":
        """The same for all steps that divide, exchange and update weights alike, whatever passes through them."""
        return _of_weights(_WEIGHT_FACTS(self))

    def __hash__(self) -> int:
        """Of a few fields: to hash all fifty takes longer than what is saved by looking it up."""
        return hash(_TELLING(self))

    @staticmethod
    def of(job: Job, plan: Plan, cluster: Cluster) -> "Work":
        """What a Job under a Plan has to do on a Cluster; `job` has its accumulation steps decided."""
        ranks = cluster.gpus, cluster.gpus_per_node
        known = _planned(plan, *ranks, job.seq_len, job.packing or 1, job.method, job.lora_rank, job.lora_targets)
        added = known.accumulated_bytes if job.grad_accum > 1 or plan.precision == "megatron-bf16" else 0
        batch = {"micro_batch": job.micro_batch, "grad_accum": job.grad_accum, "accumulated_bytes": added}
        return varied(known, batch)


@lru_cache(maxsize=1024)  # the batches of a plan come one after the other
def _planned(
    plan: Plan,
    gpus: int,
    gpus_per_node: int,
    seq_len: int,
    packing: int,
    method: str,
    lora_rank: int,
    lora_targets: tuple[str, ...],
) -> Work:
    """What a plan has its ranks do, of several micro-batches of one sequence."""
    precision, compute = plan.precision, plan.compute_dtype
    true = precision in ("bf16-true", "fp16-true", "fp32")
    weight_bytes = int(ELEMENT_BYTES[compute]) if true or precision == "megatron-bf16" else 4
    frozen = method != "full"
    if plan.weights_dtype:
        weight_bytes = int(ELEMENT_BYTES[plan.weights_dtype])
    if frozen:  # which rest in the dtype of computation unless the plan says another
        weight_bytes = int(ELEMENT_BYTES[plan.base_dtype or compute])
    mixed_by_fsdp = plan.shard in SHARDING  # its own mixed precision, in place of autocast
    habits = conventions_of(plan.engine)
    by_zero = habits.by_zero
    if by_zero and not frozen:
        weight_bytes = int(ELEMENT_BYTES[compute])
    return Work(
        seq_len=seq_len,
        packing=packing,
        axes=axes(plan, gpus, gpus_per_node),
        schedule=plan.pp_schedule,
        virtual_stages=plan.pp_stages if plan.pp_schedule == "interleaved" else 1,
        sequence_parallel=plan.tp > 1 and plan.sequence_parallel != "off",
        dtype="fp8" if precision == "fp8" else compute,
        weight_bytes=weight_bytes,
        gradient_bytes=4 if precision == "megatron-bf16" else weight_bytes,
        whole_gradient_bytes=_whole_gradient_bytes(plan, weight_bytes),
        main_weights=precision == "megatron-bf16" or (by_zero and weight_bytes < 4),
        autocast=not true and precision != "megatron-bf16" and not mixed_by_fsdp and not by_zero,
        accumulated_bytes=10 if precision == "megatron-bf16" else 3 * weight_bytes,
        lora_rank=lora_rank if frozen else 0,
        adapted=adapted(lora_targets) if frozen else None,
        wide_adapters=frozen and _wide(method, plan),
        quantized=method == "qlora",
        int8=method == "qlora" and plan.quant == "int8",
        wide_between=_wide_between(method, plan),
        checkpointing=_recomputed(plan),
        checkpointed_fraction=1 / (plan.checkpoint_interval or 1),
        repeats_to_end=plan.checkpointing == "full-reentrant",
        attention=_attention(plan),
        masked=_masked(packing, plan),
        compiled=plan.compile,
        loss="sliced" if plan.loss == "chunked" and plan.engine in _SLICING else plan.loss,
        optimizer="adamw-fused" if _fuses(plan) else plan.optimizer,
        clipped=plan.clip_grad_norm is not None or habits.clips,
        shard=plan.shard,
        bucketed=averages_by_ddp(plan),
        unpacked=mixed_by_fsdp and not by_zero,
        hooked=by_zero and plan.shard == "zero3",
        weights_stay=by_zero and plan.shard == "zero2",
        averages_each=plan.accum_sync or (by_zero and plan.shard in SHARDING),
        optimizer_offload=_part_on_host(plan),
        param_offload=plan.param_offload != "none",
        activation_offload=plan.activation_offload != "none",
        copies_beside=plan.activation_offload not in ("none", "cpu"),
    )


_BESIDE_LAYERS: Final[dict[str, Any]] = {
    "grad_accum": 1,
    "schedule": "1f1b",
    "virtual_stages": 1,
    "stage_layers": (),
    "gradient_bytes": 0,
    "whole_gradient_bytes": 0,
    "main_weights": False,
    "optimizer": "adamw",
    "clipped": False,
    "shard": "none",
    "bucketed": False,
    "unpacked": False,
    "weights_stay": False,
    "averages_each": False,
    "optimizer_offload": 0.0,
    "param_offload": False,
    "activation_offload": False,
    "copies_beside": False,
}
"""What the time of layers does not hang on, with the value that stands for all."""

_OF_LAYERS: Final = tuple(item.name for item in fields(Work) if item.name not in ("axes", *_BESIDE_LAYERS))
_LAYER_FACTS: Final = attrgetter(*_OF_LAYERS)
_ANY_LAYERS: Final = Work(seq_len=1, **_BESIDE_LAYERS)


@lru_cache(maxsize=8192)
def _of_layers(facts: tuple[Any, ...], pp: int, cp: int, tp: int, ep: int) -> Work:
    """Of 15,000 candidates a few thousand are made: a Work takes longer to be made than to be found."""
    known = dict(zip(_OF_LAYERS, facts, strict=True))
    return varied(_ANY_LAYERS, {**known, "axes": Axes(pp=pp, cp=cp, tp=tp, ep=ep)})


_BESIDE_WEIGHTS: Final[dict[str, Any]] = {
    "micro_batch": 1,
    "grad_accum": 1,
    "schedule": "1f1b",
    "virtual_stages": 1,
    "stage_layers": (),
    "accumulated_bytes": 0,
    "checkpointing": "none",
    "checkpointed_fraction": 1.0,
    "repeats_to_end": False,
    "attention": "auto",
    "masked": False,
    "activation_offload": False,
    "copies_beside": False,
}
"""What exchanges and updates of weights do not hang on, with the value that stands for all."""

_OF_WEIGHTS: Final = tuple(item.name for item in fields(Work) if item.name not in _BESIDE_WEIGHTS)
_WEIGHT_FACTS: Final = attrgetter(*_OF_WEIGHTS)
_ANY_WEIGHTS: Final = Work(seq_len=1, **_BESIDE_WEIGHTS)


@lru_cache(maxsize=8192)
def _of_weights(facts: tuple[Any, ...]) -> Work:
    return varied(_ANY_WEIGHTS, dict(zip(_OF_WEIGHTS, facts, strict=True)))


_TELLING: Final = attrgetter("micro_batch", "grad_accum", "axes", "checkpointing", "shard", "averages_each")
"""What most works of a search differ in."""


_SLICING: Final = ("trl", "torchtitan")
"""Engines whose own loss takes slices: a step of TRL's on an H200 is 1.6 % off with its product twice, 8.3 with all
that tonnage's does twice (measurements/h200-2026-11-26.jsonl, `loss-chunked/engine-trl`)."""


def _whole_gradient_bytes(plan: Plan, weight_bytes: int) -> int:
    """FSDP2 reduces a gradient in the dtype that its policy names, accelerate's in the one of computation."""
    if plan.reduce_dtype:
        return int(ELEMENT_BYTES[plan.reduce_dtype])
    computed = (
        int(ELEMENT_BYTES[plan.compute_dtype]) if conventions_of(plan.engine).reduces_as_computed else weight_bytes
    )
    return min(weight_bytes, computed)


def _attention(plan: Plan) -> str:
    """Megatron's without Transformer Engine keeps scores; torchtitan's is flex unless another is said."""
    own = {"megatron": "eager", "torchtitan": "flex" if plan.attention == "auto" else plan.attention}
    return own.get(plan.engine, plan.attention)


def _masked(packing: int, plan: Plan) -> bool:
    """Whether transformers makes a mask for torch's attention: for packed documents, and wherever it is traced."""
    return plan.attention not in ("eager", "flex") and (packing > 1 or plan.compile == "model")


def _wide(method: str, plan: Plan) -> bool:
    """Whether adapters are fp32 and the precision has no autocast that would make them narrower."""
    if plan.precision not in ("bf16-true", "fp16-true"):
        return False
    by_peft = plan.weights_dtype or "fp32"  # which trainers leave as they are
    return (by_peft if conventions_of(plan.engine).keeps_adapters else plan.adapters_dtype(method)) == "fp32"


def _wide_between(method: str, plan: Plan) -> bool:
    """Whether PEFT made fp32 of what is not quantized, and no autocast or policy of FSDP2 makes it narrower again."""
    narrow = plan.precision in ("bf16-true", "fp16-true")
    return method == "qlora" and narrow and plan.unquantized_dtype == "fp32"


def _fuses(plan: Plan) -> bool:
    """Whether what a plan calls adamw is one kernel for many tensors, as trainers choose it."""
    return plan.optimizer == "adamw" and conventions_of(plan.engine).fuses_adamw


def _part_on_host(plan: Plan) -> float:
    """Of the optimizer's states: all of them unless the plan says a fraction."""
    place, _, fraction = plan.optimizer_offload.partition("=")
    return 0.0 if place == "none" else float(fraction or 1)


def _recomputed(plan: Plan) -> str:
    """What runs again; what a budget chooses is known when it has run, until then it may be everything."""
    if plan.checkpoint_interval or plan.checkpointing.startswith("budget"):
        return "full"
    known = {"full-reentrant": "full", "sqrt": "full"}
    if plan.engine == "torchtitan":
        known["selective"] = "alternate"  # torchtitan.distributed.activation_checkpoint counts them
    return known.get(plan.checkpointing, plan.checkpointing)
