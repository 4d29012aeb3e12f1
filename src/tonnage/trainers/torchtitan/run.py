"""torchtitan: its own networks, its own parallelisms and its own `Trainer.train()`.

Written against torchtitan 0.3.  The network has the shapes of the model's configuration; what the plan has no option
for stays as `llama3_8b` of its config registry has it, except that CUDA graphs are off.
docs/reference/engines.md has the differences to tonnage's own loop.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from tonnage.catalog.optimizers import words
from tonnage.techniques.expert_parallel import dealt_out, experts_of
from tonnage.techniques.technique import Refusal
from tonnage.trainers.engine import ANY, SHAPES, Engine, refuse_by_techniques, refuse_undivided
from tonnage.trainers.torchtitan import networks

if TYPE_CHECKING:
    import torch

    from tonnage.case import Case
    from tonnage.cluster import Cluster
    from tonnage.job import Job
    from tonnage.plans import Plan
    from tonnage.step.world import World

IMPLEMENTATIONS: Final[Mapping[str, str]] = words("torchtitan")
"""`OptimizersContainer.Config.implementation` for each optimizer; fused is torchtitan's default."""

DTYPES: Final = {
    "bf16-mixed": {"dtype": "float32", "mixed_precision_param": "bfloat16"},
    "bf16-true": {"dtype": "bfloat16", "mixed_precision_param": "bfloat16"},
    "fp32": {"dtype": "float32", "mixed_precision_param": "float32"},
}
"""`TrainingConfig` for each precision; gradients are reduced in float32 in all of them."""

OWN: Final = ("precision", "optimizer", "checkpointing", "attention", "loss", "compile", "ep")
"""Options for which it has its own code, whatever a card can do."""

BACKENDS: Final = {"auto": "flex", "flex": "flex", "flash": "varlen"}
"""Its attention for each value of the plan's `attention`; flex is its default."""


def accepts(case: Case) -> Refusal | None:
    """Return what stands against torchtitan's networks and parallelisms, or the first refusal of the techniques."""
    plan = case.plan
    return (
        networks.refusal(case.job, plan)
        or _refuse_experts(case)
        or _refuse_compile(plan)
        or refuse_undivided(plan, case.cluster)
        or _refuse_flash(plan, case.cluster)
        or refuse_by_techniques(case, OWN)
    )


def _refuse_experts(case: Case) -> Refusal | None:
    """Return why the ranks cannot share the experts; the exchange of tokens is torchtitan's own."""
    plan = case.plan
    if plan.ep == 1:
        return None
    if experts_of(case.job) is None:
        return Refusal(
            technique=f"ep={plan.ep}", reason=f"{case.job.model.name} has no experts", instead="choose ep 1"
        )
    if plan.compile != "none":
        return Refusal(
            technique=f"compile={plan.compile}",
            reason=f"how many tokens go where is read within a compiled block, and ep is {plan.ep}",
            instead="choose compile none, or ep 1",
        )
    return dealt_out(case)


def _refuse_compile(plan: Plan) -> Refusal | None:
    """Return the refusal of compiled blocks under tensor parallelism.

    Dynamo fails on DTensors whose sharding it derives with tensors of its own and the mesh's real one.
    """
    if plan.compile == "none" or plan.tp == 1:
        return None
    return Refusal(
        technique=f"compile={plan.compile}",
        reason=f"up to torch 2.13 it fails on a block of torchtitan 0.3 that tp divides, and tp is {plan.tp}",
        instead="choose compile none, or tp 1",
    )


def _refuse_flash(plan: Plan, cluster: Cluster) -> Refusal | None:
    """Return the refusal of flash attention on cards for which torchtitan takes FlashAttention 3."""
    if plan.attention == "flash" and cluster.device.capability >= (9, 0):
        return Refusal(
            technique="attention=flash",
            reason="from capability 9.0 on its varlen attention wants FlashAttention 3, a package of its own",
            instead="choose attention flex",
        )
    return None


def run(job: Job, plan: Plan, world: World, steps: int) -> object:
    """Train as `torchtitan.train` does, with made-up tokens in place of a data set and its tokenizer."""
    import torch
    from torchtitan.trainer import Trainer

    from tonnage.trainers import common

    os.environ.update(common.launcher_variables(world))
    newer = hasattr(torch.distributed, "set_timeout")
    if not newer:  # the timeout of a group has no effect on memory
        torch.distributed.set_timeout = lambda timeout, group=None: None
    with tempfile.TemporaryDirectory() as folder:
        fields = settings(job, plan, world, steps, _spmd_backend(newer))
        trainer = Trainer(Trainer.Config(dump_folder=folder, **fields))
        trainer.train()
    return trainer


def _spmd_backend(newer: bool) -> str:
    """Return how it divides parameters.

    Its default needs a torch after 2.13, whose FSDP2 takes meshes of many axes.
    """
    return "spmd_types" if newer else "partial_dtensor"


def settings(job: Job, plan: Plan, world: World, steps: int, spmd_backend: str) -> dict[str, Any]:
    """Return the fields of `Trainer.Config` for a plan."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config import CompileConfig, TrainingConfig

    optimizer = default_adamw(lr=1e-4)
    optimizer.implementation = IMPLEMENTATIONS[plan.optimizer]
    parallelism = _parallelism(plan, world, spmd_backend)
    replicas = parallelism.data_parallel_replicate_degree * parallelism.data_parallel_shard_degree
    return {
        "model_spec": networks.spec(job.model, BACKENDS[plan.attention]),
        "loss": _loss(job, plan),
        "optimizer": optimizer,
        "lr_scheduler": LRSchedulersContainer.Config(warmup_steps=1),
        "training": TrainingConfig(
            local_batch_size=job.micro_batch,
            global_batch_size=job.micro_batch * job.grad_accum * replicas,
            seq_len=job.seq_len,
            steps=steps,
            max_norm=float(plan.clip_grad_norm or 1.0),
            enable_cpu_offload=plan.param_offload == "cpu",
            disable_cuda_graphs=True,
            **DTYPES[plan.precision],
        ),
        "parallelism": parallelism,
        "activation_checkpoint": _checkpointing(plan),
        "compile": CompileConfig(enable=plan.compile == "layers"),
        "checkpoint": CheckpointManager.Config(enable=False),
        **_made_up_data(),
    }


def _parallelism(plan: Plan, world: World, spmd_backend: str) -> Any:
    from torchtitan.config import ParallelismConfig

    ranks = world.size // plan.tp
    replicate = {"ddp": ranks, "hsdp": world.size // world.gpus_per_node}.get(plan.shard, 1)
    return ParallelismConfig(
        data_parallel_replicate_degree=replicate,
        data_parallel_shard_degree=ranks // replicate,
        fsdp_reshard_after_forward="never" if plan.shard == "zero2" else "default",
        tensor_parallel_degree=plan.tp,
        expert_parallel_degree=plan.ep,
        enable_sequence_parallel=plan.sequence_parallel != "off",
        spmd_backend=spmd_backend,
    )


def _checkpointing(plan: Plan) -> Any:
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

    return {"none": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}[plan.checkpointing]


def _loss(job: Job, plan: Plan) -> Any:
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss

    plain = CrossEntropyLoss.Config(global_vocab_size=job.model.config["vocab_size"])
    return ChunkedLossWrapper.Config(loss_fn=plain) if plan.loss == "chunked" else plain


def _made_up_data() -> dict[str, Any]:
    """Return a loader of full rows of one document each, and a tokenizer that is never called."""
    from dataclasses import dataclass

    import torch
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer

    class Tokens(BaseDataLoader):  # type: ignore[misc, unused-ignore]
        """A loader of batches (rows, tokens), as torchtitan's loaders give them."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):  # type: ignore[misc, name-defined, unused-ignore]
            """No fields of its own."""

        def __init__(self, config: Config, *, seq_len: int, local_batch_size: int, **others: object) -> None:
            self.shape = (local_batch_size, seq_len)

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            while True:
                tokens = torch.zeros(self.shape, dtype=torch.int64)
                positions = torch.arange(self.shape[1]).repeat(self.shape[0], 1)
                yield {"input": tokens, "positions": positions}, tokens

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            return

    class Words(BaseTokenizer):  # type: ignore[misc, unused-ignore]
        """A tokenizer without a vocabulary."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):  # type: ignore[misc, name-defined, unused-ignore]
            """No fields of its own."""

        def __init__(self, config: Config, **others: object) -> None:
            super().__init__()

        def encode(self, *text: object, **others: object) -> list[int]:
            return []

        def decode(self, *ids: object, **others: object) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return 0

    return {"dataloader": Tokens.Config(), "tokenizer": Words.Config()}


TORCHTITAN_ENGINE: Final = Engine(
    name="torchtitan",
    packages=("torchtitan",),
    expresses={
        **SHAPES,
        "precision": tuple(DTYPES),
        "optimizer": tuple(IMPLEMENTATIONS),
        "clip_grad_norm": ANY,
        "checkpointing": ("none", "full", "selective"),
        "shard": ("none", "ddp", "zero2", "zero3", "hsdp"),
        "param_offload": ("none", "cpu"),
        "tp": ANY,
        "ep": ANY,
        "sequence_parallel": ANY,
        "attention": tuple(BACKENDS),
        "loss": ("plain", "chunked"),
        "compile": ("none", "layers"),
    },
    accepts=accepts,
    imports=("torchtitan.trainer",),
    run=run,
)
