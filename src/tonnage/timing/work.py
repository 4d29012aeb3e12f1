"""Work of one rank in one optimizer step, in the terms that decide how long it takes.

    Work.of(job, plan, cluster)

translates a Plan, in the words of its trainer, into what a rank does: bytes of weights and gradients, what runs
again, which exchanges there are.  Published steps are described by a Work directly (benchmarks/time).
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from tonnage.catalog.conventions import averages_by_ddp, conventions_of
from tonnage.cluster import Cluster
from tonnage.job import Job
from tonnage.mesh import SHARDING, Mesh, make_mesh
from tonnage.options import replace_checked
from tonnage.plans import Plan
from tonnage.timing.adapters import adapted_products
from tonnage.timing.operations import ELEMENT_BYTES

RECOMPUTED: Final = (
    *("none", "full", "attention", "attention-module", "selective", "alternate", "latent", "norms", "experts"),
)
"""Parts of a checkpointed layer that run again, in this order: nothing; everything; its attention, without and with
projections; all but its matrix products; the same and every second product; the products that widen compressed
queries, keys and values; its norms and activation; its norms and experts."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Batch of a step, its layout on ranks, and the techniques that cost or save time.

    The fields are flat because they are independent of each other and most costs read some of several subjects.
    """

    # the batch
    seq_len: int
    """Tokens s of a sequence."""
    micro_batch: int = 1
    """Sequences b of a micro-batch on one data-parallel rank."""
    grad_accum: int = 1
    """Micro-batches of a step."""
    packing: int = 1
    """Documents of a sequence."""

    # the layout
    axes: Mesh = field(default_factory=Mesh)
    """Ranks along each axis of the mesh."""
    schedule: str = "1f1b"
    """Schedule of the pipeline."""
    virtual_stages: int = 1
    """Stages on each rank of an interleaved pipeline."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each stage, where a recipe divides them otherwise than its code does."""
    sequence_parallel: bool = True
    """With tensor parallelism: norms and residuals are divided too."""
    tensor_beside: bool = True
    """Exchanges of tensor parallelism run beside products, where the code does that."""

    # the precision of weights, gradients and products
    dtype: str = "bf16"
    """Dtype of matrix products; `tf32` and `fp8` among them."""
    weight_bytes: int = 4
    """Bytes of a stored weight."""
    gradient_bytes: int = 4
    """Bytes of a gradient as it is kept and averaged."""
    whole_gradient_bytes: int = 0
    """Bytes of a gradient that is not divided yet, as FSDP2 sums and reduces it; 0: as it is kept."""
    main_weights: bool = False
    """The optimizer has fp32 weights of its own beside stored ones of 16 bits."""
    autocast: bool = True
    """Weights are cast in each forward pass and the residual stream is fp32."""
    accumulated_bytes: int = 0
    """Bytes moved for each weight and micro-batch to add its gradient to the sum, where that takes its own pass."""

    # adapters and the frozen weights beside them
    lora_rank: int = 0
    """Rank of adapters; 0: the weights themselves are trained."""
    adapted: frozenset[str] | None = None
    """Products of a layer that have adapters, by `adapters.adapted_products`; None: all."""
    wide_adapters: bool = False
    """Adapters are fp32 beside weights of 16 bits, without autocast."""
    quantized: bool = False
    """Frozen weights have 4 bits."""
    int8: bool = False
    """Frozen weights have 8 bits, and are multiplied as LLM.int8 does."""
    wide_between: bool = False
    """All that is not quantized is fp32, without autocast, and so are the results of quantized products."""

    # recomputation
    checkpointing: str = "none"
    """Part of a layer that runs again: one of RECOMPUTED."""
    checkpointed_fraction: float = 1.0
    """Part of the layers that run again."""
    repeats_to_end: bool = False
    """A layer that runs again does so to its end, wherever its software stops."""

    # the code of layers and of the loss
    attention: str = "auto"
    """Attention backend; `auto`: the one that torch chooses on the card."""
    masked: bool = False
    """Attention that keeps no scores is given a mask, and so computes what the mask hides."""
    captured: str = "none"
    """Launches that a CUDA graph replays: `none`, `part` (all but those of experts' products) or `all`."""
    compiled: str = "none"
    """Scope of torch.compile: `none`, `layers` (one by one) or `model` (the network as a whole)."""
    loss: str = "plain"
    """`plain`, `compiled` (where it is divided by words), `chunked`, `sliced` (by a trainer's own code), `fused`, or
    one of `head.IN_SLICES`."""

    # experts
    experts_overlapped: bool = False
    """Tokens are handed to experts while another micro-batch computes."""
    experts_fused: bool = False
    """Experts' products, their activation and casts are one kernel for all experts of a rank."""
    experts_whole: bool = False
    """Tensor-parallel ranks have experts of their own, rather than parts of each."""
    experts_once: bool = False
    """A token goes once to each machine and each rank, however many of its experts are there (DeepEP, HybridEP),
    rather than once for each expert (an all-to-all)."""
    experts_even: bool = False
    """Each expert gets equally many rows and is multiplied by a product of its own."""

    # the optimizer
    optimizer: str = "adamw"
    """Name of the optimizer, as in a Plan."""
    clipped: bool = False
    """The norm of all gradients is taken before the step."""
    gradients_twice: bool = False
    """Forward and backward run twice: for the norm of all gradients, and for updates in backward."""

    # data parallelism
    shard: str = "none"
    """`none`, `ddp`, `zero1`, `zero2`, `zero3` or `hsdp`."""
    bucketed: bool = False
    """Gradients are copied into buckets and back, as torch's DDP does."""
    unpacked: bool = False
    """Gathered weights are copied out of the buffer that they came in, as torch's FSDP2 does."""
    hooked: bool = False
    """A trainer's hooks gather weights module by module: DeepSpeed's stage 3."""
    weights_stay: bool = False
    """`zero2` leaves weights whole (ZeRO's second stage), where FSDP2 gathers them for each micro-batch."""
    averages_each: bool = False
    """Gradients are averaged after each micro-batch."""

    # offload
    optimizer_offload: float = 0.0
    """Part of the optimizer's states that rests on the host, where the optimizer runs for them."""
    param_offload: bool = False
    """Sharded weights rest on the host."""
    activation_offload: bool = False
    """Activations wait on the host."""
    copies_beside: bool = False
    """Activations are copied on a stream of their own; else, as by torch's save_on_cpu, each copy is waited for."""

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
        """True if weights are gathered before they are used, from other ranks or from the host."""
        apart = self.axes.shards > 1 or self.param_offload
        return self.shard in SHARDING and apart and not self.weights_stay

    @property
    def resting_bytes(self) -> float:
        """Bytes of a weight of the layers while it is not used: half a byte in 4 bits, without what scales it."""
        return 0.5 if self.quantized else float(self.weight_bytes)

    @property
    def reduced_bytes(self) -> int:
        """Bytes of a gradient that is not divided yet."""
        return self.whole_gradient_bytes or self.gradient_bytes

    @property
    def states_narrow(self) -> bool:
        """True if the optimizer's states have 16 bits: as weights and gradients do, without main weights."""
        return max(self.weight_bytes, self.gradient_bytes) < 4 and not self.main_weights

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
        """True if ranks that divide gradients keep whole ones from one micro-batch to the next."""
        divides = self.shard in SHARDING and self.axes.pp == 1
        return divides and self.grad_accum > 1 and not self.averages_each

    @property
    def gathers_again(self) -> bool:
        """True if weights are gathered for the backward pass too."""
        return self.shard in ("zero3", "hsdp")

    @staticmethod
    def of(job: Job, plan: Plan, cluster: Cluster) -> "Work":
        """Return the work of a Job under a Plan on a Cluster; the job's accumulation steps must be decided."""
        ranks = cluster.gpus, cluster.gpus_per_node
        known = _work_of_plan(
            plan, *ranks, job.seq_len, job.packing or 1, job.method, job.lora_rank, job.lora_targets
        )
        added = known.accumulated_bytes if job.grad_accum > 1 or plan.precision == "megatron-bf16" else 0
        batch = {"micro_batch": job.micro_batch, "grad_accum": job.grad_accum, "accumulated_bytes": added}
        return replace_checked(known, batch)


@lru_cache(maxsize=1024)  # the batches of a plan come one after the other
def _work_of_plan(
    plan: Plan,
    gpus: int,
    gpus_per_node: int,
    seq_len: int,
    packing: int,
    method: str,
    lora_rank: int,
    lora_targets: tuple[str, ...],
) -> Work:
    """Return the work of a plan's ranks, with several micro-batches of one sequence."""
    precision, compute = plan.precision, plan.compute_dtype
    true = precision in ("bf16-true", "fp16-true", "fp32")
    weight_bytes = int(ELEMENT_BYTES[compute]) if true or precision == "megatron-bf16" else 4
    frozen = method != "full"
    if plan.weights_dtype:
        weight_bytes = int(ELEMENT_BYTES[plan.weights_dtype])
    if frozen:  # frozen weights rest in the dtype of computation unless the plan names another
        weight_bytes = int(ELEMENT_BYTES[plan.base_dtype or compute])
    mixed_by_fsdp = plan.shard in SHARDING  # its own mixed precision, in place of autocast
    conventions = conventions_of(plan.engine)
    by_zero = conventions.by_zero
    if by_zero and not frozen:
        weight_bytes = int(ELEMENT_BYTES[compute])
    return Work(
        seq_len=seq_len,
        packing=packing,
        axes=make_mesh(plan, gpus, gpus_per_node),
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
        adapted=adapted_products(lora_targets) if frozen else None,
        wide_adapters=frozen and _has_wide_adapters(method, plan),
        quantized=method == "qlora",
        int8=method == "qlora" and plan.quant == "int8",
        wide_between=_is_wide_between(method, plan),
        checkpointing=_recomputed_part(plan),
        checkpointed_fraction=1 / (plan.checkpoint_interval or 1),
        repeats_to_end=plan.checkpointing == "full-reentrant",
        attention=_attention(plan),
        masked=_has_mask(packing, plan),
        compiled=plan.compile,
        loss=_loss(plan),
        optimizer="adamw-fused" if _fuses_adamw(plan) else plan.optimizer,
        clipped=plan.clip_grad_norm is not None or conventions.clips,
        gradients_twice=plan.optimizer_in_backward and plan.clip_grad_norm is not None,
        shard=plan.shard,
        bucketed=averages_by_ddp(plan),
        unpacked=mixed_by_fsdp and not by_zero,
        hooked=by_zero and plan.shard == "zero3",
        weights_stay=by_zero and plan.shard == "zero2",
        averages_each=plan.accum_sync or (by_zero and plan.shard in SHARDING),
        optimizer_offload=_offloaded_states(plan),
        param_offload=plan.param_offload != "none",
        activation_offload=plan.activation_offload != "none",
        copies_beside=plan.activation_offload not in ("none", "cpu"),
    )


def _loss(plan: Plan) -> str:
    """Return the loss as `Work.loss` names it."""
    if plan.loss == "chunked":
        return "sliced" if plan.engine in _SLICING else "chunked"
    if plan.loss == "liger":
        return "liger" if plan.engine in _WITH_TECHNIQUES else "liger-trainer"
    return "fused-slices" if plan.loss == "fused" else plan.loss


_WITH_TECHNIQUES: Final = ("tonnage", "accelerate")
"""Engines that run Liger's loss alone, on weights that are cast once; the others' settings exchange more kernels."""

_SLICING: Final = ("trl", "torchtitan")
"""Engines whose own loss takes slices: a step of TRL's on an H200 is 1.6 % off if only the product runs twice, and
8.3 % off if everything runs twice as in the chunked loss of `techniques/chunked_loss.py`
(measurements/h200-2026-11-26.jsonl, `loss-chunked/engine-trl`)."""


def _whole_gradient_bytes(plan: Plan, weight_bytes: int) -> int:
    """Return the bytes of a gradient as it is reduced.

    FSDP2 reduces in the dtype that its policy names, accelerate's in the one of computation.
    """
    if plan.reduce_dtype:
        return int(ELEMENT_BYTES[plan.reduce_dtype])
    as_computed = conventions_of(plan.engine).reduces_as_computed
    return min(weight_bytes, int(ELEMENT_BYTES[plan.compute_dtype]) if as_computed else weight_bytes)


def _attention(plan: Plan) -> str:
    """Return the attention backend of a plan.

    Megatron's without Transformer Engine keeps scores; torchtitan's is flex unless the plan names another.
    """
    own = {"megatron": "eager", "torchtitan": "flex" if plan.attention == "auto" else plan.attention}
    return own.get(plan.engine, plan.attention)


def _has_mask(packing: int, plan: Plan) -> bool:
    """Return True if transformers makes a mask for attention: where documents are packed or it traces."""
    return plan.attention not in ("eager", "flex") and (packing > 1 or plan.compile == "model")


def _has_wide_adapters(method: str, plan: Plan) -> bool:
    """Return True if adapters are fp32 and the precision has no autocast that would make them narrower."""
    if plan.precision not in ("bf16-true", "fp16-true"):
        return False
    by_peft = plan.weights_dtype or "fp32"  # which trainers leave as they are
    return (by_peft if conventions_of(plan.engine).keeps_adapters else plan.adapters_dtype(method)) == "fp32"


def _is_wide_between(method: str, plan: Plan) -> bool:
    """Return True if PEFT casts all that is not quantized to fp32, and neither autocast nor FSDP2 casts it back."""
    narrow = plan.precision in ("bf16-true", "fp16-true")
    return method == "qlora" and narrow and plan.unquantized_dtype == "fp32"


def _fuses_adamw(plan: Plan) -> bool:
    """Return True if a plan's adamw is one kernel for many tensors, as trainers choose it."""
    return plan.optimizer == "adamw" and conventions_of(plan.engine).fuses_adamw


def _offloaded_states(plan: Plan) -> float:
    """Return the part of the optimizer's states on the host: all of them unless the plan names a fraction."""
    place, _, fraction = plan.optimizer_offload.partition("=")
    return 0.0 if place == "none" else float(fraction or 1)


def _recomputed_part(plan: Plan) -> str:
    """Return the part of a layer that runs again.

    What a budget chooses is known when the plan has run; until then it may be everything.
    """
    if plan.checkpoint_interval or plan.checkpointing.startswith("budget"):
        return "full"
    parts = {"full-reentrant": "full", "sqrt": "full"}
    if plan.engine == "torchtitan":
        parts["selective"] = "alternate"  # torchtitan.distributed.activation_checkpoint counts them
    return parts.get(plan.checkpointing, plan.checkpointing)
