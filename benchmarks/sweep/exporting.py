"""What becomes of a case in trainers' words: read again, nothing lost, and the same memory when it is run."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.exports import launched
from benchmarks.sweep.cases import Case

from tonnage.case import Case as TrainingCase
from tonnage.errors import TonnageError, UsageError
from tonnage.options import options
from tonnage.script import dry_run
from tonnage.trainers import reading, targets

if TYPE_CHECKING:
    from benchmarks.sweep.ways import Asking

    from tonnage.estimates.estimate import Peak
    from tonnage.estimates.from_traces import Run

THEIRS = (("shard", "ddp"), ("optimizer", "adamw"))
"""What trainers do where a plan has no shard, and what they call the fused AdamW."""

ALIKE = (
    *(("axolotl", "optimizer", "adamw-fused"), ("megatron-bridge", "precision", "megatron-bf16")),
    *(("megatron-bridge", "sequence_parallel", word) for word in ("on", "off")),
    ("megatron-bridge", "shard", "ddp"),
)
"""Values that a target says as it says the default, since it does the same."""


def exported(asking: Asking, one: Case, _: Run) -> list[str]:
    """Each trainer's files, read in again as `plan --from` does: what they say of the plan is the plan."""
    problems = []
    with tempfile.TemporaryDirectory() as home:
        (Path(home) / "config.json").write_text(json.dumps(one.job.model.config))
        for target in targets.TARGETS:
            made = _made(one, target, home)
            asking.asked[f"{'exported' if made else 'not exported'} to {target.name}"] += 1
            if made is not None:
                problems += [f"{target.name} {line}" for line in _misread(made, one, Path(home))]
    return problems


def _made(one: Case, target: targets.Target, folder: str) -> targets.Export | None:
    """The case in a target's words; None where it is refused."""
    try:
        return targets.export_plan(TrainingCase(one.job, one.plan, one.cluster), folder, target)
    except UsageError:
        return None


def _misread(made: targets.Export, one: Case, home: Path) -> Iterator[str]:
    instead = {item.option.replace("-", "_"): item.instead for item in made.unexpressed}
    wished = {**vars(one.job), **vars(one.plan), **instead}
    for file in made.files:
        path = home / file.name
        path.write_text(file.text)
        try:
            given = reading.read(path) if path.suffix in (".json", ".yaml") else None
        except TonnageError as error:
            if "no key by which" not in str(error):
                yield str(error)
            continue
        for name, value in given.options.items() if given is not None else ():
            if given is not None and name not in (*given.silent, "engine") and not _read_as(name, value, wished):
                yield f"{file.name}: {name} {wished[name]!r} read as {value!r}"


def _read_as(name: str, value: Any, wished: dict[str, Any]) -> bool:
    """Whether a value is the one that was written; states go where DeepSpeed's parameters go."""
    spellings = (str(value), ",".join(value) if isinstance(value, tuple) else str(value))
    number = isinstance(value, float) and value == wished[name]
    with_parameters = name == "optimizer_offload" and value == wished["param_offload"]
    return str(wished[name]) in spellings or number or with_parameters or (name, value) in THEIRS


def dropped(_: Asking, one: Case, __: Run) -> list[str]:
    """Each option of the case taken back: every export changes, or had listed it as one that it cannot say."""
    problems = []
    for target in targets.TARGETS:
        made = _made(one, target, "/")
        if made is None:
            continue
        for name, value, back in _taken_back(one):
            other = _made(back, target, "/")
            if other is None or name in {*_listed(made), *_listed(other)} or (target.name, name, value) in ALIKE:
                continue
            if replace(other, unexpressed=(), job=made.job, plan=made.plan) == replace(made, unexpressed=()):
                problems.append(f"{target.name}: {name} {value}")
    return problems


def _listed(made: targets.Export) -> set[str]:
    return {item.option.replace("-", "_") for item in made.unexpressed}


def _taken_back(one: Case) -> Iterator[tuple[str, Any, Case]]:
    """Each option of the case that says something, its value, and the case without it."""
    for part in ("job", "plan"):
        value = getattr(one, part)
        for item, _ in options(type(value)):
            found = getattr(value, item.name)
            if found != item.default and not _means_nothing(one, item.name):
                with contextlib.suppress(UsageError):
                    yield item.name, found, replace(one, **{part: replace(value, **{item.name: item.default})})


def _means_nothing(one: Case, name: str) -> bool:
    """Options of adapters where there are none, and dtypes that are the usual ones."""
    usual = {"base_dtype": one.plan.compute_dtype, "weights_dtype": "fp32", "engine": one.plan.engine}
    return (
        (name.startswith("lora_") and one.job.method == "full")
        or (name in targets.QUANTIZED and one.job.method != "qlora")
        or getattr(one.plan, name, None) == usual.get(name, ())
    )


def delivered(asking: Asking, one: Case, _: Run) -> list[str] | None:
    """What is exported to the engine's own trainer, run as its user would: the engine's memory, to the byte.

    Only scripts of ours (networks that write), and plans that the trainer has words for.
    """
    rank = 0 if one.cluster.gpus > 1 else None
    for target in targets.TARGETS:
        if target.engine != one.plan.engine or not target.scripted:
            continue
        with tempfile.TemporaryDirectory() as home, contextlib.chdir(home):
            Path("config.json").write_text(json.dumps(one.job.model.config))
            made = _made(one, target, home)
            if made is not None and not made.unexpressed:
                found = _run(made, one, rank)
                return list(_more_or_less(asking.run(one, rank=rank).estimate.peak, found.estimate.peak))
    return None


def _run(made: targets.Export, one: Case, rank: int | None) -> Run:
    """What the exported command does in this folder, without weights."""
    for file in made.files:
        Path(file.name).write_text(file.text)
    variables, words = launched(shlex.split(made.command.replace("MACHINE", "0")))
    told = {**os.environ, **variables}
    return dry_run.run([*words, "--random-weights"], one.cluster, rank=rank, variables=told, seconds=False)


def _more_or_less(estimated: Peak, found: Peak) -> Iterator[str]:
    for name in ("allocated_bytes", "reserved_bytes"):
        if getattr(estimated, name) != getattr(found, name):
            yield f"{name} {getattr(estimated, name)}, exported {getattr(found, name)}"
