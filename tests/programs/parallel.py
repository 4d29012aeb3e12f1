"""One network trained in parallel: ddp, fsdp1, fsdp, accumulating (fsdp over two micro-batches), hsdp, tensor, both
(tensor and fsdp), pipeline; started by torchrun.

torchrun --nproc-per-node 8 parallel.py fsdp [--width 512]
"""

import argparse
import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

KINDS = ("ddp", "fsdp1", "fsdp", "accumulating", "hsdp", "tensor", "both", "pipeline")


class Layer(nn.Module):
    """An MLP with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Network(nn.Module):
    """Some layers, and a head."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 2 * width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def data_parallel(model: nn.Module) -> nn.Module:
    """Replicas whose gradients are averaged."""
    return nn.parallel.DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])


def flat(model: nn.Module) -> nn.Module:
    """FSDP's first version, layer by layer."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for index, layer in enumerate(model.layers):
        model.layers[index] = FullyShardedDataParallel(layer, use_orig_params=True)
    return FullyShardedDataParallel(model, use_orig_params=True)


def sharded(model: nn.Module, mesh: object) -> nn.Module:
    """FSDP2 over the mesh, layer by layer; of two dimensions the first replicates (HSDP)."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def divided(model: nn.Module, mesh: object) -> nn.Module:
    """Tensor parallel: each layer's first matrix by columns, its second by rows."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {}
    for index in range(len(model.layers)):
        plan[f"layers.{index}.up"] = ColwiseParallel()
        plan[f"layers.{index}.down"] = RowwiseParallel()
    return parallelize_module(model, mesh, plan)


def pipeline_steps(width: int, steps: int) -> nn.Module:
    """Each rank holds one stage; eight micro-batches, or as many as stages, one forward one backward."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size = dist.get_rank(), dist.get_world_size()
    module = Network(width, 1) if rank == size - 1 else Layer(width)
    module = module.cuda()
    micro = torch.zeros(2, width, device="cuda", requires_grad=rank > 0)  # as what is received does
    stage = PipelineStage(module, rank, size, micro.device, input_args=micro, output_args=module(micro))
    count = max(8, size)
    schedule = Schedule1F1B(
        stage, n_microbatches=count, loss_fn=lambda output, target: (output - target).square().mean()
    )
    optimizer = torch.optim.AdamW(module.parameters())
    for _ in range(steps):
        whole = torch.randn(2 * count, width, device="cuda")
        if rank == 0:
            schedule.step(whole)
        elif rank == size - 1:
            schedule.step(target=torch.randn(2 * count, 2 * width, device="cuda"))
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
    return module


def loop_steps(model: nn.Module, width: int, steps: int, *, accumulate: bool = False) -> nn.Module:
    """The plain loop; or one whose first micro-batch of two does not communicate in its backward."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(steps):
        if accumulate:
            model.set_requires_gradient_sync(False)
            model(torch.randn(16, width, device="cuda")).float().square().mean().backward()
            model.set_requires_gradient_sync(True)
        loss = model(torch.randn(16, width, device="cuda")).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Where its card is known, NCCL's communicator is made at once, and those of a mesh are split off it.
    card = torch.device("cuda", torch.cuda.current_device()) if options.kind == "both" else None
    dist.init_process_group("nccl", device_id=card)
    size = dist.get_world_size()
    if options.kind == "pipeline":
        model = pipeline_steps(options.width, options.steps)
    else:
        model = Network(options.width, 2).cuda()
        if options.kind == "ddp":
            model = data_parallel(model)
        elif options.kind == "tensor":
            model = divided(model, init_device_mesh("cuda", (size,)))
        elif options.kind == "fsdp1":
            model = flat(model)
        elif options.kind in ("fsdp", "accumulating"):
            model = sharded(model, init_device_mesh("cuda", (size,)))
        elif options.kind == "hsdp":
            inner = min(size // 2, 8)
            model = sharded(model, init_device_mesh("cuda", (size // inner, inner), mesh_dim_names=("copy", "shard")))
        else:
            mesh = init_device_mesh("cuda", (size // 2, 2), mesh_dim_names=("data", "tensor"))
            model = sharded(divided(model, mesh["tensor"]), mesh["data"])
        model = loop_steps(model, options.width, options.steps, accumulate=options.kind == "accumulating")
    print(
        json.dumps(
            {
                "allocated": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.max_memory_reserved(),
                "rank": dist.get_rank(),
                "size": size,
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
            }
        )
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
