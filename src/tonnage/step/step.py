"""The training step that a Job under a Plan makes: a value that techniques change, then an object that runs it.

The same code runs on a ghost GPU, on a real one and on the CPU; nothing here depends on which it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from tonnage.job import Job
from tonnage.plans import Plan
from tonnage.step import batches, events, repeats
from tonnage.step import model as models
from tonnage.step.model import Batch
from tonnage.step.stages import Parts
from tonnage.step.world import World, join

if TYPE_CHECKING:
    from tonnage.step.given import GivenNetwork

Context = Callable[[], AbstractContextManager[Any]]
NewOptimizer = Callable[[list[Any]], torch.optim.Optimizer]
OptimizerPart = tuple[list[nn.Parameter], NewOptimizer]


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that get gradients, each once."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _no_optimizer(module: nn.Module) -> tuple[OptimizerPart, ...]:
    raise LookupError("no technique of the plan has chosen an optimizer")


def _plain_optimizer(parameters: list[nn.Parameter], new: NewOptimizer) -> torch.optim.Optimizer:
    """Return one optimizer; parameters on different meshes, which foreach kernels cannot mix, are separate groups."""
    groups = by_mesh(parameters)
    return new(parameters) if len(groups) == 1 else new([{"params": group} for group in groups])


def by_mesh(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters grouped so that each group can be combined: plain ones, and those of each mesh."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(groups.values())


def _plain_network(step: Step) -> nn.Module:
    """Return the network; if it is divided or sharded it gets its memory afterwards."""
    late = step.shards_parameters or bool(step.divide)
    if step.given is not None:
        network = step.given.take(step.world.device, without_memory=late, copied=step.plan.pp > 1)
    else:
        device = torch.device("meta") if late else step.world.device
        network = models.build(step.job.model, dtype=step.weights_dtype, attention=step.attention, device=device)
    if step.adapt is not None:
        network = step.adapt(network)
    return _divide(step, network) if step.divide else network


def _divide(step: Step, network: nn.Module) -> nn.Module:
    """Return this rank's part of the network after all divisions."""
    whole = _count_elements(network)
    for division in step.divide:
        network = division(step, network)
    network.elements_elsewhere = _subtract(
        whole, _count_elements(network)
    )  # read by code that counts the whole network's parameters
    if not step.shards_parameters:
        models.materialise(network, step.world.device)
        if step.given is not None:
            step.given.fill(network)
    return network


def _count_elements(network: nn.Module) -> tuple[int, int]:
    """Return the elements of all parameters, and of the trained ones."""
    parameters = list(network.parameters())
    return sum(map(models.elements, parameters)), sum(models.elements(p) for p in parameters if p.requires_grad)


def _subtract(whole: tuple[int, int], part: tuple[int, int]) -> tuple[int, int]:
    return whole[0] - part[0], whole[1] - part[1]


def _combine_parts(parts: list[nn.Module]) -> nn.Module:
    """Return the parts as one module.

    Each part notes how many elements it lacks of the whole network.  Several parts lack fewer; the first one's note
    is corrected to hold for all.
    """
    if len(parts) == 1:
        return parts[0]
    first, *others = (next(m for m in part.modules() if hasattr(m, "elements_elsewhere")) for part in parts)
    for other in others:
        first.elements_elsewhere = _subtract(first.elements_elsewhere, _count_elements(other))
        other.elements_elsewhere = 0, 0
    return Parts(parts)


def _clip(parameters: list[nn.Parameter], largest_norm: float) -> torch.Tensor:
    return torch.nn.utils.clip_grad_norm_(parameters, largest_norm)


def _accumulate_in_loop(ready: ReadyStep, batches: Sequence[Batch], divisors: Sequence[float]) -> None:
    """Run all micro-batches; gradients are reduced in the last one alone unless the plan says otherwise."""
    count, local = len(batches), ready.step.gradients_stay_local
    first = 0
    if count > 1 and local is not _no_context and not ready.step.plan.accum_sync:
        first = count - 1
        with local(ready.model):
            _run_micro_batches(ready, batches, divisors, range(first))
    _run_micro_batches(ready, batches, divisors, range(first, count))


def _run_micro_batches(ready: ReadyStep, batches: Sequence[Batch], divisors: Sequence[float], indices: range) -> None:
    """Run some of the micro-batches; a listener that says that they are all alike may end them early."""
    for made, index in enumerate(indices):
        if repeats.seen_to(made, len(indices) - made):
            return
        ready.micro_batch(ready.to_device(batches[index]), divisors[index])


def _no_context(module: nn.Module) -> AbstractContextManager[Any]:
    return nullcontext()


@dataclass(frozen=True, kw_only=True)
class Step:
    """Settings from which an optimizer step is built; each technique returns a changed copy."""

    job: Job
    """The model, what is trained of it, and its batches."""
    plan: Plan
    """The chosen techniques; each technique reads its own option."""
    world: World
    """The ranks of the job, and which of them this process is."""
    initialise: bool
    """True if new weights get their usual random values; else they are uninitialised memory."""
    given: GivenNetwork | None = None
    """The user's network with its weights; None: the network is built from the job's model."""
    weights_dtype: torch.dtype = torch.float32
    """Dtype in which the network's own weights are made."""
    autocast_dtype: torch.dtype | None = None
    """Dtype of torch.autocast around the forward; None: no autocast."""
    scales_loss: bool = False
    """True if a GradScaler multiplies the loss and skips steps whose gradients overflow."""
    attention: str | None = None
    """transformers' attn_implementation; None: its default."""
    contexts: tuple[Context, ...] = ()
    """Contexts around forward and backward of every micro-batch."""
    on_batch: Callable[[Batch], AbstractContextManager[dict[str, Any]]] = nullcontext
    """Context around forward and backward of a batch; it yields the network's inputs."""
    load: Callable[[Step], nn.Module] = _plain_network
    """Function that makes the network with its memory, before any change."""
    adapt: Callable[[nn.Module], nn.Module] | None = None
    """Function that adds adapters, which are then divided with the network; None: there are none."""
    divide: tuple[Callable[[Step, nn.Module], nn.Module], ...] = ()
    """Functions applied in order before the network has memory; each removes what other ranks hold."""
    parts: int = 1
    """Parts of the network that a rank holds and wraps one by one: the stages of an interleaved pipeline."""
    part: int = 0
    """Index of the part that is being made."""
    stream_dtype: torch.dtype | None = None
    """Dtype of hidden states between layers; None: that of the weights."""
    accumulate: Callable[[ReadyStep, Sequence[Batch], Sequence[float]], None] = _accumulate_in_loop
    """Function that runs forward and backward of all micro-batches of a step, each with the divisor of its loss."""
    changes: tuple[Callable[[nn.Module], nn.Module], ...] = ()
    """Functions applied to the network in order, before it is sharded."""
    shard: Callable[[nn.Module], nn.Module] | None = None
    """Function that shards or replicates the network among the ranks; None: each rank is alone."""
    shards_parameters: bool = False
    """True if the network must be built without memory, which its shards get after `shard`."""
    before_shard: Callable[[nn.Module, torch.device], None] | None = None
    """Function that gives a part of the network its memory just before it is sharded; None: shards get theirs
    after `shard`.
    """
    parameters_device: torch.device | None = None
    """Device on which sharded parameters rest; None: the world's device."""
    gradients_stay_local: Callable[[nn.Module], AbstractContextManager[Any]] = _no_context
    """Context around all micro-batches of a step but the last: gradients are not reduced."""
    optimizer_parts: Callable[[nn.Module], tuple[OptimizerPart, ...]] = _no_optimizer
    """Function that returns which parameters each optimizer takes, and how it is made."""
    new_optimizer: Callable[[list[nn.Parameter], NewOptimizer], torch.optim.Optimizer] = _plain_optimizer
    """Function that makes one optimizer of a part; ZeRO-1 shards it here."""
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    """Learning rate, weight decay and the like; those that are not named keep the values of `catalog.optimizers`."""
    optimizer_factory: NewOptimizer | None = None
    """The user's function that makes each optimizer, with its hyperparameters and groups; None: there is none."""
    keeps_outputs: str | None = None
    """`step` or `loop`: how long the network's outputs are kept; None: they are freed before backward."""
    clip: Callable[[list[nn.Parameter], float], torch.Tensor] = _clip
    """Function that scales gradients down to a norm and returns the norm that they had; torch's, which supports
    DTensors as well.
    """

    def build(self) -> ReadyStep:
        """Return the network and its optimizers, made on this rank's device."""
        parts = [replace(self, part=part)._make_network() for part in range(self.parts)]
        network = _combine_parts(parts)
        optimizers = tuple(self.new_optimizer(*part) for part in self.optimizer_parts(network))
        return ReadyStep(step=self, model=network, optimizers=optimizers)

    def _make_network(self) -> nn.Module:
        network = self.load(self)
        if self.given is None:
            models.check_positions(self.job, network)
        if self.initialise and self.given is None and self.load is _plain_network and not self.shards_parameters:
            models.initialise(network)
        for change in self.changes:
            network = change(network)
        if self.shard is not None:
            network = self.shard(network)
        if self.shards_parameters and self.before_shard is None:
            network.to_empty(device=self.parameters_device or self.world.device)
            models.buffers_to(network, self.world.device)  # FSDP2 does not copy buffers back from the host
            if self.given is not None:
                self.given.fill(network)
            elif self.initialise:
                models.initialise(network)
        return network


class Observer(Protocol):
    """Receiver of the numbers of a step, which stay on the device unless it copies them."""

    def see_loss(self, loss: torch.Tensor) -> None:
        """Receive the loss of a micro-batch after its backward, divided as its gradients are."""

    def see_norm(self, norm: torch.Tensor) -> None:
        """Receive the norm that all gradients had before they were clipped."""


@dataclass(frozen=True, kw_only=True)
class ReadyStep:
    """A network with its optimizers, ready to train.

    `train_step` is the only optimizer step: `run` gives it random batches, for an estimate, and `tonnage.apply` gives
    it the user's.
    """

    step: Step
    """The settings that it was built from."""
    model: nn.Module
    """The network as it is called, with its wrappers."""
    optimizers: tuple[torch.optim.Optimizer, ...]
    """One optimizer, or two if a technique trains some parameters differently (Muon)."""
    scaler: torch.amp.GradScaler | None = field(init=False)
    """The loss scaler of fp16-mixed."""
    lengths: Iterator[tuple[int, ...]] | None = field(init=False)
    """Lengths of the job's sequences, micro-batch by micro-batch; None: all have seq_len tokens."""
    kept: list[Any] = field(init=False, default_factory=list)
    """The network's last outputs, if they are kept."""
    observers: list[Observer] = field(init=False, default_factory=list)
    """Receivers of the loss of each micro-batch and of the gradients' norm; an estimate has none."""

    def __post_init__(self) -> None:
        device = self.step.world.device.type
        object.__setattr__(self, "lengths", batches.draw_lengths(self.step.job) if self.step.job.lengths else None)
        object.__setattr__(self, "scaler", torch.amp.GradScaler(device) if self.step.scales_loss else None)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return the first of `optimizers`; the only one for most plans."""
        return self.optimizers[0]

    @property
    def group(self) -> Any:
        """Return the group in which all ranks exchange small messages; None: torch's default one."""
        return None

    @property
    def parameters(self) -> int:
        """Return the elements of all parameters of the whole network, each counted once."""
        return sum(models.elements(parameter) for parameter in self.model.parameters())

    @property
    def trainable_parameters(self) -> int:
        """Return the elements of the parameters that get gradients, over all ranks."""
        return sum(parameter.numel() for parameter in trainable(self.model))

    def run(self, steps: int, on_step: Callable[[int], None] | None = None) -> None:
        """Train for `steps` optimizer steps on random batches; `on_step(i)` is called after each.

        The job's other phases (evaluation, generation, saving) run before the last step, or after a single one.
        """
        events.before_steps(self)
        for index in range(steps):
            if index == max(steps - 1, 1):
                events.besides_steps(self)
            self.train_step(_MadeUp(self))
            if on_step is not None:
                on_step(index)
        if steps == 1:
            events.besides_steps(self)

    def close(self) -> None:
        """Destroy the process group if `build` made it."""
        if self.step.world.made_group and dist.is_initialized():
            dist.destroy_process_group()

    def train_step(
        self,
        batches: Sequence[Batch],
        divisors: Sequence[float] | None = None,
        accepts: Callable[[], bool] | None = None,
    ) -> None:
        """Run one optimizer step on these micro-batches, which may be on the host and are asked for one by one.

        The loss of each, a mean over its labels, is divided by its divisor: the number of micro-batches by default,
        or all labels of the step for one of the micro-batch where their numbers differ.  `accepts` is asked before
        the weights are updated; if it returns False they stay as they are.
        """
        self.step.accumulate(self, batches, divisors or (len(batches),) * len(batches))
        self.clip_gradients()
        if accepts is None or accepts():
            self.update()
        else:
            self.leave_out()

    def update(self) -> None:
        """Update the weights by all optimizers and free the gradients."""
        for optimizer in self.optimizers:
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
        self._end_step()

    def leave_out(self) -> None:
        """Free the gradients without an update."""
        if self.scaler is not None and self.step.plan.clip_grad_norm is None:
            for optimizer in self.optimizers:  # it takes note of what clipping would have shown it
                self.scaler.unscale_(optimizer)
        self._end_step()

    def _end_step(self) -> None:
        if self.scaler is not None:
            self.scaler.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        if self.step.keeps_outputs == "step":
            self.kept.clear()

    def clip_gradients(self) -> None:
        """Scale gradients to the plan's norm, taken over all optimizers together; scaled gradients are unscaled
        first.
        """
        largest_norm = self.step.plan.clip_grad_norm
        if largest_norm is None:
            return
        if self.scaler is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        norm = self.step.clip([parameter for group in groups for parameter in group["params"]], float(largest_norm))
        for observer in self.observers:
            observer.see_norm(norm)

    def next_batch(self, sequences: int | None = None) -> Batch:
        """Return a random micro-batch, copied from the host to this rank's device; `sequences` overrides the job's
        number.
        """
        return self.to_device(self.random_batch(sequences))

    def to_device(self, batch: Batch) -> Batch:
        """Return the batch on this rank's device."""
        return {name: tensor.to(self.step.world.device) for name, tensor in batch.items()}

    @property
    def images_dtype(self) -> torch.dtype:
        """Return the dtype of images: fp32 under autocast, which casts them, else that of the weights."""
        return torch.float32 if self.step.autocast_dtype else self.step.weights_dtype

    def micro_batch(self, batch: Batch, divisor: float = 1) -> None:
        """Run forward and backward of one micro-batch; gradients are added to those already there.

        Its loss is divided by the divisor before backward.
        """
        with self.around(), self.step.on_batch(batch) as inputs:
            self._backward(self._forward(inputs, divisor))

    def random_batch(self, sequences: int | None = None) -> Batch:
        """Return a random micro-batch on the host; `sequences` overrides the job's number."""
        job = self.step.job
        if sequences is not None:
            job = replace(job, micro_batch=sequences)
        elif self.lengths is not None:
            lengths = next(self.lengths)
            host = models.batch(replace(job, seq_len=max(lengths)), self.model, self.images_dtype)
            return batches.pad(host, lengths)
        host = models.batch(job, self.model, self.images_dtype)
        return host if job.packing is None else batches.pack(host, job.packing)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Enter the techniques' contexts around each use of the network."""
        with ExitStack() as stack:
            for context in self.step.contexts:
                stack.enter_context(context())
            yield

    def _forward(self, inputs: dict[str, Any], divisor: float) -> torch.Tensor:
        with self.autocast():
            loss = self._take_loss(self.model(**inputs))
        return loss / divisor if divisor != 1 else loss

    def _take_loss(self, output: Any) -> torch.Tensor:
        if self.step.keeps_outputs is not None:
            self.kept[:] = [output]
        return models.loss_of(output)

    def autocast(self) -> torch.autocast:
        """Return the autocast context of a mixed precision; disabled for the others."""
        dtype = self.step.autocast_dtype
        return torch.autocast(self.step.world.device.type, dtype, enabled=dtype is not None)

    def _backward(self, loss: torch.Tensor) -> None:
        scaled = (
            loss if self.scaler is None else self.scaler.scale(loss)
        )  # the loop still holds the loss, to print it
        scaled.backward()
        for observer in self.observers:
            observer.see_loss(loss)


class _MadeUp(Sequence[Batch]):
    """The random micro-batches of a step, each made when it is asked for: an estimate may not need them all."""

    def __init__(self, ready: ReadyStep) -> None:
        self._ready = ready

    def __len__(self) -> int:
        return self._ready.step.job.grad_accum

    def __getitem__(self, index: Any) -> Any:
        return self._ready.random_batch()


def assemble(
    job: Job,
    plan: Plan,
    changes: Iterable[Callable[[Step], Step]],
    *,
    world_size: int = 1,
    rank: int = 0,
    gpus_per_node: int = 8,
    device: str = "cuda",
    initialise: bool = False,
    alone: bool = True,
    **given: Any,
) -> ReadyStep:
    """Return the step of one rank, with its network and optimizers made on `device`.

    `changes` are the functions of the plan's techniques, in their order (`tonnage.techniques.build`).

    With several ranks, or to shard, the existing process group is used; else that of torchrun's environment; else
    this process acts as rank `rank` of `world_size` alone, which only works with a ghost's NCCL.  `initialise` gives
    weights their usual random values; without it they are uninitialised memory, which is enough to see what a step
    allocates.  Without `alone` a process group that lacks ranks is an error (UsageError).  `given` holds fields of
    Step: the user's network and hyperparameters.
    """
    world = World(size=world_size, rank=rank, gpus_per_node=gpus_per_node, device=select_device(device))
    if world_size > 1 or plan.shard != "none":
        world = join(world, plan, alone=alone)
    step = Step(job=job, plan=plan, world=world, initialise=initialise, **given)
    for change in changes:
        step = change(step)
    return step.build()


def select_device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if device.index is None:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cuda", local_rank % max(1, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device
