"""`tonnage dry-run -- COMMAND...`: run a training script on ghost GPUs and report its memory."""

from contextlib import closing
from typing import Annotated

import typer

from tonnage.cli.options import (
    Advised,
    Force,
    Gpu,
    GpuMemory,
    Gpus,
    Here,
    HostMemory,
    Html,
    Json,
    Save,
    Snapshot,
    Steps,
    TorchVersion,
    count,
    in_panels,
    parse_cluster_options,
)


@in_panels
def dry_run(
    command: Annotated[
        list[str],
        typer.Argument(
            help="Your training command as you would type it, after two dashes: -- python train.py, "
            "-- torchrun ..., -- accelerate launch ..."
        ),
    ],
    gpu: Gpu = None,
    here: Here = False,
    gpus: Gpus = None,
    gpu_memory: GpuMemory = None,
    host_memory: HostMemory = None,
    rank: Annotated[
        int | None,
        typer.Option(
            "--rank",
            help="Run only this rank of the cluster, in one process and without the launcher (torchrun, accelerate "
            "launch, deepspeed). Default: all ranks that the command starts.",
            metavar="N",
            min=0,
        ),
    ] = None,
    steps: Steps = 3,
    timeout: Annotated[
        int, count("--timeout", "Stop the command if it has not finished its steps after this many seconds.")
    ] = 900,
    torch: TorchVersion = None,
    requests: Annotated[
        str | None,
        typer.Option(
            "--requests",
            help="Requests that an inference engine (vLLM) serves once it has started: p50=800,p95=6000,rate=5,"
            "output=256,prefix=500 (tokens; rate in requests a second), or a file of lengths.",
            metavar="LENGTHS",
        ),
    ] = None,
    advice: Advised = True,
    json: Json = False,
    html: Html = None,
    save: Save = None,
    snapshot: Snapshot = None,
    force: Force = False,
) -> int:
    """Run your own training script, unchanged, for a few steps on ghost GPUs, and report its memory.

    Example: tonnage dry-run --gpu a100-80gb -- python train.py
    """
    from tonnage.cli.answer import Output, deliver
    from tonnage.cli.progress import progress
    from tonnage.script.planning import Asked
    from tonnage.script.tries import answers
    from tonnage.serving.lengths import parse_lengths

    wanted = Output(json=json, html=html, save=save, snapshot=snapshot)
    wanted.check(force=force)
    cluster = parse_cluster_options(gpu, gpus, gpu_memory, here, command, host_memory=host_memory)
    asked = Asked(
        command=command,
        cluster=cluster,
        stated={},
        timeout_seconds=float(timeout),
        torch_version=torch,
        requests=None if requests is None else parse_lengths(requests),
    )
    with progress(moving=False) as say:
        runs = answers(asked, steps=steps or None, rank=rank, advise=advice, progress=say)
        run = next(runs)
        with closing(runs):
            wants = run.estimate.wants_advice
            complete = (lambda: next(runs, run).estimate) if wants else None
            return deliver(run.estimate, lambda: run.traces, wanted, complete)
