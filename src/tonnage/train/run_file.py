"""`run.json`: what decides the numbers of a run, so that a resume under other settings can say what differs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tonnage.errors import UnreadableFile, UsageError
from tonnage.files import read_text, write_text
from tonnage.train.checkpoints import MAY_DIFFER

if TYPE_CHECKING:
    from tonnage.train.setup import Setup

FILE: Final = "run.json"
_MOST_BYTES: Final = 2**20
_STEPS: Final = "steps"
_DIGESTS: Final = ("model", "data", "eval_data")


def describe(setup: Setup) -> dict[str, Any]:
    """Return what decides the numbers of a run, by the names of options."""
    settings = setup.settings
    options = {**asdict(setup.job), **asdict(setup.plan)}
    decisive = {name: value for name, value in options.items() if name not in (*MAY_DIFFER, "model", "accum_sync")}
    numbers = {
        "model": setup.source.digest,
        "data": setup.training.digest,
        "eval_data": None if setup.evaluation is None else setup.evaluation.digest,
        "sequences a step": setup.rows_a_step,
        "lr": setup.rate,
        _STEPS: setup.lengths.total,
        **{
            name: getattr(settings, name)
            for name in ("seed", "schedule", "warmup_steps", "decay_steps", "weight_decay", "spike_sigmas")
        },
    }
    described: dict[str, Any] = json.loads(json.dumps({**decisive, **numbers}))
    return described


def write(setup: Setup, folder: Path) -> None:
    """Write the file of a new run."""
    write_text(folder / FILE, json.dumps(describe(setup), indent=1) + "\n")


def check(setup: Setup, folder: Path) -> str | None:
    """Return a remark about a run that is now longer or shorter.  Raises UsageError if it is another run."""
    try:
        before = json.loads(read_text(folder / FILE, _MOST_BYTES))
        steps = before[_STEPS]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnreadableFile(
            f"{folder / FILE} is not what tonnage train wrote ({error}); train into a new folder."
        ) from error
    now = describe(setup)
    others = [
        f"{name.replace('_', '-')} {_spell_change(name, before.get(name), now.get(name))}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name) and name != _STEPS
    ]
    if others:
        raise UsageError(f"--resume would continue another run: {'; '.join(others)}; train into a new folder.")
    if steps == now[_STEPS]:
        return None
    return f"the run has {now[_STEPS]} steps instead of {steps}, and its schedule is that of the new number"


def _spell_change(name: str, before: Any, now: Any) -> str:
    """Return what became of a value; of a digest nothing can be read."""
    return "is another" if name in _DIGESTS else f"was {_spell(before)} and is {_spell(now)}"


def _spell(value: Any) -> str:
    return str(value) if isinstance(value, str) else json.dumps(value)
