"""`tonnage estimate MODEL`: a training step from a model's name alone."""

from typing import Annotated, Any

import typer

from tonnage.cli.options import (
    CARD,
    Gpu,
    GpuMemory,
    Gpus,
    Html,
    Json,
    Save,
    Snapshot,
    Steps,
    TorchVersion,
    beginning,
    count,
)
from tonnage.job import METHODS, Job
from tonnage.plan import (
    ALLOCATORS,
    ATTENTIONS,
    CHECKPOINTINGS,
    DTYPES,
    LOSSES,
    OFFLOADS,
    OPTIMIZERS,
    PRECISIONS,
    SHARDS,
    Plan,
)

_JOB = "What is trained"
_PLAN = "How it is trained"


def _choice(name: str, text: str, possible: tuple[str, ...], panel: str = _PLAN) -> Any:
    """An option with listed values; Job and Plan check them, with one wording for the command line and Python."""

    def complete(incomplete: str) -> list[str]:
        return beginning(possible, incomplete)

    return typer.Option(
        name,
        help=f"{text} One of {', '.join(possible)}.",
        metavar="WORD",
        autocompletion=complete,
        rich_help_panel=panel,
    )


def _model_names(incomplete: str) -> list[str]:
    from tonnage.catalog import model_names

    return beginning(model_names(), incomplete)


def estimate(
    model: Annotated[
        str,
        typer.Argument(
            help="A catalog name (`tonnage models`), a Hub id, a folder, a config.json, or package.module:factory.",
            autocompletion=_model_names,
        ),
    ],
    gpu: Gpu = None,
    gpus: Gpus = None,
    gpu_memory: GpuMemory = None,
    method: Annotated[str, _choice("--method", "Which parameters are trained.", METHODS, _JOB)] = Job.method,
    lora_rank: Annotated[int, count("--lora-rank", "Rank of LoRA's adapters.", _JOB)] = Job.lora_rank,
    lora_targets: Annotated[
        str,
        typer.Option(
            "--lora-targets",
            help="Modules that get adapters, with commas; or all-linear.",
            metavar="NAMES",
            rich_help_panel=_JOB,
        ),
    ] = ",".join(Job.lora_targets),
    seq_len: Annotated[int, count("--seq-len", "Tokens of one sequence.", _JOB)] = Job.seq_len,
    micro_batch: Annotated[int, count("--micro-batch", "Sequences of one forward pass.", _JOB)] = Job.micro_batch,
    grad_accum: Annotated[int, count("--grad-accum", "Micro-batches of one step.", _JOB)] = Job.grad_accum,
    precision: Annotated[
        str, _choice("--precision", "Dtypes of weights and computation.", PRECISIONS)
    ] = Plan.precision,
    base_dtype: Annotated[
        str | None, _choice("--base-dtype", "Dtype of LoRA's frozen weights; default: that of computation.", DTYPES)
    ] = None,
    optimizer: Annotated[str, _choice("--optimizer", "The optimizer.", OPTIMIZERS)] = Plan.optimizer,
    checkpointing: Annotated[
        str, _choice("--checkpointing", "Layers that recompute activations.", CHECKPOINTINGS)
    ] = Plan.checkpointing,
    shard: Annotated[str, _choice("--shard", "What is divided among the ranks.", SHARDS)] = Plan.shard,
    param_offload: Annotated[
        str, _choice("--param-offload", "Where sharded parameters rest.", OFFLOADS)
    ] = Plan.param_offload,
    attention: Annotated[str, _choice("--attention", "The attention backend.", ATTENTIONS)] = Plan.attention,
    loss: Annotated[str, _choice("--loss", "The loss on all logits, or in slices.", LOSSES)] = Plan.loss,
    allocator: Annotated[str, _choice("--allocator", "The caching allocator's mode.", ALLOCATORS)] = Plan.allocator,
    rank: Annotated[
        int, typer.Option("--rank", help="The rank to run.", metavar="N", min=0, rich_help_panel=CARD)
    ] = 0,
    steps: Steps = 3,
    torch: TorchVersion = None,
    offline: Annotated[
        bool,
        typer.Option("--offline", help="Never ask the network about a model.", rich_help_panel=CARD),
    ] = False,
    json: Json = False,
    html: Html = None,
    save: Save = None,
    snapshot: Snapshot = None,
) -> int:
    """Will it fit, and where do the bytes go? The real training step on a ghost GPU, from a model's name alone."""
    from tonnage import modelref, predict
    from tonnage.cli.answer import Wanted, deliver
    from tonnage.cli.progress import progress
    from tonnage.device import parse_cluster

    wanted = Wanted(json=json, html=html, save=save, snapshot=snapshot)
    wanted.check()
    cluster = parse_cluster(gpu, gpus=gpus, gpu_memory_bytes=gpu_memory)
    plan = Plan(
        precision=precision,
        base_dtype=base_dtype,
        optimizer=optimizer,
        checkpointing=checkpointing,
        shard=shard,
        param_offload=param_offload,
        attention=attention,
        loss=loss,
        allocator=allocator,
    )
    with progress() as say:
        job = Job(
            model=modelref.resolve(model, offline=offline),
            method=method,  # type: ignore[arg-type]
            lora_rank=lora_rank,
            lora_targets=tuple(name.strip() for name in lora_targets.split(",") if name.strip()),
            seq_len=seq_len,
            micro_batch=micro_batch,
            grad_accum=grad_accum,
        )
        run = predict.estimate(job, plan, cluster, rank=rank, steps=steps, torch_version=torch, progress=say)
    return deliver(run.estimate, lambda: run.traces, wanted)
