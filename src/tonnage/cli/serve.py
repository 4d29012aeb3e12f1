"""`--task serve` of estimate, plan and export: will an inference engine start, how to serve, and what starts it."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.errors import UsageError

if TYPE_CHECKING:
    from tonnage.cluster import Cluster


def estimate_serve(
    model: str,
    options: Mapping[str, Any],
    cluster: "Cluster",
    *,
    source: str,
    engine_python: str | None,
    json: bool,
    **requests: Any,
) -> int:
    """Print the answer and return the exit code: 0 starts, 1 does not.

    `requests` are the further arguments of `ask_serving`.
    """
    from tonnage.cli import answer
    from tonnage.cli.progress import progress
    from tonnage.script.engine_start import ask_engine

    with progress(moving=False) as say:
        answered = ask_engine(
            model, options, cluster, source=source, engine_python=engine_python, progress=say, **requests
        )
    if json:
        answer.print_json(answered.to_json())
    else:
        from tonnage.report.serving import render

        answer.emit(render(answered, width=answer.width(), colour=answer.colour(), unicode=answer.unicode()))
    return 0 if answered.starts else 1


def plan_serve(
    model: str,
    options: Mapping[str, Any],
    cluster: "Cluster",
    *,
    save: Path | None,
    json: bool,
    **requests: Any,
) -> int:
    """Print the plans, write the best one if asked to, and return the exit code: 0 found, 1 none.

    `requests` are the further arguments of `ask_plans`.
    """
    from tonnage.catalog.devices import spell_cluster
    from tonnage.cli import answer
    from tonnage.serving import plan_file
    from tonnage.serving.asking import ask_plans

    solution = ask_plans(model, options, cluster, **requests)
    if json:
        answer.print_json(solution.to_json())
    else:
        from tonnage.report.serving_plans import render

        answer.emit(render(solution, width=answer.width(), colour=answer.colour(), unicode=answer.unicode()))
    if save is not None and not solution.plans:
        print(f"did not write {save}: there is no plan to save", file=sys.stderr)
    elif save is not None:
        from tonnage.files import write_text
        from tonnage.planner.plan_file import found_anywhere

        best = solution.plans[0]
        gpu, memory = spell_cluster(best.estimate.cluster)
        content = plan_file.text(
            best.settings, model=found_anywhere(model), gpu=gpu, gpu_memory_bytes=memory, remark=best.name
        )
        write_text(save, content)
        answer.say_written(save)
    return 0 if solution.plans else 1


def export_serve(plan: Path, to: str, out: Path | None, *, force: bool, json: bool, offline: bool) -> int:
    """Write what starts a saved serving plan, and return the exit code: 1 where it does not start."""
    from tonnage.catalog.devices import parse_cluster
    from tonnage.cli import answer
    from tonnage.files import make_folder, write_text
    from tonnage.serving import plan_file
    from tonnage.serving.asking import read_served
    from tonnage.serving.closed_form import estimate_serving
    from tonnage.serving.exports import export_serving

    file = plan_file.read(plan)
    cluster = parse_cluster(file.gpu, gpu_memory_bytes=file.gpu_memory_bytes)
    estimate = estimate_serving(read_served(file.model, file.settings, offline=offline), file.settings, cluster)
    exported = export_serving(to, estimate)
    if not estimate.starts:
        message = f"{to}: the engine would not start: {estimate.serving.error}"
        if json:
            answer.print_json({"schema_version": 1, "target": to, "files": [], "error": message})
        else:
            answer.emit(message + "\n")
        return 1
    folder = out if out is not None else Path(to)
    existing = [name for name, _ in exported.files if (folder / name).exists()]
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a folder with --out.")
    if existing and not force:
        raise UsageError(f"{folder} has {', '.join(existing)} already; name another with --out, or add --force.")
    make_folder(folder)
    for name, content in exported.files:
        write_text(folder / name, content)
    names = [name for name, _ in exported.files]
    if json:
        document = {"schema_version": 1, "target": to, "files": names, "folder": str(folder)}
        answer.print_json({**document, "command": exported.command, "notes": list(exported.notes)})
    else:
        lines = [f"{folder}: {', '.join(names)}", f"To serve, run in this folder:\n  {exported.command}"]
        answer.emit("\n".join([*lines, *exported.notes]) + "\n")
    return 0


def join_lengths(options: dict[str, Any]) -> str | None:
    """Return the lengths of requests as one text, taken out of the options of training, which list them."""
    listed = options.pop("lengths", None)
    return None if listed is None else ",".join(listed)
