"""`tonnage estimate MODEL`: predict the memory and time of a training step from the name of a model."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    ModelOrNone,
    Offline,
    Price,
    Samples,
    Save,
    Snapshot,
    Tokens,
    TorchVersion,
    count,
    parse_cluster_options,
)
from tonnage.cli.serving_options import EnginePython, Task, take_serving, with_both_tasks
from tonnage.errors import UsageError

if TYPE_CHECKING:
    from tonnage.estimates.estimate import Estimate


@with_both_tasks
def estimate(
    model: ModelOrNone = None,
    task: Task = "train",
    gpu: Gpu = None,
    here: Here = False,
    gpus: Gpus = None,
    gpu_memory: GpuMemory = None,
    host_memory: HostMemory = None,
    rank: Annotated[
        int | None,
        typer.Option(
            "--rank",
            help="Run only this rank. Default: one rank of each kind; the one with the highest peak is reported.",
            metavar="N",
            min=0,
        ),
    ] = None,
    steps: Annotated[
        int | None,
        count(
            "--steps",
            "Optimizer steps to run. Default: 3, of which only the first is run if the others are equal to it.",
        ),
    ] = None,
    tokens: Tokens = None,
    samples: Samples = None,
    price: Price = None,
    torch: TorchVersion = None,
    offline: Offline = False,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            help="Take MODEL, GPUs and options from a plan.toml (`tonnage plan --save`). Options given here override "
            "those of the file.",
            metavar="FILE",
        ),
    ] = None,
    source: Annotated[
        str,
        typer.Option(
            "--source",
            help="ghost: run the real PyTorch on a GPU that isn't there (Linux). meta: run on fake tensors on any "
            "platform, less exactly.",
            metavar="WORD",
        ),
    ] = "ghost",
    advice: Advised = True,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Run the steps again instead of using the cached trace of the same estimate."),
    ] = False,
    json: Json = False,
    html: Html = None,
    save: Save = None,
    snapshot: Snapshot = None,
    force: Force = False,
    engine_python: EnginePython = None,
    **options: Any,
) -> int:
    """Estimate the memory and time of a training step from a model's name, and say whether it fits.

    With --task serve: whether an inference engine starts, and how much it holds.

    Example: tonnage estimate llama-3.1-8b --gpu 8xA100-80GB --seq-len 8192 --shard zero3 --checkpointing full
    """
    from tonnage.serving import plan_file as serve_files
    from tonnage.serving.tasks import check_task

    serving = take_serving(options)
    served = serve_files.read(plan) if plan is not None and serve_files.is_serve_file(plan) else None
    if served is not None:
        task, plan, model = "serve", None, model or served.model
        serving = {**served.settings.stated(), **serving}
        if gpu is None and not here:
            gpu, gpu_memory = served.gpu, gpu_memory or served.gpu_memory_bytes
    others = {
        "plan": plan,
        "rank": rank,
        "steps": steps,
        "tokens": tokens,
        "samples": samples,
        "price": price,
        "host_memory": host_memory,
    }
    files = {"html": html, "save": save, "snapshot": snapshot, "torch": torch, "fresh": fresh}
    check_task(task, {**serving, "engine_python": engine_python}, {**others, **files, **options})
    if task == "serve":
        from tonnage.cli.serve import estimate_serve, join_lengths

        if model is None:
            raise UsageError("No MODEL was given; name one (`tonnage models` lists them).")
        cards = parse_cluster_options(gpu, gpus, gpu_memory, here, host_memory=host_memory)
        how: dict[str, Any] = {"source": source, "engine_python": engine_python}
        how |= {"lengths": join_lengths(options), "concurrency": serving.pop("concurrency", None), "advice": advice}
        return estimate_serve(model, {**serving, **options}, cards, **how, json=json, offline=offline)
    from tonnage.advice.advise import Asked, answers
    from tonnage.cli.answer import Output, deliver
    from tonnage.cli.progress import progress
    from tonnage.estimates.training import TrainingGoal, with_training
    from tonnage.planner import plan_file
    from tonnage.trainers import cases

    wanted = Output(json=json, html=html, save=save, snapshot=snapshot)
    wanted.check(force=force)
    goal = TrainingGoal(tokens=tokens, samples=samples, price=price)
    stated = options
    if plan is not None:
        file = plan_file.read(plan)
        model = file.network(model)
        if gpu is None and not here:  # the file's memory belongs to the file's GPU
            gpu, gpu_memory = file.gpu, gpu_memory or file.gpu_memory_bytes
            host_memory = host_memory or file.host_memory_bytes
        options = file.under(options)
    if model is None:
        raise UsageError("No MODEL was given; name one (`tonnage models` lists them), or give a --plan FILE.")
    cluster = parse_cluster_options(gpu, gpus, gpu_memory, here, host_memory=host_memory)
    wanted.check_card(cluster.device.id)
    say: Callable[[str], None]
    with progress() as say:
        asked = Asked(
            model=model,
            case=cases.make_case(model, cluster, options, stated=stated, offline=offline),
            options=options,
            others=_spell_others(rank, steps, torch, offline=offline),
            rank=rank,
            steps=steps,
        )
        runs = answers(
            asked,
            advise=advice,
            source=source,
            torch_version=torch,
            fresh=fresh,
            progress=lambda words: say(words),  # of the display at that time
        )
        run = next(runs)

    def complete() -> "Estimate":
        nonlocal say
        with progress() as say:
            return with_training(next(runs, run).estimate, goal)

    with closing(runs):
        first = with_training(run.estimate, goal)
        return deliver(first, lambda: run.traces, wanted, complete if first.wants_advice else None)


def _spell_others(rank: int | None, steps: int | None, torch: str | None, *, offline: bool) -> tuple[str, ...]:
    """Return the words of further options that decide the answer."""
    values = {"--rank": rank, "--steps": steps, "--torch": torch}
    words = [word for name, value in values.items() if value is not None for word in (name, f"{value}")]
    return (*words, *(("--offline",) if offline else ()))
