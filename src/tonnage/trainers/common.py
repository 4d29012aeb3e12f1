"""What every trainer is given: a network as `from_pretrained` leaves it, made-up rows, the launcher's variables.

The torch half of the engines: imported in the process that runs the step only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.utils.data import Dataset

from tonnage.mesh import axes
from tonnage.step import batches, generation
from tonnage.step import model as models
from tonnage.step.events import phase
from tonnage.step.step import Step
from tonnage.step.world import World
from tonnage.techniques import chosen
from tonnage.techniques.lora import with_adapters
from tonnage.techniques.precision import dtype
from tonnage.techniques.qlora import QLORA, loaded

if TYPE_CHECKING:
    from tonnage.job import Job
    from tonnage.plans import Plan

NETWORKS_OWN: Final = ("precision", "weights_dtype", "attention")
"""Options that say how a network is made and called, whoever trains it."""

HOST_GROUP: Final = {"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "true"}
"""What `accelerate launch` sets where FSDP offloads: the process group then takes tensors on the host as well."""


def described(job: Job, plan: Plan, world: World) -> Step:
    """A Step that knows the dtypes, the attention and the quantization of the plan, and nothing of who trains."""
    here = replace(world, device=torch.device("cuda", 0))
    step = Step(job=job, plan=plan, world=here, initialise=False)
    for technique in chosen(job, plan):
        if technique.option in NETWORKS_OWN or technique is QLORA:
            step = technique.apply(step)
    if job.method == "lora":
        step = replace(step, weights_dtype=dtype(plan.base_dtype or plan.compute_dtype))
    return step


def network(step: Step, device: torch.device | None = None) -> nn.Module:
    """The network, by default on the host, where nothing touches its memory; quantized, it is on the card."""
    if step.job.method == "qlora":
        return loaded(step)  # whole on each rank, before the trainer divides it
    made = models.build(
        step.job.model, dtype=step.weights_dtype, attention=step.attention, device=device or torch.device("cpu")
    )
    models.check_positions(step.job, made)
    return made


def adapted(module: nn.Module, step: Step) -> nn.Module:
    """The network with PEFT's adapters as it makes them by default (fp32) if the job wants any."""
    if step.job.method == "lora":
        return with_adapters(module, step, step.plan.weights_dtype or "fp32")
    for change in step.changes:  # qlora's: what PEFT prepares, and adapters
        module = change(module)
    return module


class Rows(Dataset[models.Batch]):  # type: ignore[misc]
    """Micro-batches of one sequence each, without padding, made when they are asked for.

    They are as long as the job says in the order in which they are asked for, whatever index a sampler shuffled.
    `images_dtype` is that of images and sounds; None: what the network takes under autocast, or without it.
    """

    def __init__(self, step: Step, module: nn.Module, count: int, images_dtype: torch.dtype | None = None) -> None:
        self.one = replace(step.job, micro_batch=1)
        self.lengths = chain.from_iterable(batches.drawn(step.job)) if step.job.lengths else None
        self.module = module
        self.images_dtype = images_dtype or (torch.float32 if step.autocast_dtype else step.weights_dtype)
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> models.Batch:
        one = self.one if self.lengths is None else replace(self.one, seq_len=next(self.lengths))
        made = models.batch(one, self.module, self.images_dtype)
        return made if one.packing is None else batches.packed(made, one.packing)


def collated(rows: Sequence[models.Batch]) -> models.Batch:
    """One micro-batch of several, as processors make it: a sequence may have many rows of patches, or of tiles.

    Of sequences that are not equally long the shorter ones are padded.
    """
    lengths = [row["input_ids"].shape[1] for row in rows if "input_ids" in row]
    if len(set(lengths)) < 2:
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    whole = {name: _as_long_as_the_longest([row[name] for row in rows], lengths) for name in rows[0]}
    return batches.padded(whole, lengths)


def _as_long_as_the_longest(parts: Sequence[torch.Tensor], lengths: Sequence[int]) -> torch.Tensor:
    """The parts one below the other; those that have a place for each token with zeros behind."""
    of_tokens = all(part.ndim > 1 and part.shape[1] == length for part, length in zip(parts, lengths, strict=True))
    if not of_tokens:
        return torch.cat(list(parts))
    longest = max(lengths)
    wide = [nn.functional.pad(part, (0, 0) * (part.ndim - 2) + (0, longest - part.shape[1])) for part in parts]
    return torch.cat(wide)


def evaluated(step: Step, module: nn.Module) -> Rows:
    """Rows of full length for one evaluation on all ranks: as many batches as logits are gathered of, or one."""
    job, ranks = step.job, step.world.size
    assert job.eval_batch is not None
    full = replace(step, job=replace(job, lengths=()))
    return Rows(full, module, job.eval_batch * (job.eval_logits or 1) * ranks)


def rows_needed(step: Step, steps: int) -> int:
    """Sequences of `steps` optimizer steps on all ranks, of which those that share a sequence get the same."""
    job, world = step.job, step.world
    laid = axes(step.plan, world.size, world.gpus_per_node)
    return job.micro_batch * job.grad_accum * laid.data_parallel * steps


def launcher_variables(world: World) -> Mapping[str, str]:
    """What torchrun sets.  Each process sees one card, as under a launcher that hands the cards out."""
    return {
        "RANK": str(world.rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(world.size),
        "LOCAL_WORLD_SIZE": str(min(world.size, world.gpus_per_node)),
        "GROUP_RANK": str(world.rank // world.gpus_per_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def launch(plan: Plan, world: World) -> None:
    """Be a process that `accelerate launch` started, if the plan divides or replicates anything."""
    if plan.shard != "none":
        os.environ.update(launcher_variables(world))
    if plan.param_offload != "none":
        os.environ.update(HOST_GROUP)


def divided(module: nn.Module) -> tuple[str, ...]:
    """Classes of repeated layers, to be named where FSDP would ask for some that the network has not; else none.

    transformers lists for CLIP and SigLIP what either tower of theirs has, and LLaVA and Gemma 3 have one of them.
    """
    network = models.hugging_face(module)
    there = {type(part).__name__ for part in module.modules()}
    if network is None or set(network._no_split_modules or ()) <= there:
        return ()
    return tuple(dict.fromkeys(type(layer).__name__ for layer in models.layers(network)))


@dataclass(frozen=True)
class Returned:
    """What the network returned, kept by a user's own loop as long as the plan says (`techniques.outputs`)."""

    outputs: str
    """The option of the plan."""
    kept: list[Any] = field(default_factory=list)

    def loss_of(self, output: Any) -> torch.Tensor:
        """The loss, beside which the rest stays or goes."""
        if self.outputs != "freed":
            self.kept[:] = [output]
        return models.loss_of(output)

    def stepped(self) -> None:
        """A step of the loop has ended."""
        if self.outputs == "step":
            self.kept.clear()


def generate(step: Step, called: Any, rows: Rows) -> None:
    """By a network of transformers, or by PEFT's around it, as its user calls it beside training."""
    job = step.job
    network = generation.network_in(called, job)
    sounds = partial(models.batch, job, rows.module, rows.images_dtype)
    asked = generation.asked(job, network, step.world.device, sounds)
    called.eval()
    with phase("generate"):
        called.generate(**asked)
    called.train()


@contextmanager
def contexts(step: Step) -> Iterator[None]:
    """The plan's attention backend around the trainer's whole loop."""
    with ExitStack() as stack:
        for context in step.contexts:
            stack.enter_context(context())
        yield
