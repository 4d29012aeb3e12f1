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
    with_request,
)


def _model_names(incomplete: str) -> list[str]:
    from tonnage.catalog import model_names

    return beginning(model_names(), incomplete)


@with_request
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
    steps: Steps = 3,
    torch: TorchVersion = None,
    offline: Annotated[
        bool,
        typer.Option("--offline", help="Never ask the network about a model.", rich_help_panel=CARD),
    ] = False,
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
    **options: Any,
) -> int:
    """Will it fit, and where do the bytes go? The real training step on a ghost GPU, from a model's name alone."""
    from tonnage import predict
    from tonnage.api import request
    from tonnage.cli.answer import Wanted, deliver
    from tonnage.cli.progress import progress
    from tonnage.device import parse_cluster

    wanted = Wanted(json=json, html=html, save=save, snapshot=snapshot)
    wanted.check()
    cluster = parse_cluster(gpu, gpus=gpus, gpu_memory_bytes=gpu_memory)
    with progress() as say:
        job, plan = request(model, offline=offline, **options)
        run = predict.estimate(
            job,
            plan,
            cluster,
            rank=rank,
            steps=steps,
            torch_version=torch,
            source=source,
            fresh=fresh,
            progress=say,
        )
    return deliver(run.estimate, lambda: run.traces, wanted)
