"""The training step that a Job under a Plan makes: a value that techniques change, then something that runs.

The same code runs on a ghost GPU, on a real one and on the CPU; nothing here knows which it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tonnage.job import Job
from tonnage.plans import Plan
from tonnage.step import batches, repeats
from tonnage.step import events as occasions
from tonnage.step import model as models
from tonnage.step.model import Batch
from tonnage.step.stages import Parts
from tonnage.step.world import World, join

Context = Callable[[], AbstractContextManager[Any]]
NewOptimizer = Callable[[list[Any]], torch.optim.Optimizer]
OptimizerPart = tuple[list[nn.Parameter], NewOptimizer]


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that get gradients, each once."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _no_optimizer(module: nn.Module) -> tuple[OptimizerPart, ...]:
    raise LookupError("no technique of the plan has chosen an optimizer")


def _plain_optimizer(parameters: list[nn.Parameter], new: NewOptimizer) -> torch.optim.Optimizer:
    """Parameters on different meshes, which foreach kernels cannot mix, are groups of their own."""
    groups = by_mesh(parameters)
    return new(parameters) if len(groups) == 1 else new([{"params": group} for group in groups])


def by_mesh(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters that can be worked on together: plain ones, and those that each mesh divides."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(groups.values())


def _plain_network(step: Step) -> nn.Module:
    """Divided before it has memory; sharding divides it further, and gives it memory afterwards."""
    late = step.shards_parameters or bool(step.divide)
    device = torch.device("meta") if late else step.world.device
    network = models.build(step.job.model, dtype=step.weights_dtype, attention=step.attention, device=device)
    if step.adapt is not None:
        network = step.adapt(network)
    return _divided(step, network) if step.divide else network


def _divided(step: Step, network: nn.Module) -> nn.Module:
    whole = _elements(network)
    for division in step.divide:
        network = division(step, network)
    network.elements_elsewhere = _less(whole, _elements(network))  # read by whoever counts the whole network's
    if not step.shards_parameters:
        models.materialise(network, step.world.device)
    return network


def _elements(network: nn.Module) -> tuple[int, int]:
    """Of all parameters, and of those that are trained."""
    found = list(network.parameters())
    return sum(map(models.elements, found)), sum(models.elements(one) for one in found if one.requires_grad)


def _less(whole: tuple[int, int], part: tuple[int, int]) -> tuple[int, int]:
    return whole[0] - part[0], whole[1] - part[1]


def _as_one(parts: list[nn.Module]) -> nn.Module:
    """Of the whole network each part says what it lacks; several lack less, and the first says it for all."""
    if len(parts) == 1:
        return parts[0]
    first, *others = (next(m for m in part.modules() if hasattr(m, "elements_elsewhere")) for part in parts)
    for other in others:
        first.elements_elsewhere = _less(first.elements_elsewhere, _elements(other))
        other.elements_elsewhere = 0, 0
    return Parts(parts)


def _clip(parameters: list[nn.Parameter], largest_norm: float) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, largest_norm)


def _one_after_another(ready: ReadyStep) -> None:
    """Gradients are communicated in the last micro-batch alone, unless the plan says otherwise."""
    count, local = ready.step.job.grad_accum, ready.step.gradients_stay_local
    if count > 1 and local is not _no_context and not ready.step.plan.accum_sync:
        with local(ready.model):
            _make(ready, count - 1)
        count = 1
    _make(ready, count)


def _make(ready: ReadyStep, count: int) -> None:
    """So many micro-batches that do the same."""
    for made in range(count):
        if repeats.seen_to(made, count - made):
            return
        ready.micro_batch(ready.next_batch())


def _no_context(module: nn.Module) -> AbstractContextManager[Any]:
    return nullcontext()


@dataclass(frozen=True, kw_only=True)
class Step:
    """How an optimizer step is made and run; each technique returns a changed copy."""

    job: Job
    """What is trained."""
    plan: Plan
    """How; techniques read their own option."""
    world: World
    """On how many ranks, and which one this is."""
    initialise: bool
    """Whether weights get values; without, they are whatever memory holds."""
    weights_dtype: torch.dtype = torch.float32
    """The dtype in which the network's own weights are made."""
    autocast_dtype: torch.dtype | None = None
    """The dtype of torch.autocast around the forward; None: no autocast."""
    scales_loss: bool = False
    """Whether a GradScaler multiplies the loss and skips steps whose gradients overflow."""
    attention: str | None = None
    """transformers' attn_implementation; None: its own choice."""
    contexts: tuple[Context, ...] = ()
    """Entered around forward and backward of every micro-batch."""
    on_batch: Callable[[Batch], AbstractContextManager[dict[str, Any]]] = nullcontext
    """Entered with each batch around its forward and backward; gives what the network gets of it."""
    load: Callable[[Step], nn.Module] = _plain_network
    """Makes the network with its memory, before any change."""
    adapt: Callable[[nn.Module], nn.Module] | None = None
    """Adds adapters that are divided with the network; None: there are none, or nothing is divided."""
    divide: tuple[Callable[[Step, nn.Module], nn.Module], ...] = ()
    """Applied to the network in order before it has memory: what other ranks hold is taken out."""
    parts: int = 1
    """How many parts of the network a rank has that are wrapped one by one: the stages of an interleaved pipeline."""
    part: int = 0
    """Which of them is being made."""
    stream_dtype: torch.dtype | None = None
    """The dtype of hidden states between layers; None: that of the weights."""
    accumulate: Callable[[ReadyStep], None] = _one_after_another
    """Forward and backward of all micro-batches of a step."""
    changes: tuple[Callable[[nn.Module], nn.Module], ...] = ()
    """Applied to the network in order, before it is sharded."""
    shard: Callable[[nn.Module], nn.Module] | None = None
    """Divides or replicates the network among the ranks; None: each rank is alone."""
    shards_parameters: bool = False
    """Whether the network must be built without memory, which its shards get after `shard`."""
    before_shard: Callable[[nn.Module, torch.device], None] | None = None
    """Gives a part of the network its memory just before it is divided; None: shards get theirs after `shard`."""
    parameters_device: torch.device | None = None
    """Where sharded parameters rest; None: the world's device."""
    gradients_stay_local: Callable[[nn.Module], AbstractContextManager[Any]] = _no_context
    """Held during all micro-batches of a step but the last: no communication of gradients."""
    optimizer_parts: Callable[[nn.Module], tuple[OptimizerPart, ...]] = _no_optimizer
    """Which parameters each optimizer takes, and how it is made."""
    new_optimizer: Callable[[list[nn.Parameter], NewOptimizer], torch.optim.Optimizer] = _plain_optimizer
    """Makes one optimizer of a part; ZeRO-1 divides it here."""
    keeps_outputs: str | None = None
    """`step` or `loop`: how long what the network returned is kept; None: not while backward runs."""
    clip: Callable[[list[nn.Parameter], float], None] = _clip
    """Scales the gradients of the parameters down to a norm; torch's function, which DTensor knows as well."""

    def build(self) -> ReadyStep:
        """Make the network and its optimizers on this rank's device."""
        parts = [replace(self, part=part)._network() for part in range(self.parts)]
        network = _as_one(parts)
        optimizers = tuple(self.new_optimizer(*part) for part in self.optimizer_parts(network))
        return ReadyStep(step=self, model=network, optimizers=optimizers)

    def _network(self) -> nn.Module:
        network = self.load(self)
        models.check_positions(self.job, network)
        if self.initialise and self.load is _plain_network and not self.shards_parameters:
            models.initialise(network)
        for change in self.changes:
            network = change(network)
        if self.shard is not None:
            network = self.shard(network)
        if self.shards_parameters and self.before_shard is None:
            network.to_empty(device=self.parameters_device or self.world.device)
            models.buffers_to(network, self.world.device)  # which FSDP2 does not bring back from the host
            if self.initialise:
                models.initialise(network)
        return network


@dataclass(frozen=True, kw_only=True)
class ReadyStep:
    """A network with its optimizers, ready to train; `run` is the loop a user would write."""

    step: Step
    """How it was made."""
    model: nn.Module
    """The network as it is called, with its wrappers."""
    optimizers: tuple[torch.optim.Optimizer, ...]
    """One, or two where a technique trains some parameters differently (Muon)."""
    scaler: torch.amp.GradScaler | None = field(init=False)
    """The loss scaler of fp16-mixed."""
    lengths: Iterator[tuple[int, ...]] | None = field(init=False)
    """What the job's sequences are long, micro-batch by micro-batch; None: all of them seq_len."""
    kept: list[Any] = field(init=False, default_factory=list)
    """What the network returned last, where it is kept."""

    def __post_init__(self) -> None:
        device = self.step.world.device.type
        object.__setattr__(self, "lengths", batches.drawn(self.step.job) if self.step.job.lengths else None)
        object.__setattr__(self, "scaler", torch.amp.GradScaler(device) if self.step.scales_loss else None)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The first of `optimizers`; the only one for most plans."""
        return self.optimizers[0]

    @property
    def parameters(self) -> int:
        """Elements of all parameters of the whole network, each counted once."""
        return sum(models.elements(parameter) for parameter in self.model.parameters())

    @property
    def trainable_parameters(self) -> int:
        """Elements of the parameters that get gradients, over all ranks."""
        return sum(parameter.numel() for parameter in trainable(self.model))

    def run(self, steps: int, on_step: Callable[[int], None] | None = None) -> None:
        """Train for `steps` optimizer steps on made-up batches; `on_step(i)` is called after each.

        What the job asks for besides (evaluation, generation, saving) comes before the last step, if there are two.
        """
        occasions.before_steps(self)
        for index in range(steps):
            if index == max(steps - 1, 1):
                occasions.besides_steps(self)
            self._optimizer_step()
            if on_step is not None:
                on_step(index)
        if steps == 1:
            occasions.besides_steps(self)

    def close(self) -> None:
        """Destroy the process group if `build` made it."""
        if self.step.world.made_group and dist.is_initialized():
            dist.destroy_process_group()

    def _optimizer_step(self) -> None:
        self.step.accumulate(self)
        self._clip_gradients()
        for optimizer in self.optimizers:
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        if self.step.keeps_outputs == "step":
            self.kept.clear()

    def _clip_gradients(self) -> None:
        """To the norm that the plan names, over all optimizers together; scaled gradients are unscaled first."""
        largest_norm = self.step.plan.clip_grad_norm
        if largest_norm is None:
            return
        if self.scaler is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        self.step.clip([parameter for group in groups for parameter in group["params"]], float(largest_norm))

    def next_batch(self, sequences: int | None = None, micro_batches: int = 1) -> Batch:
        """A made-up micro-batch on this rank's device, copied from the host; `sequences`: other than the job's.

        Several micro-batches are one behind the other in each tensor.
        """
        host = [self._made_up(sequences) for _ in range(micro_batches)]
        whole = host[0] if micro_batches == 1 else {name: torch.cat([one[name] for one in host]) for name in host[0]}
        return {name: tensor.to(self.step.world.device) for name, tensor in whole.items()}

    @property
    def images_dtype(self) -> torch.dtype:
        """What images are handed over in: autocast casts them itself, other networks want their own dtype."""
        return torch.float32 if self.step.autocast_dtype else self.step.weights_dtype

    def micro_batch(self, batch: Batch) -> None:
        """Forward and backward of one micro-batch; gradients are added to those already there."""
        with self.around(), self.step.on_batch(batch) as inputs:
            self._backward(self._forward(inputs))

    def _made_up(self, sequences: int | None) -> Batch:
        job = self.step.job
        if sequences is not None:
            job = replace(job, micro_batch=sequences)
        elif self.lengths is not None:
            lengths = next(self.lengths)
            host = models.batch(replace(job, seq_len=max(lengths)), self.model, self.images_dtype)
            return batches.padded(host, lengths)
        host = models.batch(job, self.model, self.images_dtype)
        return host if job.packing is None else batches.packed(host, job.packing)

    @contextmanager
    def around(self) -> Iterator[None]:
        """What the techniques enter around each use of the network."""
        with ExitStack() as stack:
            for context in self.step.contexts:
                stack.enter_context(context())
            yield

    def _forward(self, inputs: dict[str, Any]) -> torch.Tensor:
        with self.autocast():
            loss = self._loss_of(self.model(**inputs))
        return loss / self.step.job.grad_accum if self.step.job.grad_accum > 1 else loss

    def _loss_of(self, output: Any) -> torch.Tensor:
        if self.step.keeps_outputs is not None:
            self.kept[:] = [output]
        return models.loss_of(output)

    def autocast(self) -> torch.autocast:
        """In the dtype of computation, where the precision is a mixed one."""
        dtype = self.step.autocast_dtype
        return torch.autocast(self.step.world.device.type, dtype, enabled=dtype is not None)

    def _backward(self, loss: torch.Tensor) -> None:
        scaled = loss if self.scaler is None else self.scaler.scale(loss)  # a loop still has the loss, to print it
        scaled.backward()


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
) -> ReadyStep:
    """Return the step of one rank, with its network and optimizers made on `device`.

    `changes` are what the plan's techniques do to a plain step, in their order (`tonnage.techniques.build`).

    With several ranks, or to shard, the process group that exists is used; else that of torchrun's environment; else
    this process acts as rank `rank` of `world_size` alone, which only a ghost's NCCL can do.
    `initialise` gives weights their usual random values; without it they are whatever memory holds, which is enough
    to see what a step allocates.
    """
    world = World(size=world_size, rank=rank, gpus_per_node=gpus_per_node, device=_device(device))
    if world_size > 1 or plan.shard != "none":
        world = join(world, plan)
    step = Step(job=job, plan=plan, world=world, initialise=initialise)
    for change in changes:
        step = change(step)
    return step.build()


def _device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if device.index is None:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cuda", local_rank % max(1, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device
