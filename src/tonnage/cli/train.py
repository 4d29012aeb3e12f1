"""`tonnage train PLAN`: train a model by a plan, from files of text to a folder that transformers loads."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tonnage.cli.options import Json, in_panels
from tonnage.units import pluralise

if TYPE_CHECKING:
    from tonnage.train.run import Outcome

INTERRUPTED = 130


def _option(name: str, text: str, metavar: str = "N") -> Any:
    return typer.Option(f"--{name}", help=text, metavar=metavar)


@in_panels
def train(
    plan: Annotated[Path, typer.Argument(help="A plan.toml, as `tonnage plan` saves it.", metavar="PLAN")],
    model: Annotated[
        str,
        _option(
            "model", "A model's folder, whose weights are trained; or a config.json: random weights.", "DIR|CONFIG"
        ),
    ],
    data: Annotated[
        Path,
        _option(
            "data",
            'A .txt file, a .jsonl file with {"text": ...} or {"messages": [...]} a line, or a folder of them.',
            "FILE|DIR",
        ),
    ],
    out: Annotated[Path, _option("out", "Folder of the run: metrics.jsonl, checkpoints, final.", "DIR")],
    max_steps: Annotated[int | None, _option("max-steps", "Steps of the run. Default: those of the epochs.")] = None,
    epochs: Annotated[
        float | None, _option("epochs", "Times that the data is read. Default: 1, or as --max-steps needs.", "X")
    ] = None,
    lr: Annotated[
        float | None,
        _option(
            "lr", "Largest learning rate. Default: 3e-4 for random weights, 2e-5 for given ones, 2e-4 for LoRA.", "X"
        ),
    ] = None,
    schedule: Annotated[
        str,
        _option(
            "schedule",
            "Learning rate after the warm-up: cosine (down to a tenth), wsd (stable, then down to zero) or constant.",
            "WORD",
        ),
    ] = "cosine",
    warmup_steps: Annotated[
        int | None, _option("warmup-steps", "Steps in which the learning rate grows. Default: 3 % of all.")
    ] = None,
    decay_steps: Annotated[
        int | None, _option("decay-steps", "Last steps, in which wsd lowers the rate. Default: 10 % of all.")
    ] = None,
    weight_decay: Annotated[
        float | None, _option("weight-decay", "Weight decay. Default: the optimizer's own.", "X")
    ] = None,
    seed: Annotated[int, _option("seed", "Decides random weights, the order of the data, and dropout.")] = 0,
    tokenizer: Annotated[
        Path | None,
        _option("tokenizer", "Folder of the tokenizer. Default: the model's; without one, bytes are tokens.", "DIR"),
    ] = None,
    eval_every: Annotated[int | None, _option("eval-every", "Evaluate after each N steps.")] = None,
    eval_data: Annotated[
        Path | None,
        _option("eval-data", "Data to evaluate on, as --data. Default: a share of the data is held out.", "FILE|DIR"),
    ] = None,
    eval_share: Annotated[
        float, _option("eval-share", "Share of the data that is held out with --eval-every.", "PART")
    ] = 0.01,
    save_every: Annotated[
        int, _option("save-every", "Save a checkpoint after each N steps, and after the last one.")
    ] = 500,
    keep: Annotated[int, _option("keep", "Last checkpoints that are kept, beside the best one.")] = 2,
    spike_sigmas: Annotated[
        float,
        _option(
            "spike-sigmas",
            "Leave out a step whose loss is so many standard deviations above the usual; 0: only what is no number.",
            "X",
        ),
    ] = 6.0,
    log: Annotated[
        list[str] | None, _option("log", "Also write the metrics for tensorboard or wandb.", "WORD")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out from its last checkpoint.")
    ] = False,
    json: Json = False,
) -> int:
    """Train a model by a plan: the step that was estimated, on your data.  Start it with torchrun for several ranks.

    Example: tonnage train plan.toml --model my-model --data train.jsonl --out run
    """
    from tonnage.cli import answer
    from tonnage.train import run
    from tonnage.train.settings import Settings

    settings = Settings(
        plan=plan,
        model=model,
        data=data,
        out=out,
        max_steps=max_steps,
        epochs=epochs,
        lr=lr,
        schedule=schedule,
        warmup_steps=warmup_steps,
        decay_steps=decay_steps,
        weight_decay=weight_decay,
        seed=seed,
        tokenizer=tokenizer,
        eval_data=eval_data,
        eval_every=eval_every,
        eval_share=eval_share,
        save_every=save_every,
        keep=keep,
        spike_sigmas=spike_sigmas,
        logs=tuple(log or ()),
        resume=resume,
    )
    with redirect_stdout(sys.stderr):  # libraries print there what is no result
        outcome = run.train(settings)
    if outcome.is_first_rank:
        if json:
            answer.print_json(outcome.to_json())
        else:
            answer.emit(_describe(outcome))
    return INTERRUPTED if outcome.final is None else 0


def _describe(outcome: "Outcome") -> str:
    """Return what `tonnage train` prints at the end."""
    loss = f", loss {'no number' if outcome.loss is None else format(outcome.loss, '.4f')}"
    evaluation = "" if outcome.evaluation_loss is None else f", evaluation {outcome.evaluation_loss:.4f}"
    skipped = f", {outcome.skipped} left out" if outcome.skipped else ""
    end = "interrupted; continue with --resume" if outcome.final is None else str(outcome.final)
    return f"{pluralise(outcome.steps, 'step')}{skipped}{loss}{evaluation}, {outcome.seconds:.1f} s: {end}\n"
