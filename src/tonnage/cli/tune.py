"""`tonnage tune MODEL|PLAN`: try the best plans on this machine, and keep the fastest that holds."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tonnage.cli.options import Gpu, Gpus, Json, Offline, with_request

OUT_OF_MEMORY, FAILED = 4, 5


def _option(name: str, text: str, metavar: str = "N") -> Any:
    return typer.Option(f"--{name}", help=text, metavar=metavar)


@with_request
def tune(
    model_or_plan: Annotated[
        str, typer.Argument(help="A model, named as in `tonnage estimate`, or a plan.toml.", metavar="MODEL|PLAN")
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
    micro-batch grows while the global batch stays.  What is measured corrects later estimates.

    Example: tonnage tune llama-3.2-1b --global-batch-tokens 64k --out tuned --save plan.toml
    """
    from tonnage.cli import answer
    from tonnage.cli.progress import progress
    from tonnage.files import check_outputs, write_text
    from tonnage.report.tuning import render
    from tonnage.tuning.here import tune_here

    check_outputs(save)
    with progress() as say:
        tuned = tune_here(
            model_or_plan,
            options,
            out=out,
            gpu=gpu,
            gpus=gpus,
            trials=trials,
            steps=steps,
            timeout_seconds=float(timeout),
            forget=forget,
            offline=offline,
            progress=say,
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
