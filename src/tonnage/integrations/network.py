"""The changes of a plan to a network inside a trainer that keeps its own loop, optimizer and sharding.

Checkpointing, offloaded activations, the loss and the attention are applied by the techniques that were estimated;
the trainer's own settings for them stay off.  `undo` takes back what they changed and nothing that the trainer did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from tonnage.errors import UsageError
from tonnage.job import Job
from tonnage.plans import Plan
from tonnage.step import model as models
from tonnage.step.given import GivenNetwork
from tonnage.step.step import ReadyStep, Step
from tonnage.step.world import World, join
from tonnage.techniques import qlora, select_techniques
from tonnage.train import applying, checks, effects, networks
from tonnage.train.restoring import Snapshot

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from tonnage.cluster import Cluster
    from tonnage.train.effects import Effect

APPLIED: Final = ("attention", "checkpointing", "activation_offload", "loss")
"""Options of a plan that are applied here."""

LIGER: Final = "liger"
"""A loss that trainers switch on themselves, with Liger's other kernels."""

_ABSENT: Final = object()


class PlannedNetwork:
    """A network under the options of APPLIED, until `undo`."""

    def __init__(self, network: nn.Module, job: Job, plan: Plan, device: torch.device) -> None:
        self.network = network
        self._whole: Snapshot | None = None
        before = _attributes(network)
        step = Step(job=job, plan=plan, world=World(device=device), initialise=False, given=GivenNetwork(network))
        for technique in select_techniques(job, plan):
            if technique.option in networks.OF_WEIGHTS:
                step = replace(technique.apply(step), changes=step.changes)  # adapters are the trainer's
            elif technique.option in APPLIED and not (technique.option == "loss" and plan.loss == LIGER):
                step = technique.apply(step)
        self._configuration = _attention_of(network)
        if step.attention is not None:
            _set_attention(network, step.attention, plan)
        for change in step.changes:
            changed = change(network)
            if changed is not network:
                raise UsageError(f"{plan.checkpointing} wraps the network, which a trainer would not see.")
        self._switch_losses(before)
        self.step = step
        self._undo = list(_differences(before, network))

    @property
    def is_sharded(self) -> bool:
        """Return True between `shard` and `undo`."""
        return self._whole is not None

    def shard(self, *, ranks: int, ranks_per_node: int) -> None:
        """Divide the network among the ranks of the process group.  Raises UsageError if their weights differ."""
        plan, world = self.step.plan, replace(self.step.world, size=ranks, gpus_per_node=ranks_per_node)
        step = replace(self.step, world=join(world, plan, alone=False))
        _check_same(self.network, world.device)
        for technique in select_techniques(step.job, plan):
            if technique.option == "shard":
                step = technique.apply(step)
        assert self.step.given is not None
        assert step.shard is not None
        self._whole = Snapshot(self.network)
        step.shard(self.network)
        self.step.given.release()
        self.step = step

    @contextmanager
    def around(self, *, is_last: bool = True) -> Iterator[None]:
        """Enter the techniques' contexts, around forward and backward of a micro-batch; `is_last` of its step.

        Ranks that share a sharded network exchange gradients in the last one alone, if the plan lets them.
        """
        with ExitStack() as stack:
            if self.is_sharded and not is_last and not self.step.plan.accum_sync:
                stack.enter_context(self.step.gradients_stay_local(self.network))
            for context in self.step.contexts:
                stack.enter_context(context())
            yield

    def took_effect(
        self,
        wrapped: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        autocast_dtype: torch.dtype | None,
        *,
        scales_loss: bool,
    ) -> tuple[Effect, ...]:
        """Return what is found for each option of the plan, in the network as the trainer wrapped it.

        `autocast_dtype` and `scales_loss` are what the trainer does.
        """
        step = replace(self.step, autocast_dtype=autocast_dtype, scales_loss=scales_loss)
        return effects.look(ReadyStep(step=step, model=wrapped, optimizers=tuple(optimizers)))

    def undo(self) -> None:
        """Give modules the forwards, hooks and switches that they had, and whole weights to each rank."""
        if self._whole is not None:
            assert self.step.given is not None
            values = self.step.given.current()
            self._whole.restore()
            self.step.given.give_back(values)
            self._whole = None
        for take_back in self._undo:
            take_back()
        inner = models.hugging_face(self.network)
        if inner is not None and inner.config._attn_implementation != self._configuration:
            inner.set_attn_implementation(self._configuration)

    def _switch_losses(self, before: dict[Any, dict[str, tuple[Any, Any]]]) -> None:
        """Put a switch before each forward that computes the plan's loss: evaluations have the network's own.

        Trainers wrap a network's forward, for autocast for example: it must stay the same one in evaluations.
        """
        for module in self.network.modules():
            forward = vars(module).get("forward")
            if not effects.computes_planned_loss(module) or forward is before[module].get("forward", (None,))[0]:
                continue
            own, _ = before[module].get("forward", (MethodType(type(module).forward, module), None))
            module.forward = MethodType(_choose(forward, own), module)


def check_weights(network: nn.Module, job: Job, plan: Plan) -> None:
    """Raise UsageError if the network's weights, adapters or quantized layers are not those of the plan."""
    if job.method != "full" and checks.adapted(network) is None:
        raise UsageError(
            f"The job's method is {job.method}, and {type(network).__name__} has no adapters: all weights would be "
            "trained; give what peft.get_peft_model returns."
        )
    checks.check_quantized(job, plan, network)
    checks.check_dtypes(networks.weights_step(job, plan), network)


def _check_same(network: nn.Module, device: torch.device) -> None:
    """Raise UsageError if the ranks' weights are not the same: each of them gives a part of the whole."""
    sums = torch.stack([parameter.detach().double().sum() for parameter in network.parameters()]).to(device)
    first = sums.clone()
    dist.broadcast(first, 0)
    differs = torch.tensor(float(not torch.equal(sums, first)), device=device)
    dist.all_reduce(differs)
    if differs:
        raise UsageError(
            "The ranks have networks with different weights; load the same ones, or call lightning's seed_everything "
            "before the network is made."
        )


def _choose(planned: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that is the planned one in training, and else the network's own."""

    from transformers.modeling_outputs import CausalLMOutput

    @wraps(getattr(own, "__func__", own))
    def forward(module: nn.Module, *arguments: Any, **options: Any) -> Any:
        if not module.training:
            return own(*arguments, **options)
        output = planned(*arguments, **options)
        return CausalLMOutput(loss=output[0]) if isinstance(output, tuple) else output

    setattr(forward, effects.PLANNED, planned)
    return forward


def read(
    plan: Plan | str | Path,
    job: Job | None,
    network: nn.Module,
    *,
    micro_batch: int | None = None,
    accumulated: int = 1,
) -> tuple[Plan, Job, Cluster | None]:
    """Return plan, job and GPUs of a plan file or a Plan, for this network.

    The batches beside a bare Plan are the trainer's own.
    """
    if isinstance(plan, Plan) and job is None:
        job = Job(grad_accum=accumulated)
        job = job if micro_batch is None else replace(job, micro_batch=micro_batch)
    plan, job, cluster = applying.read_plan(plan, job)
    checks.check_network(network)
    job = replace(job, model=applying.reference(network))
    if qlora.formats(network):
        job = job.with_method("qlora")
    elif checks.adapted(network) is not None and job.method == "full":
        job = job.with_method("lora")
    return plan, job, cluster


def planned_batches(job: Job, plan: Plan) -> dict[str, Any]:
    """Return the plan's options that a trainer's own settings express, without those that are applied here."""
    loss: Any = plan.loss if plan.loss == LIGER else "plain"
    own: dict[str, Any] = {"attention": "auto", "checkpointing": "none", "activation_offload": "none", "loss": loss}
    return {"job": job, "plan": replace(plan, **own)}


def _attention_of(network: nn.Module) -> str | None:
    inner = models.hugging_face(network)
    return None if inner is None else inner.config._attn_implementation


def _set_attention(network: nn.Module, implementation: str, plan: Plan) -> None:
    inner = models.hugging_face(network)
    if inner is None:
        raise UsageError(
            f"attention {plan.attention} is chosen through transformers, and {type(network).__name__} is no network "
            "of it; choose attention auto."
        )
    inner.set_attn_implementation(implementation)


def _attributes(network: nn.Module) -> dict[Any, dict[str, tuple[Any, Any]]]:
    """Return each module's attributes, and the content of those that are dicts: hooks, buffers."""
    return {
        module: {name: _with_content(value) for name, value in vars(module).items()} for module in network.modules()
    }


def _with_content(value: Any) -> tuple[Any, Any]:
    return value, dict(value) if isinstance(value, dict) else None


def _differences(before: dict[Any, dict[str, tuple[Any, Any]]], network: nn.Module) -> Iterator[Callable[[], None]]:
    """Yield a function for each attribute, and each entry of a dict, that is not as before; it takes it back."""
    for module in network.modules():
        held = before.get(module, {})
        for name, value in list(vars(module).items()):
            old, content = held.get(name, (_ABSENT, None))
            if value is not old:
                yield lambda module=module, name=name, old=old: _set_attribute(module, name, old)  # type: ignore[misc]
            elif content is not None:
                for key in [key for key in value if key not in content]:
                    yield lambda value=value, key=key: value.pop(key, None)  # type: ignore[misc]


def _set_attribute(module: nn.Module, name: str, value: Any) -> None:
    if value is _ABSENT:
        vars(module).pop(name, None)
    else:
        vars(module)[name] = value
