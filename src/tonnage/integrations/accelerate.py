"""A plan inside a loop around accelerate's Accelerator.

    accelerator = PlannedAccelerator(plan="plan.toml")
    optimizer = accelerator.make_optimizer(model, {"lr": 2e-5})       # the plan's, or bring your own
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    print(accelerator.plan_report)      # memory and seconds, beside the prediction

The Accelerator gets the plan's precision, accumulation and sharding.  Checkpointing, offloaded activations, the loss
and the attention are applied to the network in `prepare`, by the code that was estimated; `end_training` takes them
back.  After the first step everything that the plan says is looked for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from accelerate import Accelerator
from torch import nn

from tonnage.errors import UsageError
from tonnage.integrations.measuring import Meter, PlanReport, begin_estimate
from tonnage.integrations.network import APPLIED, PlannedNetwork, check_weights, read
from tonnage.mesh import SHARDING
from tonnage.plans import Plan
from tonnage.step import configuration
from tonnage.step import model as models
from tonnage.step.step import Step
from tonnage.step.world import World
from tonnage.techniques import select_techniques
from tonnage.train import applying, checks
from tonnage.train.prediction import Predicted
from tonnage.trainers import common
from tonnage.trainers.accelerate.run import ACCELERATE_ENGINE, accumulation_settings, sharding_settings

if TYPE_CHECKING:
    from tonnage.job import Job
    from tonnage.train.effects import Effect
    from tonnage.train.prediction import Estimation

_NOT_HERE: Final = ("cp",)
"""Options that the engine has, and for which a loop must place its batches itself."""


class PlannedAccelerator(Accelerator):  # type: ignore[misc]
    """An Accelerator under a plan."""

    def __init__(self, plan: Plan | str | Path, job: Job | None = None, **options: Any) -> None:
        """Make the Accelerator that the plan says; `options` are its other arguments."""
        own, stated, cluster = applying.read_plan(plan, job)
        if isinstance(plan, Plan) and job is None:  # it says nothing of batches
            stated = replace(stated, grad_accum=options.get("gradient_accumulation_steps", 1))
        check_expressible(own)
        ranks = checks.count_ranks(own, None if cluster is None else cluster.gpus)
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        world = World(size=ranks, rank=0, gpus_per_node=per_node, device=torch.device("cpu"))
        settings = {
            "mixed_precision": own.compute_dtype if own.precision.endswith("-mixed") else "no",
            **accumulation_settings(stated, own),
            **sharding_settings(stated, own, world),
        }
        for name, value in settings.items():
            if name in options and options[name] != value:
                print(f"the plan sets {name}={value!r} (it was {options[name]!r})", file=sys.stderr)
        self.plan, self.plan_job, self._cluster = own, stated, cluster
        self._path = None if isinstance(plan, Plan) else plan
        self._planned: PlannedNetwork | None = None
        self._wrapped: nn.Module | None = None
        self._own_optimizers: list[torch.optim.Optimizer] = []
        self._meter = Meter(self._look)
        self._predicted = Predicted()
        self._estimation: Estimation | None = None
        super().__init__(**{**options, **settings})
        checks.warn_of_device(cluster, self.device.type)

    @property
    def plan_report(self) -> PlanReport:
        """Return memory and seconds so far, beside the prediction, for which it waits."""
        if self._estimation is not None:
            self._predicted, reason = self._estimation.wait()
            self._estimation = None
            if reason:
                print(f"no prediction: {reason}", file=sys.stderr)
        return replace(self._meter.report, predicted=self._predicted)

    def make_optimizer(self, network: nn.Module, hyperparameters: Mapping[str, Any]) -> torch.optim.Optimizer:
        """Return the plan's optimizer over the network's trained parameters, before `prepare`."""
        checks.check_hyperparameters(self.plan, hyperparameters)
        step = Step(
            job=self.plan_job,
            plan=self.plan,
            world=World(device=self.device),
            initialise=False,
            hyperparameters=dict(hyperparameters),
        )
        for technique in select_techniques(self.plan_job, self.plan):
            if technique.option == "optimizer":
                step = technique.apply(step)
        [(parameters, new)] = step.optimizer_parts(network)
        return new(parameters)

    def prepare(self, *things: Any, **options: Any) -> Any:
        """Apply the plan to the network, check loaders, and prepare all as accelerate does."""
        for thing in things:
            if isinstance(thing, nn.Module):
                self._apply(thing)
            elif isinstance(thing, torch.utils.data.DataLoader):
                self._check_rows(thing)
        prepared = super().prepare(*things, **options)
        for thing in prepared if isinstance(prepared, tuple) else (prepared,):
            if isinstance(thing, nn.Module):
                self._wrapped = thing
            elif isinstance(getattr(thing, "optimizer", None), torch.optim.Optimizer):
                self._own_optimizers.append(thing.optimizer)
                if len(self._own_optimizers) == 1:
                    thing.optimizer.register_step_post_hook(lambda *_: self._end_step())
        return prepared

    @contextmanager
    def accumulate(self, *networks: Any) -> Iterator[None]:
        """Enter accelerate's accumulation, and the techniques' contexts around forward and backward."""
        if self._planned is None:
            raise UsageError("Prepare the network first: accelerator.prepare(model, optimizer, loader).")
        with super().accumulate(*networks), self._planned.around():
            yield

    def end_training(self) -> None:
        """Give the network its own forwards, hooks and `use_cache` back, and end accelerate's trackers."""
        if self._planned is not None:
            self._planned.undo()
            configuration.restore_caches(self._caches)
            self._planned = None
        if self._estimation is not None:
            self._estimation.end()
        super().end_training()

    def _apply(self, network: nn.Module) -> None:
        if self._planned is not None:
            raise UsageError(
                "The plan is for one network, and another was prepared before; use an Accelerator for it."
            )
        self.plan, self.plan_job, _ = read(self.plan, self.plan_job, network)
        cluster = self._cluster or applying.this_cluster(self.device.type, self.num_processes)
        checks.check_techniques(self.plan_job, self.plan, cluster)
        check_weights(network, self.plan_job, self.plan)
        self._planned = PlannedNetwork(network, self.plan_job, self.plan, self.device)
        inner = models.hugging_face(network)
        self._caches = [] if inner is None else configuration.disable_caches(inner)
        plugin = getattr(self.state, "fsdp_plugin", None)
        if self.plan.shard in SHARDING and plugin is not None and (layers := common.layers_to_wrap(network)):
            plugin.transformer_cls_names_to_wrap = list(layers)
        if self._path is not None and self.device.type == "cuda" and self.is_main_process:
            self._estimation = begin_estimate(self._path)
        self._meter.begin()
        self._meter.begin_step()

    def _check_rows(self, loader: Any) -> None:
        """Name on stderr a loader whose batches are not the plan's."""
        planned = self.plan_job.micro_batch
        if self._path is not None and loader.batch_size not in (None, planned):
            print(
                f"the loader's batches have {loader.batch_size} rows, and the plan was made for {planned}",
                file=sys.stderr,
            )

    def _end_step(self) -> None:
        self._meter.end_step()
        self._meter.begin_step()

    def _look(self) -> tuple[Effect, ...]:
        assert self._planned is not None
        assert self._wrapped is not None
        autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.mixed_precision)
        return self._planned.took_effect(
            self._wrapped, self._own_optimizers, autocast, scales_loss=self.mixed_precision == "fp16"
        )


def check_expressible(plan: Plan) -> None:
    """Raise UsageError for a plan that a loop around an Accelerator cannot carry out."""
    usual = Plan()
    for name, value in vars(plan).items():
        default = getattr(usual, name)
        if name in ("engine", *APPLIED) or value == default:
            continue
        if name in _NOT_HERE or not ACCELERATE_ENGINE.has_setting(name, value, default):
            possible = ", ".join((ACCELERATE_ENGINE.expresses or {}).get(name, (str(default),)))
            raise UsageError(
                f"A loop around an Accelerator cannot carry out {name.replace('_', '-')} {value}; possible: "
                f"{default if name in _NOT_HERE else possible}; tonnage.apply and tonnage train do."
            )
