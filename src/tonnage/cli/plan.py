"""`tonnage plan MODEL`: find the fastest plan that fits and say why.

`tonnage plan -- COMMAND` says which settings of a training script to change.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tonnage.cli import script_options
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
    Price,
    Samples,
    Tokens,
    TorchVersion,
    count,
    parse_cluster_options,
    words,
)
from tonnage.cli.serving_options import Task, take_serving, with_both_tasks
from tonnage.errors import UsageError
from tonnage.plans import HEADROOM

if TYPE_CHECKING:
    from tonnage.cluster import Cluster
    from tonnage.estimates.training import TrainingGoal
    from tonnage.planner.settings_file import FileComparison
    from tonnage.planner.solution import Solution
    from tonnage.script.planning import Asked

TIMEOUT_SECONDS = 900
"""Default time limit of each run of a script."""

Words = list[str] | None
"""The type of an option that may be given several times."""


def _option(name: str, text: str, metavar: str) -> Any:
    return typer.Option(f"--{name}", help=text, metavar=metavar)


@with_both_tasks
def plan(
    model_or_command: ModelOrCommand,
    gpu: Gpu = None,
    here: Here = False,
    gpus: Gpus = None,
    gpu_memory: GpuMemory = None,
    host_memory: HostMemory = None,
    only: Annotated[
        Words,
        _option(
            "only",
            "Let the search choose only these options, the others stay as given: shard,checkpointing.",
            "NAMES",
        ),
    ] = None,
    without: Annotated[
        Words,
        _option(
            "without", "Do not let the search change these options or use these values: tp,shard=zero2.", "NAMES"
        ),
    ] = None,
    allow: Annotated[
        Words,
        _option(
            "allow",
            "Let the search also use values that change the mathematics of training (optimizer,precision), or "
            "activation budgets, which no exported trainer can run (budget).",
            "NAMES",
        ),
    ] = None,
    headroom: Annotated[float, _option("headroom", "Percent of the memory of each GPU to leave free.", "N")] = 100
    * HEADROOM,
    find: Annotated[
        str | None,
        _option(
            "find",
            "Find a limit instead: the longest sequence (max-seq-len) or largest micro-batch (max-micro-batch) that "
            "fits, the fewest GPUs (min-gpus) or the smallest GPU (min-gpu) for the job. With --task serve: max-len, "
            "max-concurrency, min-gpu, min-gpus or quantization.",
            "WORD",
        ),
    ] = None,
    top: Annotated[
        int, typer.Option("--top", help="Number of plans to show: the best one and alternatives.", metavar="N", min=1)
    ] = 4,
    pareto: Annotated[
        bool,
        typer.Option(
            "--pareto",
            help="Also show the Pareto-optimal plans: those that no other plan beats in both memory and speed.",
        ),
    ] = False,
    timeout: Annotated[
        int | None,
        count(
            "--timeout",
            f"Stop each run of a script (-- COMMAND) after this many seconds. Default: {TIMEOUT_SECONDS}.",
        ),
    ] = None,
    tokens: Tokens = None,
    samples: Samples = None,
    price: Price = None,
    torch: TorchVersion = None,
    offline: Offline = False,
    json: Json = False,
    html: Html = None,
    save: Annotated[
        Path | None,
        _option("save", "Write the best plan to this file (plan.toml), to edit, estimate or export.", "FILE"),
    ] = None,
    settings: Annotated[
        Path | None,
        _option(
            "from",
            "Start from the settings file of a trainer (ds_config.json, accelerate.yaml, ...) and say what to change "
            "in it.",
            "FILE",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Let --save and --html replace existing files.")] = False,
    task: Task = "train",
    **options: Any,
) -> int:
    """Find the fastest combination of techniques that fits; every plan shown was run on a ghost GPU.

    Options that you give are kept, the search chooses the others; --method any (or full,lora) compares methods.

    Example: tonnage plan llama-3.1-70b --gpu 4x8xh100-80gb --seq-len 8192 --global-batch-tokens 4M --save plan.toml
    """
    from tonnage.files import check_outputs, check_replaceable
    from tonnage.serving.tasks import check_task

    serving = take_serving(options)
    others: dict[str, Any] = {
        "only": only,
        "without": without,
        "allow": allow,
        "from": settings,
        "timeout": timeout,
        "torch": torch,
    }
    others |= {"host_memory": host_memory, "headroom": None if headroom == 100 * HEADROOM else headroom}
    goal = {"tokens": tokens, "samples": samples, "pareto": pareto, "html": html}
    check_task(task, serving, {**others, **goal, **options})
    from tonnage.planner.limits import check_cards, initial_card

    if task == "serve":
        from tonnage.cli.serve import join_lengths, plan_serve

        check_outputs(save)
        check_replaceable(save, force=force)
        if len(model_or_command) > 1:
            raise UsageError("--task serve takes one MODEL, not a command.")
        cards = parse_cluster_options(initial_card(find, gpu), gpus, gpu_memory, here, host_memory=host_memory)
        check_cards(find, cards, gpu=gpu, gpus=gpus, gpu_memory=gpu_memory, here=here)
        lengths, concurrency = join_lengths(options), serving.pop("concurrency", None)
        return plan_serve(
            model_or_command[0],
            {**serving, **options},
            cards,
            lengths=lengths,
            concurrency=concurrency,
            find=find,
            top=top,
            price=price,
            save=save,
            json=json,
            offline=offline,
        )
    from tonnage.estimates.training import TrainingGoal

    outputs = _Outputs(
        json=json, html=html, save=save, goal=TrainingGoal(tokens=tokens, samples=samples, price=price)
    )
    check_outputs(save, html)
    check_replaceable(save, html, force=force)
    card = gpu if here else initial_card(find, gpu)
    cluster = parse_cluster_options(card, gpus, gpu_memory, here, model_or_command, host_memory=host_memory)
    limits: dict[str, Any] = {
        **{"only": words(only), "without": words(without), "allow": words(allow)},
        "headroom": headroom / 100,
    }
    if script_options.is_command(model_or_command, "plan --gpu t4"):
        refused = {"tokens": tokens, "samples": samples, "price": price}
        _refuse_for_script({"find": find, "from": settings, "save": save, "pareto": pareto, **refused})
        from tonnage.script.planning import Asked, check_options

        asked = Asked(
            command=model_or_command,
            cluster=cluster,
            stated=check_options(options, cluster),
            **limits,
            timeout_seconds=float(TIMEOUT_SECONDS if timeout is None else timeout),
            torch_version=torch,
        )
        return _plan_script(asked, json=json, html=html)
    if timeout is not None:
        raise UsageError(f"--timeout {timeout} is for a script: it limits each run of it. {_LEAVE_OUT}")
    check_cards(find, cluster, gpu=gpu, gpus=gpus, gpu_memory=gpu_memory, here=here)
    how = {"top": top, "pareto": pareto, "torch_version": torch}
    return _plan_model(model_or_command[0], cluster, options, limits, settings, find, how, outputs, offline=offline)


@dataclass(frozen=True, kw_only=True)
class _Outputs:
    """Where to write the answer."""

    json: bool
    html: Path | None
    save: Path | None
    goal: "TrainingGoal"

    def deliver(self, solution: "Solution", comparison: "FileComparison | None", model: str) -> int:
        """Print the solution, with what it changes in a trainer's file, write the files, and return the exit code."""
        from tonnage.cli import answer
        from tonnage.files import write_text
        from tonnage.planner import plan_file

        solution = solution.with_training(self.goal)
        if self.json:
            answer.print_json(
                {**solution.to_json(), **({} if comparison is None else {"given": comparison.to_json()})}
            )
        else:
            from tonnage.report.plans import render

            shown = render(solution, width=answer.width(), colour=answer.colour(), unicode=answer.unicode())
            answer.emit(shown, colours=True)
            if comparison is not None:
                answer.emit(comparison.text())
        if self.html is not None:
            from tonnage.report.plans_html import page

            write_text(self.html, page(solution))
            answer.say_written(self.html)
        if self.save is not None and not solution.plans:
            print(f"did not write {self.save}: there is no plan to save", file=sys.stderr)
        elif self.save is not None:
            names = ("gpu", "gpu_memory_bytes", "host_memory_bytes")  # with --find, the answer
            gpus: dict[str, Any] = {name: solution.question.get(name) for name in names}
            model = plan_file.found_anywhere(model)
            write_text(self.save, plan_file.text(solution.plans[0], **gpus, model=model))
            answer.say_written(self.save)
        return {"found": 0, "unknown": 3}.get(solution.status, 1)


def _plan_model(
    model: str,
    cluster: "Cluster",
    stated: dict[str, Any],
    limits: dict[str, Any],
    settings_file: Path | None,
    find: str | None,
    how: dict[str, Any],
    outputs: _Outputs,
    *,
    offline: bool,
) -> int:
    """Search for plans, starting from the settings file of a trainer if there is one, and return the exit code."""
    from tonnage.catalog.devices import parse_cluster
    from tonnage.cli.progress import progress
    from tonnage.planner import ask

    settings, options = None, stated
    if settings_file is not None:
        from tonnage.planner.settings_file import wordless
        from tonnage.trainers import reading

        settings = reading.read(settings_file).on(cluster.gpus)
        options = settings.openly(stated)
        limits = {**limits, "without": limits["without"] + wordless(settings)}
    question = ask.ask(model, cluster, options, stated=stated, find=find, offline=offline, **limits)
    comparison = None
    with progress() as say:
        solution = ask.answer(question, find, **how, progress=say)
        cluster = question.cluster
        if find is not None:  # the GPUs may be the answer
            name, *memory = map(solution.question.get, ("gpu", "gpu_memory_bytes", "host_memory_bytes"))
            cluster = parse_cluster(name, gpu_memory_bytes=memory[0], host_memory_bytes=memory[1])
        if settings is not None:
            from tonnage.planner.settings_file import beside

            best = solution.plans[0].candidate if solution.plans else None
            torch = how["torch_version"]
            comparison = beside(
                settings, stated, model, cluster, best, offline=offline, torch_version=torch, progress=say
            )
    return outputs.deliver(solution, comparison, model)


_LEAVE_OUT = "Leave it out."


def _refuse_for_script(given: dict[str, Any]) -> None:
    """Raise UsageError for an option that has no meaning for a script."""
    for name, value in given.items():
        if value:
            raise UsageError(f"--{name} is for a MODEL; a script is run as it is. {_LEAVE_OUT}")


def _plan_script(asked: "Asked", *, json: bool, html: Path | None) -> int:
    """Advise which settings of a script to change, write the page if one is wanted, and return the exit code."""
    from tonnage.cli import answer
    from tonnage.cli.progress import progress
    from tonnage.script.planning import plan_script

    with progress(moving=False) as say:
        script_plan = plan_script(asked, say)
    if json:
        answer.print_json(script_plan.to_json())
    else:
        from tonnage.report.script import render

        shown = render(script_plan, width=answer.width(), colour=answer.colour(), unicode=answer.unicode())
        answer.emit(shown, colours=True)
    if html is not None:
        from tonnage.files import write_text
        from tonnage.report.script_html import page

        write_text(html, page(script_plan))
        answer.say_written(html)
    return {"found": 0, "unknown": 3}.get(script_plan.status, 1)
