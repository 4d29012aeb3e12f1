"""`tonnage estimate MODEL`: a training step from a model's name alone."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tonnage.cli.options import (
    Force,
    Gpu,
    GpuMemory,
    Gpus,
    Here,
    Html,
    Json,
    ModelOrNone,
    Offline,
    Save,
    Snapshot,
    TorchVersion,
    cluster_of,
    count,
    with_request,
)


@with_request
def estimate(
    model: ModelOrNone = None,
    gpu: Gpu = None,
    here: Here = False,
    gpus: Gpus = None,
    gpu_memory: GpuMemory = None,
    rank: Annotated[
        int | None,
        typer.Option(
            "--rank",
            help="Run only this rank. Default: every rank that differs from the others; the worst is shown.",
            metavar="N",
            min=0,
        ),
    ] = None,
    steps: Annotated[
        int | None,
        count("--steps", "Optimizer steps to run. Default: 3; of equal steps one is run and repeated twice."),
    ] = None,
    torch: TorchVersion = None,
    offline: Offline = False,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            help="Take model, GPUs and options from a plan.toml; options given here replace its own.",
            metavar="FILE",
        ),
    ] = None,
    source: Annotated[
        str,
        typer.Option(
            "--source",
            help="ghost: run the real PyTorch on a ghost GPU. meta: imitate the GPU on any platform, less exactly.",
            metavar="WORD",
        ),
    ] = "ghost",
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Run again instead of using the cached trace of an earlier estimate."),
    ] = False,
    json: Json = False,
    html: Html = None,
    save: Save = None,
    snapshot: Snapshot = None,
    force: Force = False,
    **options: Any,
) -> int:
    """Estimate the memory and time of a training step from a model's name, and say whether it fits."""
    from tonnage.cli.answer import Wanted, deliver
    from tonnage.cli.progress import progress
    from tonnage.errors import UsageError
    from tonnage.estimates import predict
    from tonnage.planner import plan_file as planfile
    from tonnage.trainers import cases

    wanted = Wanted(json=json, html=html, save=save, snapshot=snapshot)
    wanted.check(force=force)
    said = options
    if plan is not None:
        kept = planfile.read(plan)
        model = kept.network(model)
        if gpu is None and not here:  # the memory is that of the file's card
            gpu, gpu_memory = kept.gpu, gpu_memory or kept.gpu_memory_bytes
        options = kept.under(options)
    if model is None:
        raise UsageError("No MODEL was given; name one (`tonnage models` lists some), or a --plan FILE.")
    cluster = cluster_of(gpu, gpus, gpu_memory, here)
    wanted.check_card(cluster.device.id)
    with progress() as say:
        run = predict.answer(
            cases.ask(model, cluster, options, said=said, offline=offline),
            rank=rank,
            steps=steps,
            torch_version=torch,
            source=source,
            fresh=fresh,
            progress=say,
        )
    return deliver(run.estimate, lambda: run.traces, wanted)
