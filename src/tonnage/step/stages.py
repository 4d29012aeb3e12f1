"""Pipeline stages: the layers that a rank holds of a network that is cut between its layers, and their schedule.

The schedule and its sends and receives are torch's (torch.distributed.pipelining).  Shapes of what a stage receives
are given beforehand, so that a rank can run although no other rank answers.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tonnage.errors import CannotEstimate, UsageError
from tonnage.step import model as models
from tonnage.step.model import Batch, causal_network
from tonnage.units import pluralise

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from tonnage.step.step import ReadyStep

_LAST_STAGE_INPUTS = ("labels", "shift_labels", "num_items_in_batch")
"""Inputs that only the last stage gets."""
_END_STAGE_INPUTS = ("input_ids", *_LAST_STAGE_INPUTS)


class Stage(nn.Module):  # type: ignore[misc]
    """The layers between two cuts; the first stage also has the embedding, the last one norm, head and loss."""

    def __init__(self, network: nn.Module, *, index: int, count: int, tied: bool = False) -> None:
        super().__init__()
        self.network = network
        self.index, self.count = index, count
        self.tied = tied
        """True if embedding and head are one weight, of which first and last stage have a copy each."""
        self.between: DeviceMesh | None = None
        """Ranks that shard hidden states along the sequence (sequence parallelism); None: they are replicated."""
        self.around: Any = nullcontext
        """Context around the forward alone: autocast."""
        self.divisors: Iterator[float] = itertools.repeat(1.0)
        """Number by which the loss of each of the next micro-batches is divided."""

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    @property
    def copied(self) -> nn.Parameter | None:
        """Return the weight that another stage has a copy of; None without one."""
        if not self.tied or not (self.is_first or self.is_last):
            return None
        network: Any = self.network
        end = network.get_input_embeddings() if self.is_first else network.get_output_embeddings()
        weight: nn.Parameter = end.weight
        return weight

    def forward(self, given: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Return hidden states, or the loss, for token ids or hidden states."""
        name = "input_ids" if self.is_first else "inputs_embeds"
        with self.around():
            inputs = {**inputs, name: given if self.is_first else self._as_dtensor(given)}
            if self.is_last:
                return models.loss_of(self.network(**inputs)) / next(self.divisors)
            base: Any = self.network
            return self._as_local(base.base_model(**inputs)[0])

    def _as_dtensor(self, part: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor import Shard

        return part if self.between is None else DTensor.from_local(part, self.between, [Shard(1)], run_check=False)

    def _as_local(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.to_local() if isinstance(whole, DTensor) else whole


class Parts(nn.Module):  # type: ignore[misc]
    """The stages that one rank of an interleaved pipeline holds."""

    def __init__(self, stages: Iterable[nn.Module]) -> None:
        super().__init__()
        for number, stage in enumerate(stages):
            self.add_module(f"part{number}", stage)


def layers_of_stage(layers: int, index: int, count: int) -> range:
    """Return the layers of a stage: equally many, except that the stages after the first get the remainder, one each.

    The first stage gets none of it because it keeps the activations of the most micro-batches.
    """
    quotient, remainder = divmod(layers, count)
    begin = index * quotient + max(0, min(index - 1, remainder))
    return range(begin, begin + quotient + (1 if 1 <= index <= remainder else 0))


def cut(module: nn.Module, *, index: int, count: int) -> Stage:
    """Return the network, on the meta device, without what other stages hold.

    Layers keep their places and names: those of other stages become modules that return their input.  Raises
    UsageError for more stages than layers, CannotEstimate for networks that are not embedding, layers, norm and head.
    """
    network = causal_network(module, "A pipeline", "pp 1")
    base, embedding = network.base_model, network.get_input_embeddings()
    lists = [child for child in base.children() if models.is_layer_list(child)]
    ends = [
        child
        for child in base.children()
        if child is not embedding and models.has_parameters(child) and child not in lists
    ]
    if len(lists) != 1 or len(ends) != 1:
        modules = ", ".join(type(child).__name__ for child in (*lists, *ends))
        raise CannotEstimate(
            f"Where {type(network).__name__} is cut into stages is not known: beside its embedding it has {modules}; "
            "choose pp 1."
        )
    tied = network.get_output_embeddings().weight is embedding.weight
    [layers], [norm] = lists, ends
    if len(layers) < count:
        there = pluralise(len(layers), "layer")
        raise UsageError(f"{there} cannot be cut into {count} stages; choose at most {len(layers)}.")
    own_layers = layers_of_stage(len(layers), index, count)
    for place in range(len(layers)):
        if place not in own_layers:
            layers[place] = models.Absent()
    if index > 0:
        _replace_by_absent(base, embedding)
    if index < count - 1:
        _replace_by_absent(base, norm)
        network.set_output_embeddings(models.Absent())
    return Stage(network, index=index, count=count, tied=tied)


def _replace_by_absent(parent: nn.Module, child: nn.Module) -> None:
    name = next(name for name, candidate in parent.named_children() if candidate is child)
    setattr(parent, name, models.Absent())


class Pipeline:
    """Runs all micro-batches of a step through this rank's stages."""

    def __init__(self) -> None:
        self._schedule: Any = None
        self._shape: tuple[int, ...] = ()  # for which the schedule is: micro-batches, their rows and tokens
        self._end_stages: Any = None

    def __call__(self, ready: ReadyStep, batches: Sequence[Batch], divisors: Sequence[float]) -> None:
        """Run forward and backward of every micro-batch in the order of the plan's schedule.

        It cuts one tensor into micro-batches, all of one shape.
        """
        stages = _stages(ready.model)
        batch = ready.to_device(_join(batches))
        losses: list[torch.Tensor] | None = [] if ready.observers else None
        with ready.around(), ready.step.on_batch(batch) as inputs:
            shape = (len(divisors), *inputs["input_ids"].shape)
            if self._shape != shape:
                self._schedule, self._shape = _schedule(ready, inputs["input_ids"], len(divisors)), shape
            for stage in stages:
                stage.divisors = iter(divisors)
            others = {name: value for name, value in inputs.items() if name not in _END_STAGE_INPUTS}
            given = (inputs["input_ids"],) if any(stage.is_first for stage in stages) else ()
            if any(stage.is_last for stage in stages):
                others |= {name: inputs[name] for name in _LAST_STAGE_INPUTS if name in inputs} | {
                    "target": inputs.get("labels", inputs.get("shift_labels"))
                }
            if "num_items_in_batch" in others:  # counted over all micro-batches, but the loss is that of one
                others["num_items_in_batch"] /= len(divisors)
            self._schedule.step(*given, losses=losses, **others, **_options_without_outputs(self._schedule))
        for loss in losses or ():
            for observer in ready.observers:
                observer.see_loss(loss)
        if stages[0].tied:
            self._add_up_copies(ready, stages)

    def _add_up_copies(self, ready: ReadyStep, stages: list[Stage]) -> None:
        """Give both copies of a tied weight the sum of their gradients, as Megatron does."""
        if self._end_stages is None:
            self._end_stages = _make_end_stages_group(ready)
        for stage in stages:
            weight = stage.copied
            if weight is not None and weight.requires_grad:
                gradient = weight.grad
                if gradient is None:
                    raise CannotEstimate("The gradient of a weight shared by two stages is missing; choose pp 1.")
                weight.is_copy = stage.is_last  # the norm of all gradients counts one of the two
                dist.all_reduce(
                    gradient.to_local() if isinstance(gradient, DTensor) else gradient, group=self._end_stages
                )


def _join(batches: Sequence[Batch]) -> Batch:
    """Return the micro-batches one below the other in each tensor."""
    host = [batches[index] for index in range(len(batches))]
    return host[0] if len(host) == 1 else {name: torch.cat([part[name] for part in host]) for name in host[0]}


def _options_without_outputs(schedule: Any) -> dict[str, Any]:
    """Return the option that drops the last stage's outputs, which are losses, if this torch has it."""
    return {"return_outputs": False} if _can_drop_outputs(schedule) else {}


def _options_to_sum_outputs(schedule: Any) -> dict[str, Any]:
    """Return the option that sums outputs in older versions (2.8), which otherwise concatenate them."""
    from torch.distributed.pipelining import microbatch

    return {} if _can_drop_outputs(schedule) else {"output_merge_spec": microbatch.sum_reducer}


def _can_drop_outputs(schedule: Any) -> bool:
    return "return_outputs" in inspect.signature(schedule.step).parameters


def _make_end_stages_group(ready: ReadyStep) -> Any:
    """Return the process group of the first and the last rank of this rank's pipeline; all ranks join in making
    each group.
    """
    world = ready.step.world
    inner = world.size // world.axes.pp
    own_group = None
    for first in range(inner):
        group = dist.new_group([first, first + (world.axes.pp - 1) * inner])
        if first == world.rank % inner:
            own_group = group
    return own_group


def _stages(model: nn.Module) -> list[Stage]:
    return [module for module in model.modules() if isinstance(module, Stage)]


def evaluate(ready: ReadyStep, batch: Batch) -> torch.Tensor | None:
    """Return the loss of a batch of any size, which passes through the stages; None where another rank has it.

    All ranks must call it with their replica's batch, inside `events.inference`.
    """
    group = ready.step.world.group("pp")
    own, ranks = dist.get_rank(group), dist.get_world_size(group)
    inputs = ready.to_device(batch)
    others = {name: value for name, value in inputs.items() if name not in _END_STAGE_INPUTS}
    at_end = {name: value for name, value in inputs.items() if name in _LAST_STAGE_INPUTS}
    for module, stage in zip(_wrapped(ready.model), _stages(ready.model), strict=True):
        stage.divisors = itertools.repeat(1.0)
        given = inputs["input_ids"]
        if not stage.is_first:
            like = _hidden_states_like(ready, stage, given.to("meta"))
            given = torch.empty_like(like, device=ready.step.world.device, requires_grad=False)
            dist.recv(given, group=group, group_src=(own - 1) % ranks)
        output: torch.Tensor = module(given, **others, **(at_end if stage.is_last else {}))
        if stage.is_last:
            return output
        dist.send(output.contiguous(), group=group, group_dst=(own + 1) % ranks)
    return None


def _wrapped(model: nn.Module) -> list[nn.Module]:
    """Return this rank's stages with their wrappers."""
    return list(model.children()) if isinstance(model, Parts) else [model]


def _schedule(ready: ReadyStep, whole_ids: torch.Tensor, count: int) -> Any:
    """Return torch's schedule of `count` micro-batches of these token ids."""
    from torch.distributed import pipelining

    plan, world = ready.step.plan, ready.step.world
    stages = _stages(ready.model)
    ids = whole_ids[: len(whole_ids) // count].to("meta")
    hidden = _hidden_states_like(ready, stages[0], ids)
    made = []
    for module, stage in zip(_wrapped(ready.model), stages, strict=True):
        stage.around = ready.autocast
        made.append(
            pipelining.PipelineStage(
                module,
                stage.index,
                stage.count,
                world.device,
                input_args=ids if stage.is_first else hidden,
                output_args=torch.empty((), device="meta", requires_grad=True) if stage.is_last else hidden,
                group=world.group("pp"),
            )
        )
    options: dict[str, Any] = {"n_microbatches": count, "loss_fn": _return_loss, "scale_grads": False}
    if plan.pp_schedule == "interleaved":
        several = pipelining.ScheduleInterleaved1F1B
        return several(made, **options, **_options_to_sum_outputs(several))
    kind = {"1f1b": pipelining.Schedule1F1B, "gpipe": pipelining.ScheduleGPipe}[plan.pp_schedule]
    return kind(made[0], **options, **_options_to_sum_outputs(kind))


def _return_loss(loss: torch.Tensor, _labels: torch.Tensor) -> torch.Tensor:
    """Return the last stage's output, which is the loss already."""
    return loss


def _hidden_states_like(ready: ReadyStep, stage: Stage, ids: torch.Tensor) -> torch.Tensor:
    """Return what stages send each other, without memory: (micro-batch, this rank's part of the sequence, width)."""
    rows, length = ids.shape
    width = causal_network(stage, "A pipeline", "pp 1").config.get_text_config().hidden_size
    parts = stage.between.size() if stage.between is not None else 1
    dtype = ready.step.stream_dtype or ready.step.weights_dtype
    return torch.empty(rows, length // parts, width, dtype=dtype, device="meta", requires_grad=True)
