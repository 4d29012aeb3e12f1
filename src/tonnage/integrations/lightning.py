"""A plan inside Lightning's Trainer.

    trainer = Trainer(**plan_arguments("plan.toml"), callbacks=[PlanCallback("plan.toml")])
    trainer.fit(module, loader)
    callback.plan_report      # memory and seconds, beside the prediction

`plan_arguments` are the Trainer's settings of precision, accumulation, clipping and replication.  The callback checks
that the Trainer has them.  It applies checkpointing, offloaded activations, the loss and the attention to the
transformers network inside the LightningModule while `fit` runs, and looks after the first step for everything that
the plan says.  Lightning's FSDP is the older FSDP1, whose memory is not what was estimated: plans that shard are
refused.
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
from tonnage.plans import Plan
from tonnage.step import configuration
from tonnage.step import model as models
from tonnage.train import applying, checks
from tonnage.train.prediction import Predicted

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError:
        raise UsageError(
            "tonnage.integrations.lightning needs lightning, which is not installed: pip install lightning."
        ) from None

if TYPE_CHECKING:
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

_STRATEGIES: Final = {"none": "auto", "ddp": "ddp"}
"""Lightning's word for each way to use several GPUs."""

_FREE: Final = ("engine", "optimizer", "clip_grad_norm", "allocator", "outputs")
"""Options of any value: the optimizer is the LightningModule's, and is looked for after the first step."""


def plan_arguments(plan: Plan | str | Path, job: Job | None = None) -> dict[str, Any]:
    """Return the arguments of Lightning's Trainer that a plan decides."""
    own, stated, cluster = applying.read_plan(plan, job)
    check_expressible(own)
    arguments: dict[str, Any] = {
        "precision": _PRECISIONS[own.precision],
        "strategy": _STRATEGIES[own.shard],
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
        checks.check_techniques(job, plan, cluster or applying.this_cluster(kind, trainer.world_size))
        check_weights(pl_module, job, plan)
        inner = models.hugging_face(pl_module)
        network = checks.adapted(pl_module) or inner or pl_module
        self._cache = None if inner is None else inner.config.use_cache
        self._applied = PlannedNetwork(network, job, plan, trainer.strategy.root_device)
        if inner is not None:
            configuration.disable_cache(inner.config)
        self._meter = Meter(lambda: self._look(trainer))
        self._steps = trainer.global_step
        if not isinstance(self._given, Plan) and kind == "cuda" and trainer.is_global_zero:
            self._estimation = begin_estimate(self._given)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to measure."""
        self._meter.begin()
        self._meter.begin_step()

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        """Enter the techniques' contexts around forward and backward."""
        if self._applied is not None:
            self._around.enter_context(self._applied.around())

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
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give the network its own forwards, hooks and `use_cache` back."""
        if self._estimation is not None:
            self._estimation.end()
            self._estimation = None
        if self._applied is not None:
            self._applied.undo()
            inner = models.hugging_face(self._applied.network)
            if inner is not None and self._cache is not None:
                inner.config.use_cache = self._cache
            self._applied = None

    def _look(self, trainer: Any) -> tuple[Effect, ...]:
        assert self._applied is not None
        autocast = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(trainer.precision)
        return self._applied.took_effect(
            trainer.strategy.model, trainer.optimizers, autocast, scales_loss=trainer.precision == "16-mixed"
        )


def check_expressible(plan: Plan) -> None:
    """Raise UsageError for a plan that Lightning's Trainer cannot carry out."""
    possible = {"precision": tuple(_PRECISIONS), "shard": tuple(_STRATEGIES)}
    usual = Plan()
    for name, value in vars(plan).items():
        if name in (*_FREE, *APPLIED) or value in possible.get(name, (getattr(usual, name),)):
            continue
        choices = ", ".join(possible.get(name, (str(getattr(usual, name)),)))
        raise UsageError(
            f"Lightning's Trainer cannot carry out {name.replace('_', '-')} {value} as it was estimated; possible: "
            f"{choices}; tonnage.apply and tonnage train do."
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
    if plan.shard == "none" and trainer.world_size > 1:
        raise UsageError(
            f"shard is none, and the Trainer uses {trainer.world_size} GPUs; choose shard ddp, or devices=1."
        )
