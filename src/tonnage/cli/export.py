"""`tonnage export plan.toml --to TARGET`: write a plan as the configuration files of a trainer."""

import shlex
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tonnage.cli.options import Json, Offline, beginning, in_panels
from tonnage.errors import UnwritableFile, UsageError

if TYPE_CHECKING:
    from tonnage.trainers.reread import Checked
    from tonnage.trainers.target import Export, File


def _target_names(incomplete: str) -> list[str]:
    from tonnage.trainers.targets import TARGETS

    return beginning((known.name for known in TARGETS), incomplete)


@in_panels
def export(
    plan: Annotated[Path, typer.Argument(help="A plan.toml, as `tonnage plan` saves it.", metavar="PLAN")],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="The trainer to write for: hf-trainer, trl, accelerate, deepspeed, torchrun, torchtitan, axolotl, "
            "llama-factory or megatron-bridge; for a serving plan vllm, sglang, compose or kubernetes.",
            metavar="TARGET",
            autocompletion=_target_names,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder to write to. Default: one named after the target."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Write nothing if the target has no setting for a part of the plan. Default: write the nearest "
            "setting and list it.",
        ),
    ] = False,
    no_check: Annotated[
        bool,
        typer.Option(
            "--no-check",
            help="Write the nearest settings without estimating them under the trainer first: they may not fit.",
        ),
    ] = False,
    offline: Offline = False,
    json: Json = False,
) -> int:
    """Write a plan as configuration files of your trainer that fit and that its own code reads as meant.

    Example: tonnage export plan.toml --to hf-trainer --out run
    """
    from tonnage.catalog.devices import parse_cluster
    from tonnage.cli import answer
    from tonnage.cli.progress import progress
    from tonnage.planner import exporting, plan_file
    from tonnage.serving.plan_file import is_serve_file
    from tonnage.trainers import cases, reread, targets
    from tonnage.trainers.target import File

    if is_serve_file(plan):
        from tonnage.cli.serve import export_serve

        return export_serve(plan, to, out, force=force, json=json, offline=offline)
    file = plan_file.read(plan)  # before the target: a file that is missing may be a serving plan
    target = targets.find_target(to)
    cluster = parse_cluster(
        file.gpu, gpu_memory_bytes=file.gpu_memory_bytes, host_memory_bytes=file.host_memory_bytes
    )
    case = cases.make_case(file.model, cluster, file.options, stated={}, offline=offline)
    folder = out if out is not None else Path(to)
    _check_folder(folder, (File(name=exporting.FILE, text=""),), force)  # before what takes seconds
    with progress() as say:
        prepared = exporting.prepare(
            case, file.model, target, strict=strict, check=not no_check, offline=offline, progress=say
        )
        exported = prepared.export
        if exported is not None:
            _check_folder(folder, exported.files, force)
            say(f"reading the files back as {to} does")
            checked = reread.check(exported, target)
    if exported is None:
        if json:
            answer.print_json({"schema_version": 1, "target": to, "files": [], **prepared.to_json()})
        else:
            answer.emit(f"{to}: {prepared.checked}\n")
        return 1
    _write_files(folder, exported.files)
    if json:
        document = {**exported.to_json(), **prepared.to_json(), "folder": str(folder), "read_back": str(checked)}
        answer.print_json(document)
    else:
        answer.emit(_render_text(exported, folder, checked, prepared.checked))
    return 0


def _check_folder(folder: Path, files: "tuple[File, ...]", force: bool) -> None:
    """Raise UsageError if a file is in the way, UnwritableFile if a folder stands where a file must be written."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a folder with --out.")
    existing = [item.name for item in files if (folder / item.name).exists()]
    if existing and not force:
        raise UsageError(
            f"{folder} has {', '.join(existing)} already; name another folder with --out, or add --force."
        )
    folders = [name for name in existing if (folder / name).is_dir()]
    if folders:
        raise UnwritableFile(
            f"{folder / folders[0]} is a folder, and a file of this name must be written; remove it."
        )


def _write_files(folder: Path, files: "tuple[File, ...]") -> None:
    """Write all files or none: they are moved into place after the last one has been written."""
    from tonnage.files import make_folder, open_replacing

    is_new = not folder.exists()
    make_folder(folder)
    try:
        with ExitStack() as stack:
            for item in files:
                stack.enter_context(open_replacing(folder / item.name)).write(item.text.encode("utf-8"))
    except UnwritableFile:
        if is_new:
            with suppress(OSError):
                folder.rmdir()
        raise


def _render_text(exported: "Export", folder: Path, checked: "Checked", estimated: str) -> str:
    """Return what `tonnage export` prints: the files, what they need, how they were read back, the command to run."""
    from tonnage.planner import exporting

    read_back = str(checked)
    lines = [
        f"{folder}: {', '.join(item.name for item in exported.files)}",
        estimated,
        read_back[0].upper() + read_back[1:] + ".",
        "",
        "To train, run in this folder:",
        f"  {exported.command}",
    ]
    if any(item.name == exporting.FILE for item in exported.files):
        lines += [
            "",
            "To estimate it again:",
            f"  tonnage estimate --plan {shlex.quote(str(folder / exporting.FILE))}",
        ]
    if exported.unexpressed:
        lines += ["", "Different from the plan:"]
        lines += [
            f"  {item.option}={item.value}: {item.why}; written: {item.option}={item.instead}"
            for item in exported.unexpressed
        ]
    if exported.notes:
        lines += ["", "Notes:", *(f"  {note}" for note in exported.notes)]
    return "\n".join(lines) + "\n"
