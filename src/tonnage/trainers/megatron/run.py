"""Megatron-Core: its own GPT, its groups, its DDP, its optimizer and its schedules.

Written against megatron-core 0.16.  The loop is that of its QuickStart, the settings are the defaults of
`pretrain_gpt.py` in Megatron-LM.  Layers are Megatron-Core's own (`get_gpt_layer_local_spec`), the only ones without
Transformer Engine and Apex.  docs/reference/engines.md says what those would change.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tonnage.catalog.optimizers import words
from tonnage.techniques.technique import Refusal
from tonnage.trainers.engine import ANY, SHAPES, Engine, refuse_by_techniques
from tonnage.trainers.megatron.network import FAMILIES, Network, network_of, unlike

if TYPE_CHECKING:
    from torch import Tensor

    from tonnage.case import Case
    from tonnage.job import Job
    from tonnage.plans import Plan
    from tonnage.step.world import World

RECOMPUTED: Final[dict[str, dict[str, Any]]] = {
    "none": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
}
"""Fields of `TransformerConfig` for each value of `checkpointing`."""

OPTIMIZERS: Final[Mapping[str, str]] = words("megatron")
"""`OptimizerConfig.optimizer`; without Transformer Engine and Apex they are torch's AdamW and SGD."""

OWN: Final = ("precision", "optimizer", "checkpointing", "attention", "loss", "shard", "tp", "pp", "ep")
"""Options for which it has its own code."""


def accepts(case: Case) -> Refusal | None:
    """Return how its networks differ, which degrees do not divide the ranks, or a refusal of the techniques."""
    return (
        _refuse_network(case.job, case.plan)
        or _refuse_experts(case.job, case.plan)
        or _refuse_degrees(case)
        or refuse_by_techniques(case, OWN)
    )


def assumes(job: Job, plan: Plan) -> tuple[str, ...]:
    """Return what is changed for networks with experts, whose router does not run as it is."""
    if network_of(job.model.config).experts is None:
        return ()
    return (
        "the router of megatron-core 0.16 asks for a name that it has with Transformer Engine alone, and fails "
        "without; here it finds None there, as in later versions",
    )


def _refuse_network(job: Job, plan: Plan) -> Refusal | None:
    """Return the refusal of a network that its layers cannot make, or of sequences that are too long for it."""
    reason = unlike(job.model.config)
    if reason is not None:
        return Refusal(
            technique=f"engine={plan.engine}",
            reason=reason,
            instead=f"choose a model of its own ({', '.join(FAMILIES)}), or engine hf-trainer",
        )
    positions = network_of(job.model.config).positions
    if positions is not None and job.seq_len > positions:
        return Refusal(
            technique=f"seq-len={job.seq_len}",
            reason=f"{job.model.name} has a table of {positions:,} positions",
            instead=f"choose seq-len {positions} or less",
        )
    return None


def _refuse_experts(job: Job, plan: Plan) -> Refusal | None:
    """Return the refusal of ep without experts, or of tp with experts."""
    experts = network_of(job.model.config).experts
    if experts is None and plan.ep > 1:
        return Refusal(technique=f"ep={plan.ep}", reason=f"{job.model.name} has no experts", instead="choose ep 1")
    if experts is not None and plan.tp > 1:
        return Refusal(
            technique=f"tp={plan.tp}",
            reason="with experts it wants sequence parallelism beside tp, which its norms without Apex do not know",
            instead="choose tp 1, and ep to divide the experts",
        )
    return None


def _refuse_degrees(case: Case) -> Refusal | None:
    """Return the refusal of degrees that do not divide the GPUs or the network."""
    plan, cluster = case.plan, case.cluster
    network = network_of(case.job.model.config)
    ranks = plan.tp * plan.pp * plan.ep
    parts = {"GPUs": (cluster.gpus, ranks), **network.divided(plan.tp, plan.pp, plan.ep)}
    for name, (count, degree) in parts.items():
        if count % degree:
            return Refusal(
                technique=f"tp={plan.tp}, pp={plan.pp}, ep={plan.ep}",
                reason=f"{count} {name} are no multiple of {degree}",
                instead=f"choose degrees that divide the {name}",
            )
    if plan.shard == "none" and cluster.gpus > plan.tp * plan.pp:
        return Refusal(
            technique="engine=megatron",
            reason=f"on {cluster.gpus} GPUs it always divides or replicates",
            instead="choose shard ddp or zero1",
        )
    return None


def run(job: Job, plan: Plan, world: World, steps: int) -> object:
    """Train as in its QuickStart: a network in DDP, an optimizer, and for each step the schedule of its stage."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from tonnage.trainers import common

    os.environ.update(common.launcher_variables(world))
    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(plan.tp, plan.pp, expert_model_parallel_size=plan.ep)
    model_parallel_cuda_manual_seed(1)
    network, optimizer = _build(job, plan)
    schedule = get_forward_backward_func()
    for _ in range(steps):
        network.zero_grad_buffer()
        optimizer.zero_grad()
        schedule(
            forward_step_func=_forward,
            data_iterator=_batches(job),
            model=[network],
            num_microbatches=job.grad_accum,
            seq_length=job.seq_len,
            micro_batch_size=job.micro_batch,
            forward_only=False,
        )
        optimizer.step()
    return network, optimizer


def _build(job: Job, plan: Plan) -> tuple[Any, Any]:
    """Return this rank's part of the network in DDP and its optimizer, wired as `megatron.training` does it."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    low = plan.precision != "fp32"
    shapes = network_of(job.model.config)
    config = _transformer_config(shapes, plan)
    if shapes.experts is not None:
        _define_missing_name()
    module = _build_stage(job, plan, shapes, config).cuda()
    distributed = plan.shard == "zero1"
    network = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed, check_for_nan_in_grad=True
        ),
        Float16Module(config, module) if low else module,
    )
    settings = OptimizerConfig(
        optimizer=OPTIMIZERS[plan.optimizer],
        lr=1e-4,
        bf16=low,
        params_dtype=torch.bfloat16 if low else torch.float32,
        use_distributed_optimizer=distributed,
        clip_grad=float(plan.clip_grad_norm or 1.0),
    )
    optimizer = get_megatron_optimizer(settings, [network])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return network, optimizer


def _define_missing_name() -> None:
    """Define a name that the router of megatron-core 0.16 compares with None, and that nothing defines.

    It is that of a product of Transformer Engine.  Later versions define it
    (megatron/core/transformer/moe/moe_utils.py of Megatron-LM 00611e6eeb).
    """
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _transformer_config(shapes: Network, plan: Plan) -> Any:
    """Return the `TransformerConfig` of a network under a plan."""
    import torch
    from megatron.core.transformer import TransformerConfig

    dtype = torch.float32 if plan.precision == "fp32" else torch.bfloat16
    activation = getattr(torch.nn.functional, shapes.transformer["activation_func"])
    return TransformerConfig(
        **{**shapes.transformer, "activation_func": activation},
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=plan.tp,
        pipeline_model_parallel_size=plan.pp,
        expert_model_parallel_size=plan.ep,
        **RECOMPUTED[plan.checkpointing],
    )


def _build_stage(job: Job, plan: Plan, shapes: Network, config: Any) -> Any:
    """Return the stage of this rank: the first has the embedding, the last the head."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=config.normalization
        ),
        vocab_size=shapes.rows(plan.tp),
        max_sequence_length=shapes.positions or job.seq_len,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        **shapes.gpt,
    )


def _batches(job: Job) -> Iterator[dict[str, Tensor]]:
    """Yield micro-batches as `pretrain_gpt.py` has them on the card, with a causal mask (rows, 1, tokens, tokens)."""
    import torch

    rows, tokens = job.micro_batch, job.seq_len
    while True:
        ids = torch.zeros(rows, tokens, dtype=torch.int64)
        yield {
            "input_ids": ids.cuda(),
            "position_ids": torch.arange(tokens).repeat(rows, 1).cuda(),
            "attention_mask": torch.empty(rows, 1, tokens, tokens, dtype=torch.bool).cuda(),
            "labels": ids.cuda(),
        }


def _forward(batches: Iterator[dict[str, Tensor]], network: Any) -> tuple[Tensor, Any]:
    """Return the stage's output for the next micro-batch, and how the last stage makes a loss of it."""
    import torch

    batch = next(batches)
    mask = torch.ones_like(batch["labels"], dtype=torch.float32)
    return network(**batch), partial(_mean_loss, mask)


def _mean_loss(mask: Tensor, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a micro-batch from those of its tokens (rows, tokens), and what is logged."""
    loss = (losses.float().view(-1) * mask.view(-1)).sum() / mask.sum()
    return loss, {"lm loss": loss.detach().clone()}


MEGATRON_ENGINE: Final = Engine(
    name="megatron",
    packages=("megatron-core",),
    expresses={
        **SHAPES,
        "precision": ("bf16-mixed", "megatron-bf16", "fp32"),
        "optimizer": tuple(OPTIMIZERS),
        "clip_grad_norm": ANY,
        "checkpointing": tuple(RECOMPUTED),
        "shard": ("none", "ddp", "zero1"),
        "tp": ANY,
        "sequence_parallel": ("auto", "off"),
        "pp": ANY,
        "ep": ANY,
        "attention": ("auto", "eager"),
    },
    accepts=accepts,
    imports=("megatron.core.models.gpt", "megatron.core.optimizer", "megatron.core.distributed"),
    assumes=assumes,
    run=run,
)
