"""`tonnage estimate MODEL`: a training step from a model's name alone."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tonnage.cli.options import (
    CARD,
    PLAN,
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
            help="The rank to run; default: the worst of those that differ.",
            metavar="N",
            min=0,
            rich_help_panel=CARD,
        ),
    ] = None,
    steps: Annotated[
        int | None,
        count("--steps", "Optimizer steps to make; default: 3, two of them repeated where all are alike.", CARD),
    ] = None,
    torch: TorchVersion = None,
    offline: Offline = False,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            help="A plan.toml: its model, cards and options, less what is said here.",
            metavar="FILE",
            rich_help_panel=PLAN,
        ),
    ] = None,
    source: Annotated[
        str,
        typer.Option(
            "--source",
            help="ghost: the real code on a ghost GPU; meta: imitated, on any platform, less exact.",
            metavar="WORD",
            rich_help_panel=CARD,
        ),
    ] = "ghost",
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Run the steps even if the same were run before.", rich_help_panel=CARD),
    ] = False,
    json: Json = False,
    html: Html = None,
    save: Save = None,
    snapshot: Snapshot = None,
    force: Force = False,
    **options: Any,
) -> int:
    """Will it fit, and where do the bytes go? The real training step on a ghost GPU, from a model's name alone."""
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
