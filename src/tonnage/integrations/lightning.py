"""A plan inside Lightning's Trainer.

    trainer = Trainer(**plan_arguments("plan.toml"), callbacks=[PlanCallback("plan.toml")])
    trainer.fit(module, loader)
    callback.plan_report      # memory and seconds, beside the prediction

`plan_arguments` are the Trainer's settings of precision, accumulation, clipping and replication.  The callback checks
that the Trainer has them.  It applies checkpointing, offloaded activations, the loss and the attention to the
transformers network inside the LightningModule while `fit` runs, and looks after the first step for everything that
the plan says.

Plans that shard (zero2, zero3, hsdp) run under Lightning's ModelParallelStrategy, which leaves it to the program to
divide the network: the callback does so by the code that was estimated, and FSDP2 itself computes in bf16.
Lightning's FSDPStrategy is the older FSDP1, whose memory is another.  Parameters on the host are refused: the
strategy moves all to the card.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from tonnage.errors import UsageError
from tonnage.integrations.measuring import Meter, PlanReport, begin_estimate
from tonnage.integrations.network import APPLIED, PlannedNetwork, check_weights, read
from tonnage.mesh import SHARDING
from tonnage.plans import Plan
from tonnage.step import configuration
from tonnage.step import model as models
from tonnage.train import applying, checks
from tonnage.train.prediction import Predicted

try:
    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch.strategies import ModelParallelStrategy
except ImportError:
    try:
        from pytorch_lightning import Callback, LightningModule
        from pytorch_lightning.strategies import ModelParallelStrategy
    except ImportError:
        raise UsageError(
            "tonnage.integrations.lightning needs lightning, which is not installed: pip install lightning."
        ) from None

if TYPE_CHECKING:
    from torch import nn

    from tonnage.job import Job
    from tonnage.train.effects import Effect
    from tonnage.train.prediction import Estimation

_PRECISIONS: Final = {
    "fp32": "32-true",
    "bf16-mixed": "bf16-mixed",
    "fp16-mixed": "16-mixed",
    "bf16-true": "bf16-true",
}
"""Lightning's word for each precision."""

_STRATEGIES: Final = {"none": "auto", "ddp": "ddp", **dict.fromkeys(SHARDING)}
"""Lightning's word for each way to use several GPUs; None: a ModelParallelStrategy."""

_FREE: Final = ("engine", "optimizer", "clip_grad_norm", "allocator", "outputs", "accum_sync")
"""Options of any value: the optimizer is the LightningModule's, and is looked for after the first step."""


def plan_arguments(plan: Plan | str | Path, job: Job | None = None) -> dict[str, Any]:
    """Return the arguments of Lightning's Trainer that a plan decides."""
    own, stated, cluster = applying.read_plan(plan, job)
    check_expressible(own)
    is_sharded = own.shard in SHARDING  # FSDP2 casts by itself
    ranks = checks.started_as()[1] if cluster is None else cluster.gpus
    arguments: dict[str, Any] = {
        "precision": "32-true" if is_sharded and own.precision != "bf16-true" else _PRECISIONS[own.precision],
        "strategy": _STRATEGIES[own.shard] or ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1),
        "gradient_clip_val": own.clip_grad_norm,
    }
    if not isinstance(plan, Plan) or job is not None:  # a bare plan says nothing of batches
        arguments["accumulate_grad_batches"] = stated.grad_accum
    if cluster is not None:
        arguments |= {"devices": cluster.gpus_per_node, "num_nodes": cluster.nodes}
    return arguments


class PlanCallback(Callback):  # type: ignore[misc]
    """Applies a plan to the network of a LightningModule while `fit` runs, and measures its steps."""

    def __init__(self, plan: Plan | str | Path, job: Job | None = None) -> None:
        """`job` says what is trained beside a bare Plan."""
        check_expressible(applying.read_plan(plan, job)[0])
        self._given, self._job = plan, job
        self._applied: PlannedNetwork | None = None
        self._meter = Meter(lambda: ())
        self._predicted = Predicted()
        self._estimation: Estimation | None = None
        self._caches: list[tuple[Any, bool]] = []
        self._around = ExitStack()
        self._steps = 0

    @property
    def plan_report(self) -> PlanReport:
        """Return memory and seconds of the last `fit`, beside the prediction."""
        return replace(self._meter.report, predicted=self._predicted)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check the Trainer, and apply the plan before it wraps the network."""
        if stage != "fit":
            return
        plan, job, cluster = read(self._given, self._job, pl_module, accumulated=trainer.accumulate_grad_batches)
        wanted = plan_arguments(self._given, self._job)
        _check_trainer(trainer, plan, wanted)
        kind = "cuda" if trainer.strategy.root_device.type == "cuda" else "cpu"
        checks.warn_of_device(cluster, kind)
        checks.check_techniques(job, plan, cluster or applying.this_cluster(kind, trainer.world_size))
        check_weights(pl_module, job, plan)
        inner = models.hugging_face(pl_module)
        network = checks.adapted(pl_module) or inner or pl_module
        if plan.shard in SHARDING:
            _check_shardable(pl_module, network if network is not pl_module else None, job)
        self._applied = PlannedNetwork(network, job, plan, trainer.strategy.root_device)
        if plan.shard in SHARDING:
            self._applied.shard(ranks=trainer.world_size, ranks_per_node=trainer.num_devices)
            if type(pl_module).configure_model is LightningModule.configure_model:
                vars(pl_module)["configure_model"] = lambda: None  # the strategy asks for one, and the work is done
        self._caches = [] if inner is None else configuration.disable_caches(inner)
        self._meter = Meter(lambda: self._look(trainer))
        self._steps = trainer.global_step
        if not isinstance(self._given, Plan) and kind == "cuda" and trainer.is_global_zero:
            self._estimation = begin_estimate(self._given)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to measure."""
        self._meter.begin()
        self._meter.begin_step()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Enter the techniques' contexts around forward and backward."""
        if self._applied is not None:
            done = batch_idx + 1
            is_last = done % trainer.accumulate_grad_batches == 0 or done == trainer.num_training_batches
            self._around.enter_context(self._applied.around(is_last=is_last))

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Leave them, and add the step if the optimizer made one."""
        self._around.close()
        if trainer.global_step > self._steps:
            self._steps = trainer.global_step
            self._meter.end_step()
            self._meter.begin_step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Print the report where there is a prediction."""
        if self._estimation is not None:
            self._predicted, reason = self._estimation.wait()
            self._estimation = None
            print(f"no prediction: {reason}" if reason else self.plan_report, file=sys.stderr)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the contexts of the batch that failed, and give the network back."""
        self._around.close()
        if self._applied is not None and self._applied.is_sharded:
            self._applied = None  # the other ranks may not be there to put the network together
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give the network its own forwards, hooks and `use_cache` back."""
        if self._estimation is not None:
            self._estimation.end()
            self._estimation = None
        if self._applied is not None:
            self._applied.undo()
            vars(pl_module).pop("configure_model", None)
            configuration.restore_caches(self._caches)
            self._applied = None

    def _look(self, trainer: Any) -> tuple[Effect, ...]:
        assert self._applied is not None
        autocast = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(trainer.precision)
        return self._applied.took_effect(
            trainer.strategy.model, trainer.optimizers, autocast, scales_loss=trainer.precision == "16-mixed"
        )


def check_expressible(plan: Plan) -> None:
    """Raise UsageError for a plan that Lightning's Trainer cannot carry out."""
    precisions = tuple(name for name in _PRECISIONS if plan.shard not in SHARDING or name != "fp16-mixed")
    possible = {"precision": precisions, "shard": tuple(_STRATEGIES)}
    usual = Plan()
    for name, value in vars(plan).items():
        if name in (*_FREE, *APPLIED) or value in possible.get(name, (getattr(usual, name),)):
            continue
        choices = ", ".join(possible.get(name, (str(getattr(usual, name)),)))
        raise UsageError(
            f"Lightning's Trainer cannot carry out {name.replace('_', '-')} {value} as it was estimated; possible: "
            f"{choices}; tonnage.apply and tonnage train do."
        )


def _check_shardable(module: nn.Module, network: nn.Module | None, job: Job) -> None:
    """Raise UsageError for a LightningModule whose network cannot be divided, or has trained parameters beside it."""
    if network is None or job.method != "full":
        what = f"a job with method {job.method}" if network is not None else "a module without a transformers network"
        raise UsageError(f"The plan shards, and here is {what}; tonnage.apply divides it.")
    inside = {id(parameter) for parameter in network.parameters()}
    beside = [name for name, parameter in module.named_parameters() if id(parameter) not in inside]
    if beside:
        raise UsageError(
            f"The plan shards the transformers network, and {beside[0]} is a parameter beside it, whose gradients "
            "the ranks would not average; put it into the network, or use shard ddp."
        )


def _check_trainer(trainer: Any, plan: Plan, wanted: dict[str, Any]) -> None:
    """Raise UsageError if the Trainer was made with other settings than the plan's."""
    has = {
        "precision": trainer.precision,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
        "devices": trainer.num_devices,
        "num_nodes": trainer.num_nodes,
    }
    for name, value in has.items():
        if name in wanted and value != wanted[name]:
            raise UsageError(
                f"The plan needs {name}={wanted[name]!r}, and the Trainer has {value!r}; make it with "
                "Trainer(**plan_arguments(plan), ...)."
            )
    if plan.shard in SHARDING and not isinstance(trainer.strategy, ModelParallelStrategy):
        raise UsageError(
            f"shard {plan.shard} needs Lightning's ModelParallelStrategy, and the Trainer has "
            f"{type(trainer.strategy).__name__}; make it with Trainer(**plan_arguments(plan), ...)."
        )
    if plan.shard == "none" and trainer.world_size > 1:
        raise UsageError(
            f"shard is none, and the Trainer uses {trainer.world_size} GPUs; choose shard ddp, or devices=1."
        )
