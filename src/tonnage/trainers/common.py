"""The shared parts of a run: a network as `from_pretrained` leaves it, made-up rows, the launcher's variables.

The torch half of the engines: only the process that runs the step imports it.
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

from tonnage.mesh import make_mesh
from tonnage.step import batches, generation, model
from tonnage.step.events import phase
from tonnage.step.step import Step
from tonnage.step.world import World
from tonnage.techniques import select_techniques
from tonnage.techniques.lora import with_adapters
from tonnage.techniques.precision import dtype
from tonnage.techniques.qlora import QLORA, loaded

if TYPE_CHECKING:
    from tonnage.job import Job
    from tonnage.plans import Plan

NETWORK_OPTIONS: Final = ("precision", "weights_dtype", "attention")
"""Options that decide how a network is made and called, whatever trains it."""

HOST_GROUP: Final = {"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "true"}
"""Variables of `accelerate launch` where FSDP offloads: the process group then takes tensors on the host as well."""


def network_step(job: Job, plan: Plan, world: World) -> Step:
    """Return a Step with the dtypes, the attention and the quantization of the plan, and nothing of a trainer."""
    on_card = replace(world, device=torch.device("cuda", 0))
    step = Step(job=job, plan=plan, world=on_card, initialise=False)
    for technique in select_techniques(job, plan):
        if technique.option in NETWORK_OPTIONS or technique is QLORA:
            step = technique.apply(step)
    if job.method == "lora":
        step = replace(step, weights_dtype=dtype(plan.base_dtype or plan.compute_dtype))
    return step


def build_network(step: Step, device: torch.device | None = None) -> nn.Module:
    """Return the network, by default on the host, where its memory is not touched; a quantized one is on the card."""
    if step.job.method == "qlora":
        return loaded(step)  # whole on each rank, before the trainer divides it
    network = model.build(
        step.job.model, dtype=step.weights_dtype, attention=step.attention, device=device or torch.device("cpu")
    )
    model.check_positions(step.job, network)
    return network


def add_adapters(module: nn.Module, step: Step) -> nn.Module:
    """Return the network with PEFT's adapters as PEFT makes them by default (fp32), if the job wants any."""
    if step.job.method == "lora":
        return with_adapters(module, step, step.plan.weights_dtype or "fp32")
    for change in step.changes:  # of qlora: PEFT's preparation, and adapters
        module = change(module)
    return module


class Rows(Dataset[model.Batch]):  # type: ignore[misc]
    """Micro-batches of one sequence each, without padding, made when they are asked for.

    Their lengths are those of the job in the order in which rows are asked for, whatever index a sampler shuffled.
    `images_dtype` is that of images and sounds; None: what the network takes under autocast, or without it.
    """

    def __init__(self, step: Step, module: nn.Module, count: int, images_dtype: torch.dtype | None = None) -> None:
        self.job = replace(step.job, micro_batch=1)
        self.lengths = chain.from_iterable(batches.draw_lengths(step.job)) if step.job.lengths else None
        self.module = module
        self.images_dtype = images_dtype or (torch.float32 if step.autocast_dtype else step.weights_dtype)
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> model.Batch:
        job = self.job if self.lengths is None else replace(self.job, seq_len=next(self.lengths))
        row = model.batch(job, self.module, self.images_dtype)
        return row if job.packing is None else batches.pack(row, job.packing)


def collate(rows: Sequence[model.Batch]) -> model.Batch:
    """Return one micro-batch of several rows, as processors make it.

    A sequence may have many rows of patches, or of tiles.  Shorter sequences are padded.
    """
    lengths = [row["input_ids"].shape[1] for row in rows if "input_ids" in row]
    if len(set(lengths)) < 2:
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    padded = {name: _concatenate_padded([row[name] for row in rows], lengths) for name in rows[0]}
    return batches.pad(padded, lengths)


def _concatenate_padded(parts: Sequence[torch.Tensor], lengths: Sequence[int]) -> torch.Tensor:
    """Return the parts one below the other; parts with an element for each token get zeros behind."""
    is_per_token = all(part.ndim > 1 and part.shape[1] == length for part, length in zip(parts, lengths, strict=True))
    if not is_per_token:
        return torch.cat(list(parts))
    longest = max(lengths)
    padded = [nn.functional.pad(part, (0, 0) * (part.ndim - 2) + (0, longest - part.shape[1])) for part in parts]
    return torch.cat(padded)


def evaluation_rows(step: Step, module: nn.Module) -> Rows:
    """Return rows of full length for one evaluation on all ranks: `eval_logits` batches, or one."""
    job, ranks = step.job, step.world.size
    assert job.eval_batch is not None
    full = replace(step, job=replace(job, lengths=()))
    return Rows(full, module, job.eval_batch * (job.eval_logits or 1) * ranks)


def count_rows(step: Step, steps: int) -> int:
    """Return the sequences of `steps` optimizer steps on all ranks; ranks that share a sequence get the same one."""
    job, world = step.job, step.world
    layout = make_mesh(step.plan, world.size, world.gpus_per_node)
    return job.micro_batch * job.grad_accum * layout.data_parallel * steps


def launcher_variables(world: World) -> Mapping[str, str]:
    """Return the variables of torchrun.  Each process sees one card, as under a launcher that hands the cards out."""
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
    """Set the variables of `accelerate launch`, if the plan divides or replicates anything."""
    if plan.shard != "none":
        os.environ.update(launcher_variables(world))
    if plan.param_offload != "none":
        os.environ.update(HOST_GROUP)


def layers_to_wrap(module: nn.Module) -> tuple[str, ...]:
    """Return the classes of repeated layers, where FSDP would ask for some that the network has not; else none.

    transformers lists for CLIP and SigLIP the layers of both towers; LLaVA and Gemma 3 have one of the towers.
    """
    network = model.hugging_face(module)
    classes = {type(part).__name__ for part in module.modules()}
    if network is None or set(network._no_split_modules or ()) <= classes:
        return ()
    return tuple(dict.fromkeys(type(layer).__name__ for layer in model.layers(network)))


@dataclass(frozen=True)
class KeptOutput:
    """The network's output, kept by a user's own loop as long as the plan says (`techniques.outputs`)."""

    outputs: str
    """The option of the plan."""
    kept: list[Any] = field(default_factory=list)

    def loss_of(self, output: Any) -> torch.Tensor:
        """Return the loss, and keep the rest of the output or let it go."""
        if self.outputs != "freed":
            self.kept[:] = [output]
        return model.loss_of(output)

    def end_step(self) -> None:
        """Let go of what is kept for one step of the loop."""
        if self.outputs == "step":
            self.kept.clear()


def generate(step: Step, callee: Any, rows: Rows) -> None:
    """Have `callee`, a network of transformers or PEFT's around it, generate as its user does beside training."""
    job = step.job
    network = generation.network_in(callee, job)
    sounds = partial(model.batch, job, rows.module, rows.images_dtype)
    arguments = generation.make_arguments(job, network, step.world.device, sounds)
    callee.eval()
    with phase("generate"):
        callee.generate(**arguments)
    callee.train()


@contextmanager
def contexts(step: Step) -> Iterator[None]:
    """Set the plan's attention backend around the trainer's whole loop."""
    with ExitStack() as stack:
        for context in step.contexts:
            stack.enter_context(context())
        yield
