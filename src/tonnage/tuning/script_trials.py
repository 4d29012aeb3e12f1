"""Trials of a user's own script: the command in fresh processes, timed and ended by the recorder beside it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tonnage.cluster import CPU
from tonnage.errors import UsageError
from tonnage.ghost.environment import RECORDER, interpreter
from tonnage.script import launchers
from tonnage.script.facts import Facts
from tonnage.tuning.outcome import Outcome, worst
from tonnage.tuning.trial import FEWEST_STEPS, STEADY, WARM_STEPS
from tonnage.tuning.trials import Records, own_folder, run_processes

if TYPE_CHECKING:
    from tonnage.cluster import Cluster
    from tonnage.script.changed_command import ChangedCommand

EVALUATION_BATCHES: Final = 8
"""Batches of the evaluation in a trial."""

OWN_SETTINGS: Final[Mapping[str, Any]] = {"report_to": "none", "push_to_hub": False, "load_best_model_at_end": False}
"""TrainingArguments of every trial: nothing of it is published, and no best checkpoint is looked for."""


class ScriptTrials:
    """Runs a script with other settings; what was run before is read from the folder's file."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        *,
        steps: int,
        timeout_seconds: float,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._cluster, self._steps, self._timeout_seconds = cluster, steps, timeout_seconds
        self._variables = dict(os.environ if variables is None else variables)
        self._records = Records(folder)

    def run(self, changed: ChangedCommand) -> tuple[Outcome, Facts]:
        """Return what a trial gave and what the script said of itself, from the file or from new processes."""
        key = self._key(changed)
        found = self._records.find(key)
        if found is None:
            outcome, facts = self._start(changed)
            found = {"outcome": outcome.to_json(), "facts": asdict(facts)}
            self._records.add(key, found)
        return Outcome.from_json(found["outcome"]), Facts(**found["facts"])

    def _key(self, changed: ChangedCommand) -> dict[str, Any]:
        return {
            "command": list(changed.command),
            "variables": changed.variables,
            "program": _digest(list(changed.command)),
            "steps": self._steps,
            "card": str(self._cluster),
        }

    def _start(self, changed: ChangedCommand) -> tuple[Outcome, Facts]:
        command = list(changed.command)
        check_command(command)
        with own_folder(self._records.folder) as own:
            found, error = run_processes(
                command,
                self._environment(changed, own.absolute()),
                own,
                ranks=None,
                timeout_seconds=self._timeout_seconds,
            )
        if error is not None:
            return error, Facts()
        outcomes = [Outcome.from_json(document["outcome"]) for document in found]
        outcome = worst(outcomes)
        if outcome.holds and outcome.tokens_per_second is not None:
            outcome = replace(outcome, tokens_per_second=sum(each.tokens_per_second or 0.0 for each in outcomes))
        return outcome, Facts(**found[0]["facts"])

    def _environment(self, changed: ChangedCommand, own: Path) -> dict[str, str]:
        """Return the variables of a trial, whose processes save into the folder `own`."""
        watch = {
            "folder": str(own),
            "steps": self._steps,
            "warm": WARM_STEPS,
            "fewest": FEWEST_STEPS,
            "steady": STEADY,
            "batches": EVALUATION_BATCHES,
            "launched": launchers.is_launched(list(changed.command)),
        }
        settings = json.loads(changed.variables.get("TONNAGE_SETTINGS", "{}"))
        paths = [str(RECORDER / "at_start"), str(RECORDER), self._variables.get("PYTHONPATH", "")]
        own_variables = {
            "TONNAGE_TRIAL": json.dumps(watch),
            "TONNAGE_SETTINGS": json.dumps({**OWN_SETTINGS, "output_dir": str(own / "saved"), **settings}),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            **({"CUDA_VISIBLE_DEVICES": ""} if self._cluster.device.id == CPU else {}),
        }
        return {**self._variables, **changed.variables, **own_variables}


def check_command(command: list[str]) -> None:
    """Raise UsageError for a command that is not found, or whose Python would not be watched."""
    interpreter(command)
    if flag := launchers.find_isolating_flag(command):
        raise UsageError(
            f"With {flag}, Python ignores the environment through which a trial is watched; leave {flag} out."
        )


def _digest(command: list[str]) -> str:
    """Return a text that differs for another content of the script; empty for a module."""
    try:
        program = Path(launchers.without_launcher(command)[0])
        return hashlib.sha256(program.read_bytes()).hexdigest()[:16] if program.is_file() else ""
    except (UsageError, OSError):
        return ""
