"""Trains with torch alone: DDP, ZeroRedundancyOptimizer or FSDP2, as job.json sets it.

    torchrun --nproc-per-node 8 train.py --data FILE

rows.py describes FILE; without --data a few steps run on made-up rows.
"""

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import job
import rows
import torch
import torch.distributed as dist
from loop import checkpointed, in_slices, optimizer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

FSDP2 = ("zero2", "zero3", "hsdp")
MIXED = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


def layers(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers: the outermost lists of modules of one class."""
    parts = list(model.children())
    if isinstance(model, nn.ModuleList | nn.Sequential) and len({type(part) for part in parts}) == 1:
        return parts
    return [layer for part in parts for layer in layers(part)]


def sharded(settings: job.Job, model: nn.Module) -> nn.Module:
    """Divide the parameters among the ranks, layer by layer."""
    ranks = dist.get_world_size()
    if settings.shard == "hsdp":
        assert settings.replicas is not None
        mesh = init_device_mesh(
            "cuda", (settings.replicas, ranks // settings.replicas), mesh_dim_names=("replicate", "shard")
        )
    else:
        mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("shard",))
    compute = MIXED.get(settings.precision or "")
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": settings.shard != "zero2",
        "offload_policy": CPUOffloadPolicy() if settings.param_offload else OffloadPolicy(),
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        if compute
        else MixedPrecisionPolicy(),
    }
    for layer in layers(model):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def compiled(settings: job.Job, model: nn.Module) -> nn.Module:
    """Compile the network, or each layer inside its checkpoint and gathered weights, at the first step."""
    if settings.compile == "layers":
        for layer in layers(model):
            layer.compile()
    elif settings.compile == "model":
        model.compile()
    return model


def distributed(settings: job.Job, model: nn.Module, device: torch.device) -> nn.Module:
    """Return this rank's network."""
    if settings.shard in FSDP2:
        return sharded(settings, model)
    model = model.to(device)
    return DistributedDataParallel(model, device_ids=[device.index]) if settings.shard is not None else model


@contextlib.contextmanager
def local_gradients(settings: job.Job, model: Any, last: bool) -> Iterator[None]:
    """Average gradients after the last micro-batch only."""
    if settings.shard is None or last or settings.sync_each_batch:
        yield
    elif settings.shard in FSDP2:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)
    else:
        with model.no_sync():
            yield


def step(
    settings: job.Job, model: Any, update: Any, scaler: Any, batches: Iterator[Any], device: torch.device
) -> float:
    """Run one optimizer step and return the loss of its last micro-batch."""
    accumulated = settings.grad_accum or 1
    compute = None if settings.shard in FSDP2 else MIXED.get(settings.precision or "")
    value = 0.0
    for index in range(accumulated):
        last = index == accumulated - 1
        batch = {name: tensor.to(device) for name, tensor in next(batches).items()}
        with local_gradients(settings, model, last):
            with torch.autocast("cuda", compute, enabled=compute is not None):
                loss = model(**batch)[0] / accumulated
            scaler.scale(loss).backward()
            if last:
                value = float(loss.detach()) * accumulated  # the tensors must not outlive backward
            del loss, batch
    if settings.clip_grad_norm is not None:
        scaler.unscale_(update)
        nn.utils.clip_grad_norm_(
            [p for group in update.param_groups for p in group["params"]], settings.clip_grad_norm
        )
    scaler.step(update)
    scaler.update()
    update.zero_grad(set_to_none=True)
    return value


def made_optimizer(settings: job.Job, model: nn.Module) -> Any:
    """Return the optimizer over the trained parameters; ZeRO-1 divides its states."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if settings.shard != "zero1":
        return optimizer(settings, parameters)
    return ZeroRedundancyOptimizer(parameters, optimizer_class=lambda given, **_: optimizer(settings, given))


def endless(loader: DataLoader[Any], sampler: Any) -> Iterator[Any]:
    """Yield batches, epoch after epoch."""
    epoch = 0
    while True:
        if sampler is not None:
            sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def save(model: Any, settings: job.Job) -> None:
    """Save the whole network from rank 0, as from_pretrained takes it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if not dist.is_initialized() or dist.get_rank() == 0:
        plain = model.module if isinstance(model, DistributedDataParallel) else model
        plain.save_pretrained("output", state_dict=weights)


def main() -> None:
    options = job.options()
    settings = job.read()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    if settings.shard is not None:
        dist.init_process_group("cpu:gloo,cuda:nccl" if settings.param_offload else "nccl", device_id=device)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    network = job.adapted(settings, job.network(settings, options.random_weights))
    model = compiled(settings, distributed(settings, in_slices(settings, checkpointed(settings, network)), device))
    update = made_optimizer(settings, model)
    scaler = torch.amp.GradScaler("cuda", enabled=settings.precision == "fp16-mixed")
    rows_a_step = (settings.micro_batch or 1) * (settings.grad_accum or 1) * ranks
    dataset = rows.dataset(settings, options.data, options.steps * rows_a_step)
    sampler: Any = DistributedSampler(dataset) if ranks > 1 else None
    loader = DataLoader(
        dataset,
        settings.micro_batch,
        sampler=sampler,
        shuffle=sampler is None,
        drop_last=True,
        collate_fn=dataset.batch,
    )
    batches = endless(loader, sampler)
    backend: AbstractContextManager[None] = job.attention(settings)
    with backend:
        for number in range(len(dataset) // rows_a_step):
            loss = step(settings, model, update, scaler, batches, device)
            if not dist.is_initialized() or dist.get_rank() == 0:
                print(f"step {number + 1}  loss {loss:.4f}", flush=True)
    if options.data:
        save(model, settings)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
