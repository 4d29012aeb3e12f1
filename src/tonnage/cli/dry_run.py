"""`tonnage dry-run -- COMMAND...`: the user's own script on ghost GPUs."""

from typing import Annotated

import typer

from tonnage.cli.options import (
    CARD,
    Force,
    Gpu,
    GpuMemory,
    Gpus,
    Here,
    Html,
    Json,
    Save,
    Snapshot,
    Steps,
    TorchVersion,
    cluster_of,
    count,
)


def dry_run(
    command: Annotated[
        list[str], typer.Argument(help="As you would type it: python train.py, torchrun ..., accelerate launch ...")
    ],
    gpu: Gpu = None,
    here: Here = False,
    gpus: Gpus = None,
    gpu_memory: GpuMemory = None,
    rank: Annotated[
        int | None,
        typer.Option(
            "--rank",
            help="Run this rank alone, in one process and without torchrun or accelerate launch.",
            metavar="N",
            min=0,
            rich_help_panel=CARD,
        ),
    ] = None,
    steps: Steps = 3,
    timeout: Annotated[
        int, count("--timeout", "Seconds after which a command that has not made its steps is stopped.", CARD)
    ] = 900,
    torch: TorchVersion = None,
    json: Json = False,
    html: Html = None,
    save: Save = None,
    snapshot: Snapshot = None,
    force: Force = False,
) -> int:
    """Your own script, unchanged, for a few optimizer steps on GPUs that aren't there; then it is stopped."""
    from tonnage.cli.answer import Wanted, deliver
    from tonnage.cli.progress import progress
    from tonnage.script import dry_run as dryrun

    wanted = Wanted(json=json, html=html, save=save, snapshot=snapshot)
    wanted.check(force=force)
    cluster = cluster_of(gpu, gpus, gpu_memory, here, command)
    with progress(moving=False) as say:
        run = dryrun.run(
            command,
            cluster,
            steps=steps,
            timeout_seconds=float(timeout),
            rank=rank,
            torch_version=torch,
            progress=say,
        )
    return deliver(run.estimate, lambda: run.traces, wanted)
