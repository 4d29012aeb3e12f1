"""`tonnage export plan.toml --to TARGET`: a plan in the words of the trainer that one uses."""

from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tonnage.cli.options import Json, Offline, beginning, in_panels
from tonnage.errors import UnwritableFile, UsageError

if TYPE_CHECKING:
    from tonnage.trainers.export import Export, File
    from tonnage.trainers.reread import Checked


def _targets(incomplete: str) -> list[str]:
    from tonnage.trainers.export import TARGETS

    return beginning((known.name for known in TARGETS), incomplete)


@in_panels
def export(
    plan: Annotated[Path, typer.Argument(help="A plan.toml that `tonnage plan` has saved.", metavar="PLAN")],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="hf-trainer, trl, accelerate, deepspeed, torchrun, torchtitan, axolotl, llama-factory or "
            "megatron-bridge.",
            metavar="TARGET",
            autocompletion=_targets,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder to write. Default: one named after the target."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Write nothing if the target has no setting for a part of the plan."),
    ] = False,
    offline: Offline = False,
    json: Json = False,
) -> int:
    """Write a plan as configuration files of your trainer, and check that its own code reads them as meant."""
    from tonnage.catalog.devices import parse_cluster
    from tonnage.cli import answer
    from tonnage.cli.progress import progress
    from tonnage.planner import plan_file as planfile
    from tonnage.trainers import cases, reread
    from tonnage.trainers import export as exports

    target = exports.target(to)
    kept = planfile.read(plan)
    cluster = parse_cluster(kept.gpu, gpus=None, gpu_memory_bytes=kept.gpu_memory_bytes)
    case = cases.ask(kept.model, cluster, kept.options, said={}, offline=offline)
    with progress() as say:
        say("making the files")
        made = exports.export(case, kept.model, target)
    if strict and made.unexpressed:
        listed = "; ".join(f"{item.option}={item.value} ({item.why})" for item in made.unexpressed)
        raise UsageError(f"{to} cannot express {listed}. Nothing was written.")
    folder = out if out is not None else Path(to)
    _check_place(folder, made.files, force)
    with progress() as say:
        say(f"reading it back as {to} does")
        checked = reread.check(made, target)
    _write(folder, made.files)
    if json:
        document = {**made.to_json(), "folder": str(folder), "read_back": str(checked)}
        answer.print_json(document)
    else:
        answer.emit(_text(made, folder, checked))
    return 0


def _check_place(folder: Path, files: "tuple[File, ...]", force: bool) -> None:
    """Raises UsageError where something is in the way, UnwritableFile where nothing can be written."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a folder with --out.")
    there = [item.name for item in files if (folder / item.name).exists()]
    if there and not force:
        raise UsageError(f"{folder} has {', '.join(there)} already; name another folder with --out, or add --force.")
    if any((folder / name).is_dir() for name in there):
        raise UnwritableFile(f"{folder} cannot be written: it has a folder where a file is to be.")


def _write(folder: Path, files: "tuple[File, ...]") -> None:
    """All files or none: they are moved into place when the last one has been written."""
    from tonnage.files import replacing

    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnwritableFile(f"The folder {folder} cannot be made ({error.strerror or error}).") from error
    try:
        with ExitStack() as stack:
            for item in files:
                stack.enter_context(replacing(folder / item.name)).write(item.text.encode("utf-8"))
    except UnwritableFile:
        if made:
            with suppress(OSError):
                folder.rmdir()
        raise


def _text(made: "Export", folder: Path, checked: "Checked") -> str:
    said = str(checked)
    lines = [
        f"{folder}: {', '.join(item.name for item in made.files)}",
        said[0].upper() + said[1:] + ".",
        "",
        "Start it there with",
        f"  {made.command}",
    ]
    if made.unexpressed:
        lines += ["", f"Not expressed by {made.target}:"]
        lines += [
            f"  {item.option}={item.value}: {item.why}; written: {item.option}={item.instead}"
            for item in made.unexpressed
        ]
    if made.notes:
        lines += ["", "Notes:", *(f"  {note}" for note in made.notes)]
    return "\n".join(lines) + "\n"
