"""`tonnage tune MODEL|PLAN`, `tonnage tune -- COMMAND`: try the best plans on this machine, and keep the fastest."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tonnage.cli import script_options
from tonnage.cli.options import Gpu, Gpus, Json, Offline, with_request
from tonnage.errors import UsageError

if TYPE_CHECKING:
    from tonnage.tuning.decisions import Tuned

OUT_OF_MEMORY, FAILED = 4, 5


def _option(name: str, text: str, metavar: str = "N") -> Any:
    return typer.Option(f"--{name}", help=text, metavar=metavar)


@with_request
def tune(
    model_or_command: Annotated[
        list[str],
        typer.Argument(
            help="A model, named as in `tonnage estimate`; a plan.toml; or your own training command after two "
            "dashes: -- python train.py ...",
            metavar="MODEL | PLAN | -- COMMAND...",
        ),
    ],
    out: Annotated[
        Path,
        _option("out", "Folder for the trials; a second run with the same folder continues where it was.", "DIR"),
    ],
    gpu: Gpu = None,
    gpus: Gpus = None,
    trials: Annotated[int, typer.Option("--trials", help="Most trials.", metavar="N", min=1)] = 12,
    steps: Annotated[
        int,
        typer.Option(
            "--steps", help="Most timed steps of a trial; it ends when they are steady.", metavar="N", min=1
        ),
    ] = 20,
    timeout: Annotated[
        int, typer.Option("--timeout", help="Seconds after which a trial has failed.", metavar="N", min=1)
    ] = 900,
    forget: Annotated[
        bool, typer.Option("--forget", help="First forget what earlier trials of this model measured on this GPU.")
    ] = False,
    save: Annotated[Path | None, _option("save", "Write the fastest plan to this file.", "FILE")] = None,
    offline: Offline = False,
    json: Json = False,
    **options: Any,
) -> int:
    """Try plans on this machine's devices, each in fresh processes with full batches, an evaluation and a save.

    The fastest predicted plans are tried first.  If memory runs out, techniques that save memory are added; else the
    micro-batch grows while the global batch stays.  A script of yours gets settings by its own flags, or by what is
    put into the objects that it makes.  What is measured corrects later estimates.

    Example: tonnage tune llama-3.2-1b --global-batch-tokens 64k --out tuned --save plan.toml
    """
    from tonnage.cli import answer
    from tonnage.cli.progress import progress
    from tonnage.files import check_outputs, write_text
    from tonnage.report.tuning import render

    check_outputs(save)
    is_script = script_options.is_command(model_or_command, "tune --out tuned")
    with progress(moving=not is_script) as say:
        how: dict[str, Any] = {"out": out, "trials": trials, "steps": steps, "forget": forget, "progress": say}
        if is_script:
            if save is not None:
                raise UsageError(f"--save {save} is for a plan; a script is run as it is. Leave it out.")
            tuned = _tune_script(model_or_command, options, gpu, gpus, float(timeout), how)
        else:
            from tonnage.tuning.here import tune_here

            tuned = tune_here(
                model_or_command[0],
                options,
                gpu=gpu,
                gpus=gpus,
                timeout_seconds=float(timeout),
                offline=offline,
                **how,
            )
    if json:
        answer.print_json(tuned.to_json())
    else:
        answer.emit(render(tuned, unicode=answer.unicode()))
    if tuned.best is None:
        is_full = any(trial.outcome.ended == "out_of_memory" for trial in tuned.trials)
        return OUT_OF_MEMORY if is_full else FAILED
    if save is not None:
        write_text(save, tuned.plan_text())
        answer.say_written(save)
    return 0


def _tune_script(
    command: list[str],
    options: dict[str, Any],
    gpu: str | None,
    gpus: int | None,
    timeout_seconds: float,
    how: dict[str, Any],
) -> "Tuned":
    """Return the trials of a script."""
    from tonnage.script.planning import Asked, check_options
    from tonnage.tuning.here import check_hardware
    from tonnage.tuning.scripts import tune_script

    cluster = check_hardware(gpu, gpus)
    stated = check_options(options, cluster)
    asked = Asked(command=command, cluster=cluster, stated=stated, timeout_seconds=timeout_seconds)
    return tune_script(asked, **how)
