"""A network under a plan, ready to train: the step that was estimated, on the user's batches."""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from tonnage.case import Case
from tonnage.cluster import CPU
from tonnage.errors import UnwritableFile, UsageError
from tonnage.job import IGNORED_LABEL
from tonnage.step import events, stages
from tonnage.step import model as models
from tonnage.step.given import gather, reshard
from tonnage.train import checkpoints, checks, effects, labels
from tonnage.train.micro_batches import Reader
from tonnage.train.prediction import Predicted, predict
from tonnage.train.restoring import with_variable

if TYPE_CHECKING:
    from tonnage.cluster import Cluster
    from tonnage.step.given import GivenNetwork
    from tonnage.step.model import Batch
    from tonnage.step.step import ReadyStep
    from tonnage.train.effects import Effect
    from tonnage.train.restoring import Snapshot


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of one optimizer step."""

    loss: float
    """Mean loss over all labels of the step, of all micro-batches and ranks."""
    tokens: int
    """Number of those labels; for batches without labels that of rows."""
    gradient_norm: float | None
    """Norm of all gradients before clipping; None under a plan that does not clip, which does not compute it.  A
    limit that no norm reaches, such as 1e9, measures it and leaves the step bit for bit as it is.
    """
    skipped: bool
    """True if the weights were left as they are: fp16 gradients overflowed, or the step had no labels."""
    learning_rate: float
    """Learning rate of the first group of parameters in this step."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The loss on batches that nothing was learned from."""

    loss: float
    """Mean loss over all labels, of all batches and ranks; NaN without any label."""
    tokens: int
    """Number of those labels."""


Accepts = Callable[[float, float | None], bool]
"""Judges a step by its loss and the norm of its gradients."""


class _Numbers:
    """Losses and norms on the host, copied without waiting for the device and without memory there."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.norm: torch.Tensor | None = None

    def see_loss(self, loss: torch.Tensor) -> None:
        self.losses.append(_copy_to_host(loss.detach()))

    def see_norm(self, norm: torch.Tensor) -> None:
        self.norm = _copy_to_host(norm)


def _copy_to_host(number: torch.Tensor) -> torch.Tensor:
    number = gather(number)  # under tensor parallelism also a loss is a DTensor
    host = torch.empty((), dtype=number.dtype, pin_memory=number.device.type == "cuda")
    return host.copy_(number.reshape(()), non_blocking=True)


def _without_a_search_for_cards() -> AbstractContextManager[None]:
    """Return a context for saves, in which transformers imports DeepSpeed, which warns where it finds no card."""
    return nullcontext() if torch.cuda.is_available() else with_variable("DS_ACCELERATOR", CPU)


class Trainable:
    """A user's network under a plan.  `step` trains it; `unapply` makes it what it was, with the trained weights.

    The parts of a step are there for loops that do their own: `forward_backward` for each micro-batch, then `clip`,
    then `optimizer_step`.  Learning rates are changed through `optimizers`, whose groups any of torch's schedulers
    takes.
    """

    _checkpoints: ClassVar[Any] = checkpoints
    """Module that saves and resumes."""
    _effects: ClassVar[Any] = effects
    """Module that looks for what took effect."""

    def __init__(self, ready: ReadyStep, given: GivenNetwork, snapshot: Snapshot, cluster: Cluster) -> None:
        self._ready: ReadyStep | None = ready
        self._given, self._snapshot, self._cluster = given, snapshot, cluster
        checks.UNDER_A_PLAN.add(given.network)
        self._shifts = labels.shifts_labels(given.network)
        self._reader = Reader.of(given.network)

    @property
    def ready(self) -> ReadyStep:
        """Return the step.  Raises UsageError after `unapply`."""
        if self._ready is None:
            raise UsageError("The plan is no longer applied (unapply was called); call tonnage.apply again.")
        return self._ready

    @property
    def model(self) -> torch.nn.Module:
        """Return the network as it is called, with its wrappers."""
        return self.ready.model

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Return the optimizers: one, or two under Muon."""
        return self.ready.optimizers

    def step(self, batches: Sequence[Batch], accepts: Accepts | None = None) -> StepResult:
        """Run one optimizer step on a list of micro-batches, dicts of tensors on the host or on the device.

        The loss is the mean over all labels of the step, whatever their numbers in each micro-batch and rank.
        `accepts(loss, gradient_norm)` is asked on every rank before the update; if it returns False on any, the
        weights stay as they are.  Under optimizer-in-backward without clipping they have been updated by then.
        """
        ready = self.ready
        counts, total = self._count_all(batches, self._check_step)
        rate = float(ready.optimizer.param_groups[0]["lr"])
        if total == 0:
            return StepResult(loss=0.0, tokens=0, gradient_norm=None, skipped=True, learning_rate=rate)
        before = self._overflow_mark()
        numbers = _Numbers()
        whole = [labels.with_a_label(batch, shifts=self._shifts) for batch in batches]
        measure = functools.cache(functools.partial(self._read_loss, numbers))
        is_refused = False

        def ask() -> bool:
            nonlocal is_refused
            assert accepts is not None
            is_refused = checkpoints.is_any_rank(ready, not accepts(measure(), self._read_norm(numbers)))
            return not is_refused

        ready.observers.append(numbers)
        try:
            ready.train_step(whole, labels.divisors(counts, total, self._ranks), accepts and ask)
        finally:
            ready.observers.remove(numbers)
        return StepResult(
            loss=measure(),
            tokens=total,
            gradient_norm=self._read_norm(numbers),
            skipped=is_refused or self._overflow_mark() < before,
            learning_rate=rate,
        )

    def _check_step(self, batches: Sequence[Batch]) -> None:
        """Raise UsageError for what cannot be this rank's micro-batches of a step."""
        plan = self.ready.step.plan
        self._check_number(len(batches))
        if self._stages is not None:
            checks.check_micro_batches(plan, batches)

    def _check_number(self, micro_batches: int) -> None:
        """Raise UsageError for more micro-batches in a step than the plan allows."""
        if self.ready.step.plan.optimizer_in_backward and micro_batches > 1:
            raise UsageError(
                f"The step has {micro_batches} micro-batches, and optimizer-in-backward updates the weights in each; "
                "give it one."
            )

    def _count_all(
        self, batches: Sequence[Batch], check: Callable[[Sequence[Batch]], None] = lambda batches: None
    ) -> tuple[list[int], int]:
        """Return the labels of each micro-batch of this rank, and the labels of all ranks.

        Raises UsageError on every rank if those of one cannot be used, so that none waits for another.
        """
        counts: list[int] = []
        fault: UsageError | None = None
        try:
            self._reader.check(batches)
            check(batches)
            counts = [self._count(batch) for batch in batches]
            for batch in batches:
                labels.with_a_label(batch, shifts=self._shifts)
        except UsageError as error:
            fault = error
        if self._group is None:
            if fault is not None:
                raise fault
            return counts, sum(counts)
        number = len(counts)
        total, faults, *sums = self._sum_each([sum(counts), fault is not None, number, number**2])
        is_unequal = sums[0] ** 2 != self._ranks * sums[1]  # their variance is not 0
        if faults or (is_unequal and self._exchanges_in_micro_batches):
            raise self._common_fault(fault, number)
        return counts, int(total)

    @property
    def _exchanges_in_micro_batches(self) -> bool:
        """Return True if ranks exchange weights, gradients or tokens in each micro-batch, not in the last alone."""
        step = self.ready.step
        return step.world.axes.dp_shard > 1 or step.world.axes.ep > 1 or step.plan.accum_sync

    def _common_fault(self, fault: UsageError | None, micro_batches: int) -> UsageError:
        """Return the error that each rank raises if the micro-batches of one cannot be used."""
        told: list[Any] = [None] * self._ranks
        dist.all_gather_object(told, (dist.get_rank(), fault and str(fault), micro_batches), group=self._group)
        if fault is not None:
            return fault
        message = next((f"Rank {rank}: {text}" for rank, text, _ in told if text), None)
        numbers = ", ".join(f"{number} on rank {rank}" for rank, _, number in told)
        return UsageError(
            message
            or f"The ranks have unequal numbers of micro-batches ({numbers}), and they exchange parts of the network "
            f"in each; give all as many, without labels (all {IGNORED_LABEL}) where there is nothing to learn."
        )

    def _read_loss(self, numbers: _Numbers) -> float:
        """Return the loss of all ranks."""
        self._wait()
        return self._average(math.fsum(float(loss) for loss in numbers.losses))

    def _read_norm(self, numbers: _Numbers) -> float | None:
        """Return the norm of the gradients before clipping; None if it is not known."""
        if numbers.norm is None:
            return None
        self._wait()
        return float(numbers.norm)

    def forward_backward(self, batch: Batch, weight: float = 1.0, *, last: bool = True) -> torch.Tensor:
        """Run forward and backward of one micro-batch, and return its loss on the host.

        `weight` is the micro-batch's part of the step's loss: 1 / (number of micro-batches), or its part of all
        labels.  Ranks exchange gradients in the `last` micro-batch of a step alone, as far as the plan allows.
        """
        ready = self.ready
        self._reader.check([batch])
        if self._stages is not None:
            raise UsageError("In a pipeline the micro-batches of a step run together; call step(batches).")
        self._check_number(1 if last else 2)
        numbers = _Numbers()
        divisor = 1 / weight if weight and self._count(batch) else math.inf
        local = nullcontext() if last or ready.step.plan.accum_sync else ready.step.gradients_stay_local(ready.model)
        ready.observers.append(numbers)
        try:
            with local:
                ready.step.accumulate(ready, [labels.with_a_label(batch, shifts=self._shifts)], [divisor])
        finally:
            ready.observers.remove(numbers)
        self._wait()
        return numbers.losses[0] * divisor if math.isfinite(divisor) else torch.zeros(())

    def clip(self) -> float | None:
        """Clip the gradients as the plan says, and return the norm that they had; None under a plan without it."""
        numbers = _Numbers()
        self.ready.observers.append(numbers)
        try:
            self.ready.clip_gradients()
        finally:
            self.ready.observers.remove(numbers)
        return self._read_norm(numbers)

    def optimizer_step(self) -> bool:
        """Update the weights and free the gradients; return False if fp16 gradients overflowed: nothing changed."""
        before = self._overflow_mark()
        self.ready.update()
        return self._overflow_mark() >= before

    def evaluate(self, batches: Sequence[Batch]) -> Evaluation:
        """Return the mean loss over all labels of the batches, without gradients and dropout.

        Ranks that share the network must give as many batches each; else all of them raise UsageError.
        """
        ready = self.ready
        counts, total = self._count_all(batches)
        summed = 0.0
        with events.inference(ready):
            for batch, count in zip(batches, counts, strict=True):
                loss = self._evaluate(labels.with_a_label(batch, shifts=self._shifts))
                summed += float(gather(loss)) * count if count and loss is not None else 0.0
        reshard(ready.model)
        summed = self._sum(labels.sum_over_ranks(summed, ready.step.world.device, self._stages))
        return Evaluation(loss=summed / total if total else math.nan, tokens=total)

    def _evaluate(self, batch: Batch) -> torch.Tensor | None:
        """Return the loss of a batch; None on ranks that have no last stage."""
        ready = self.ready
        if self._stages is not None:
            return stages.evaluate(ready, batch)
        return models.loss_of(ready.model(**ready.to_device(batch)))

    def took_effect(self) -> tuple[Effect, ...]:
        """Return what is found in the network and its optimizers for each setting of the plan that changes a step."""
        found: tuple[Effect, ...] = self._effects.look(self.ready)
        return found

    def save(self, folder: str | Path, extra: Mapping[str, Any] | None = None) -> None:
        """Save weights, optimizer states and random states in a new folder, whole or not at all.

        `extra` are values that JSON can hold, which `resume` returns.  All ranks must call it.
        """
        self._checkpoints.save(self.ready, Path(folder), extra)

    def resume(self, folder: str | Path) -> dict[str, Any]:
        """Go on from a saved folder, bit for bit on as many ranks; return the `extra` that was saved with it.

        The plan and the job must be the same, but for the number of ranks and how they shard; under DeepSpeed these
        as well.
        """
        extra: dict[str, Any] = self._checkpoints.resume(self.ready, Path(folder))
        return extra

    def predicted(self) -> Predicted:
        """Return what the plan is predicted to take on its devices, by an estimate of a few seconds.

        Raises UsageError for a network without a configuration, and CannotEstimate.
        """
        step = self.ready.step
        return predict(Case(step.job, step.plan, self._cluster))

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the network in a folder from which `from_pretrained` loads it; adapters as PEFT saves them.

        All ranks must call it; the first one writes.  The configuration is saved as it was before the plan.
        """
        if Path(folder).is_file():
            raise UnwritableFile(f"{folder} is a file; name a folder.")
        network = self._network_to_save()
        state = {name: whole.cpu() for name, whole in self._whole_state(network) if self._is_first}
        failure = ""
        if self._is_first:
            try:
                with self._snapshot.with_configuration(), _without_a_search_for_cards():
                    network.save_pretrained(folder, state_dict=state)
            except (OSError, SafetensorError) as error:
                failure = str(getattr(error, "strerror", None) or error)
        if self._sum(bool(failure)):  # known to all ranks, none of which waits for another
            raise UnwritableFile(f"{folder} cannot be written: {failure or 'the first rank failed'}.")

    def unapply(self) -> torch.nn.Module:
        """Return the user's network as it was before the plan, with the trained weights, on its own device.

        Adapters that the plan added are removed: save them first.  All ranks must call it.
        """
        ready = self.ready
        reshard(ready.model)
        values = self._given.current(self._stages)
        self._snapshot.restore()
        checks.UNDER_A_PLAN.discard(self._given.network)
        self._given.give_back(values)
        self._ready = None
        ready.close()
        del ready
        gc.collect()  # DDP's hooks on parameters end with it, and it refers to itself
        return self._given.network

    def _whole_state(self, network: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a network's state_dict with whole tensors; all ranks must go through it."""
        if self._stages is not None:
            yield from self._given.state(network, self._stages)
            return
        reshard(self.ready.model)
        for name, tensor in network.state_dict(keep_vars=True).items():
            yield name, gather(tensor)

    def _network_to_save(self) -> Any:
        model = self.ready.model if self._stages is None else self._given.network
        network = checks.adapted(model) or models.hugging_face(model)
        if network is None:
            raise UsageError(
                f"{type(self._given.network).__name__} is no transformers network and has no folder format; call "
                "unapply() and save its state_dict()."
            )
        return network

    def _count(self, batch: Mapping[str, Any]) -> int:
        return labels.count_labels(dict(batch), shifts=self._shifts)

    @property
    def _group(self) -> Any:
        """Return the ranks that have batches of their own; None for one."""
        world = self.ready.step.world
        shared = world.axes.data_parallel > 1
        return (self.ready.group or world.group("dp_replicate", "dp_shard")) if shared else None

    @property
    def _stages(self) -> Any:
        """Return the ranks that hold one stage of a pipeline each; None without a pipeline."""
        world = self.ready.step.world
        return world.group("pp") if world.axes.pp > 1 else None

    @property
    def _ranks(self) -> int:
        return self.ready.step.world.axes.data_parallel

    @property
    def _is_first(self) -> bool:
        return not dist.is_initialized() or dist.get_rank() == 0

    def _sum(self, number: float) -> float:
        return labels.sum_over_ranks(number, self.ready.step.world.device, self._group)

    def _sum_each(self, numbers: Sequence[float]) -> list[float]:
        return labels.sum_each_over_ranks(numbers, self.ready.step.world.device, self._group)

    def _average(self, loss: float) -> float:
        """Return the mean of a loss over the ranks that have their own batches, or their own parts of a sequence."""
        world = self.ready.step.world
        ranks = world.axes.data_parallel * world.axes.cp
        group = (self.ready.group or world.group("dp_replicate", "dp_shard", "cp")) if ranks > 1 else None
        loss = labels.sum_over_ranks(loss, world.device, self._stages)  # that of the last stage
        return labels.sum_over_ranks(loss, world.device, group) / ranks

    def _overflow_mark(self) -> float:
        """Return a number that falls with a step whose fp16 gradients overflow: the loss scale."""
        scaler = self.ready.scaler
        return 1.0 if scaler is None else float(scaler.get_scale())

    def _wait(self) -> None:
        device = self.ready.step.world.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
