"""`tonnage plan MODEL`: the fastest combination that fits, and why; `tonnage plan -- COMMAND`: for a script."""

import os
import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tonnage.cli.options import (
    Gpu,
    GpuMemory,
    Gpus,
    Here,
    HostMemory,
    Html,
    Json,
    ModelOrCommand,
    Offline,
    TorchVersion,
    cluster_of,
    count,
    with_request,
    words,
)
from tonnage.errors import UsageError
from tonnage.options import spelled
from tonnage.plans import HEADROOM

if TYPE_CHECKING:
    from tonnage.cluster import Cluster
    from tonnage.planner.changes import Beside
    from tonnage.planner.solution import Solution
    from tonnage.script.advice import Asked

TIMEOUT_SECONDS = 900

Words = list[str] | None
"""Of an option that may be given several times."""


def _option(name: str, text: str, metavar: str) -> Any:
    return typer.Option(f"--{name}", help=text, metavar=metavar)


@with_request
def plan(
    model_or_command: ModelOrCommand,
    gpu: Gpu = None,
    here: Here = False,
    gpus: Gpus = None,
    gpu_memory: GpuMemory = None,
    host_memory: HostMemory = None,
    only: Annotated[
        Words, _option("only", "Let the search choose only these options: shard,checkpointing.", "NAMES")
    ] = None,
    without: Annotated[
        Words,
        _option("without", "Keep the search from these options or values: tp,param-offload,shard=zero2.", "NAMES"),
    ] = None,
    allow: Annotated[
        Words,
        _option(
            "allow",
            "Also choose values that change the mathematics (optimizer,precision), or activation budgets, which no "
            "exported trainer can run (budget).",
            "NAMES",
        ),
    ] = None,
    headroom: Annotated[float, _option("headroom", "Percent of each GPU's memory to leave free.", "N")] = 100
    * HEADROOM,
    find: Annotated[
        str | None,
        _option("find", "Find a limit instead of a plan: max-seq-len, max-micro-batch, min-gpus or min-gpu.", "WORD"),
    ] = None,
    top: Annotated[int, typer.Option("--top", help="Number of plans to show.", metavar="N", min=1)] = 4,
    pareto: Annotated[
        bool,
        typer.Option(
            "--pareto",
            help="Also show the Pareto-optimal plans: those that no other plan beats in both memory and speed.",
        ),
    ] = False,
    timeout: Annotated[
        int | None,
        count("--timeout", f"Stop each run of a script after this many seconds. Default: {TIMEOUT_SECONDS}."),
    ] = None,
    torch: TorchVersion = None,
    offline: Offline = False,
    json: Json = False,
    html: Html = None,
    save: Annotated[
        Path | None, _option("save", "Write the best plan to this plan.toml, to edit, estimate or export.", "FILE")
    ] = None,
    settings: Annotated[
        Path | None,
        _option(
            "from",
            "Read a trainer's settings (ds_config.json, accelerate.yaml, ...) and say what to change in them.",
            "FILE",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Let --save and --html replace existing files.")] = False,
    **options: Any,
) -> int:
    """Find the fastest combination of techniques that fits; every plan shown was run on a ghost GPU.

    --method any (or full,lora) compares methods.
    """
    from tonnage.files import check_free, check_places
    from tonnage.planner.limits import check_cards, initial_card

    outputs = _Outputs(json=json, html=html, save=save)
    check_places(save, html)
    check_free(save, html, force=force)
    cluster = cluster_of(gpu if here else initial_card(find, gpu), gpus, gpu_memory, here, model_or_command)
    limits: dict[str, Any] = {
        **{"only": words(only), "without": words(without), "allow": words(allow)},
        "headroom": headroom / 100,
    }
    if _is_command(model_or_command):
        _refuse(
            {"find": find, "from": settings, "save": save, "html": html, "pareto": pareto, "host-memory": host_memory}
        )
        from tonnage.script.advice import Asked

        asked = Asked(
            command=model_or_command,
            cluster=cluster,
            said=_of_plan_alone(options, cluster),
            **limits,
            timeout_seconds=float(TIMEOUT_SECONDS if timeout is None else timeout),
            torch_version=torch,
        )
        return _of_script(asked, json=json)
    if timeout is not None:
        raise UsageError(f"--timeout {timeout} is for a script, each run of which it ends; a MODEL has none. {_OUT}")
    check_cards(find, cluster, gpu=gpu, gpus=gpus, gpu_memory=gpu_memory, here=here)
    if here and host_memory is None:
        from tonnage.catalog import machine

        host_memory = machine.memory_bytes()
    limits["host_memory_bytes"] = host_memory
    how = {"top": top, "pareto": pareto, "torch_version": torch}
    return _of_model(model_or_command[0], cluster, options, limits, settings, find, how, outputs, offline=offline)


@dataclass(frozen=True, kw_only=True)
class _Outputs:
    """Where the answer goes."""

    json: bool
    html: Path | None
    save: Path | None

    def deliver(self, solution: "Solution", beside: "Beside | None", model: str) -> int:
        """Print it, write the files, and give the exit code.  `beside`: what it changes in a trainer's file."""
        from tonnage.cli import answer
        from tonnage.files import write_text
        from tonnage.planner import plan_file as planfile

        if self.json:
            answer.print_json({**solution.to_json(), **({} if beside is None else {"given": beside.to_json()})})
        else:
            from tonnage.report.plans import render

            answer.emit(render(solution, width=answer.width(), colour=answer.colour(), unicode=answer.unicode()))
            if beside is not None:
                answer.emit(beside.text())
        if self.html is not None:
            from tonnage.report.plans_html import page

            write_text(self.html, page(solution))
        if self.save is not None and solution.plans:
            cards = {name: solution.question[name] for name in ("gpu", "gpu_memory_bytes")}  # those that were found
            model = planfile.found_anywhere(model)
            write_text(self.save, planfile.text(solution.plans[0], **cards, model=model))
        return {"found": 0, "unknown": 3}.get(solution.status, 1)


def _of_model(
    model: str,
    cluster: "Cluster",
    said: dict[str, Any],
    limits: dict[str, Any],
    source: Path | None,
    find: str | None,
    how: dict[str, Any],
    outputs: _Outputs,
    *,
    offline: bool,
) -> int:
    """Search, from what a trainer's file says if there is one, and say what to change in that."""
    from tonnage.catalog.devices import parse_cluster
    from tonnage.cli.progress import progress
    from tonnage.planner import ask

    settings, options = None, said
    if source is not None:
        from tonnage.planner.changes import wordless
        from tonnage.trainers import reading

        settings = reading.read(source).on(cluster.gpus)
        options = settings.openly(said)
        limits = {**limits, "without": limits["without"] + wordless(settings)}
    asked = ask.ask(model, cluster, options, said=said, find=find, offline=offline, **limits)
    found = None
    with progress() as say:
        solution = ask.answer(asked, find, **how, progress=say)
        cards = asked.cluster
        if find is not None:  # the cards that were found
            name, memory_bytes = (solution.question[key] for key in ("gpu", "gpu_memory_bytes"))
            cards = parse_cluster(name, gpu_memory_bytes=memory_bytes)
        if settings is not None:
            from tonnage.planner.changes import beside

            best = solution.plans[0].candidate if solution.plans else None
            torch = how["torch_version"]
            found = beside(settings, said, model, cards, best, offline=offline, torch_version=torch, progress=say)
    return outputs.deliver(solution, found, model)


def _is_command(given: list[str]) -> bool:
    """A command has several words, or is a program in a file; a model is one word.  Raises UsageError for neither."""
    if len(given) == 1:
        return "/" in given[0] and Path(given[0]).is_file() and os.access(given[0], os.X_OK)
    if shutil.which(given[0]) is None and not Path(given[0]).is_file():
        raise UsageError(
            f"{given[0]!r} is no command that is found on PATH; give one MODEL, or a command after two dashes: "
            "tonnage plan --gpu t4 -- python train.py"
        )
    return True


_OUT = "Leave it out."


def _refuse(given: dict[str, Any]) -> None:
    """Options that say nothing about a script."""
    for name, value in given.items():
        if value:
            raise UsageError(f"--{name} is for a MODEL; a script is run as it is. {_OUT}")


def _of_plan_alone(said: dict[str, Any], cluster: "Cluster") -> dict[str, Any]:
    """What was said, of Plan.  Raises UsageError for what cannot be, and for what the script itself says."""
    from tonnage.case import check_idle
    from tonnage.plans import Plan

    of_plan = {item.name for item in fields(Plan)} - {"engine"}
    for name in said:
        if name not in of_plan:
            raise UsageError(f"--{spelled(name)} is what the script itself says; change it there.")
    check_idle(said, Plan(**said), cluster.gpus, lambda name: name not in said)
    return said


def _of_script(asked: "Asked", *, json: bool) -> int:
    from tonnage.cli import answer
    from tonnage.cli.progress import progress
    from tonnage.script.advice import advise

    with progress(moving=False) as say:
        found = advise(asked, say)
    if json:
        answer.print_json(found.to_json())
    else:
        from tonnage.report.script import render

        answer.emit(render(found, width=answer.width(), colour=answer.colour(), unicode=answer.unicode()))
    return {"found": 0, "unknown": 3}.get(found.status, 1)
