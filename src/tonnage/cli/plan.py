"""`tonnage plan MODEL`: the fastest combination of techniques that fits, and why."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tonnage.cli.options import (
    OUTPUT,
    Gpu,
    GpuMemory,
    Gpus,
    Html,
    Json,
    Model,
    Offline,
    TorchVersion,
    with_request,
    words,
)
from tonnage.errors import UsageError

SEARCH = "What may be chosen"


def _option(name: str, text: str, metavar: str, panel: str = SEARCH) -> Any:
    return typer.Option(f"--{name}", help=text, metavar=metavar, rich_help_panel=panel)


@with_request
def plan(
    model: Model,
    gpu: Gpu = None,
    gpus: Gpus = None,
    gpu_memory: GpuMemory = None,
    compare: Annotated[str | None, _option("compare", "Methods to compare: any, or full,lora.", "NAMES")] = None,
    only: Annotated[str | None, _option("only", "Choose among these alone: shard,checkpointing.", "NAMES")] = None,
    without: Annotated[
        str | None, _option("without", "Leave these as they are: tp,param-offload, or shard=zero2.", "NAMES")
    ] = None,
    allow: Annotated[
        str | None, _option("allow", "Options that may change the mathematics: optimizer,precision.", "NAMES")
    ] = None,
    headroom: Annotated[float, _option("headroom", "Percent of the card that stays free.", "N")] = 4.0,
    find: Annotated[
        str | None,
        _option("find", "Ask backwards: max-seq-len, max-micro-batch, min-gpus or min-gpu.", "WORD"),
    ] = None,
    top: Annotated[int, typer.Option("--top", help="Plans to show.", metavar="N", min=1, rich_help_panel=OUTPUT)] = 4,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="Also run the frontier of memory and speed.", rich_help_panel=OUTPUT)
    ] = False,
    torch: TorchVersion = None,
    offline: Offline = False,
    json: Json = False,
    html: Html = None,
    save: Annotated[
        Path | None, _option("save", "Keep the best plan, to be edited and estimated: plan.toml.", "FILE", OUTPUT)
    ] = None,
    source: Annotated[
        Path | None,
        _option(
            "from", "Settings of a trainer (ds_config.json, accelerate.yaml, ...): what to change in them.", "FILE"
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Let --save and --html replace files.", rich_help_panel=OUTPUT)
    ] = False,
    **options: Any,
) -> int:
    """What should I run? The fastest combination that fits, each plan that is shown run on a ghost GPU."""
    from tonnage import planfile
    from tonnage.api import request
    from tonnage.cli import answer
    from tonnage.cli.progress import progress
    from tonnage.device import parse_cluster
    from tonnage.files import check_writable
    from tonnage.search.space import Question

    for path in (save, html):
        if path is not None:
            check_writable(path)
            if path.exists() and not force:
                raise UsageError(f"{path} exists; name another file, or add --force.")
    cluster = parse_cluster(gpu, gpus=gpus, gpu_memory_bytes=gpu_memory)
    settings, said = None, options
    if source is not None:
        from tonnage.exports import reading

        settings, said = reading.read(source), planfile.not_defaults(options)
        options = settings.openly(said)
    job, given = request(model, offline=offline, **options)
    question = Question(
        job=job,
        plan=given,
        cluster=cluster,
        methods=_methods(compare),
        only=words(only),
        without=words(without),
        allow=words(allow),
        headroom=headroom / 100,
    )
    with progress() as say:
        if find is not None:
            from tonnage.search.backwards import backwards

            solution = backwards(find, question, top=top, torch_version=torch, progress=say)
        else:
            from tonnage.search.solve import solve

            solution = solve(question, top=top, pareto=pareto, torch_version=torch, progress=say)
        if settings is not None:
            from tonnage.exports.changes import beside

            best = solution.plans[0].candidate if solution.plans else None
            found = beside(settings, said, model, cluster, best, offline=offline, torch_version=torch, progress=say)
    if json:
        answer.print_json({**solution.to_json(), **({} if settings is None else {"given": found.to_json()})})
    else:
        from tonnage.report.plans import render

        answer.emit(render(solution, width=answer.width(), colour=answer.colour(), unicode=answer.unicode()))
        if settings is not None:
            answer.emit(found.text())
    if html is not None:
        from tonnage.files import write_text
        from tonnage.report.plans_html import page

        write_text(html, page(solution))
    if save is not None and solution.plans:
        from tonnage.files import write_text

        write_text(save, planfile.text(solution.plans[0], gpu=str(cluster), gpu_memory_bytes=gpu_memory, model=model))
    return {"found": 0, "unknown": 3}.get(solution.status, 1)


def _methods(text: str | None) -> tuple[str, ...]:
    from tonnage.job import METHODS

    return METHODS if text == "any" else words(text)
