"""`plan.toml`: a job, a plan and its cluster in a file that people keep, edit, and estimate again.

Only what differs from the defaults is written, and what was predicted as comments.  Reading it executes nothing, and
a file alone has no code run (`PlanFile.network`).  A key that is not known, or has the wrong type, is refused with
the keys that are.
"""

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tonnage.catalog.configurations import is_factory
from tonnage.catalog.models import find_model
from tonnage.errors import UnreadableFile, UsageError
from tonnage.files import read_text
from tonnage.job import Job
from tonnage.options import Option, options
from tonnage.planner.solution import Choice
from tonnage.plans import Plan
from tonnage.units import gib

SCHEMA_VERSION: Final = 1
_TABLES: Final[Mapping[str, type]] = {"job": Job, "plan": Plan}
_MOST_BYTES: Final = 2**20


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """What such a file says."""

    model: str
    """As on the command line; a folder or file by its whole path, in older files from where they were written."""
    gpu: str
    """As on the command line: `4x8xh100-80gb`."""
    gpu_memory_bytes: int | None
    """In place of the catalog's."""
    options: dict[str, Any]
    """Fields of Job and Plan by their names."""

    def network(self, said: str | None) -> str:
        """What is estimated: what was `said`, else the file's; a factory, whose code is run, is to be said.

        Raises UsageError.
        """
        if said is None and is_factory(self.model):
            raise UsageError(
                f"The plan's model is the factory {self.model!r}, whose code would be run. If you trust it, say it "
                f"beside the file: tonnage estimate {self.model} --plan FILE."
            )
        return said or self.model

    def under(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """These options, with those that were `said` in their place."""
        return {**self.options, **said}


def found_anywhere(model: str) -> str:
    """A model as it was asked for; a folder or file by its whole path, so that it is found from other folders too."""
    if find_model(model) is not None:
        return model
    try:
        path = Path(model).expanduser()
        return os.path.abspath(path) if path.exists() else model
    except (OSError, ValueError, RuntimeError):  # no name of a file at all
        return model


def text(choice: Choice, *, gpu: str, gpu_memory_bytes: int | None = None, model: str | None = None) -> str:
    """The file for a plan that was found; `model` as it was asked for, where that is not its name (a folder)."""
    job, plan, estimate = choice.candidate.job, choice.candidate.plan, choice.estimate
    model = model or job.model.name
    again = f"{model} --plan FILE" if is_factory(model) else "--plan FILE"
    seconds = estimate.time.get("step_seconds")
    lines = [
        f"# {choice.name}: {gib(estimate.peak.process_bytes)} of {gib(estimate.cluster['capacity_bytes'])} a GPU"
        + (f", {seconds:.3g} s a step" if seconds else ""),
        f"# tonnage estimate {again} runs it again; tonnage export FILE --to TARGET writes it for a trainer.",
        f"schema_version = {SCHEMA_VERSION}",
        f"model = {_toml(model)}",
        f"gpu = {_toml(gpu)}",
    ]
    if gpu_memory_bytes is not None:
        lines.append(f"gpu_memory_bytes = {gpu_memory_bytes}")
    for table, value in (("job", job), ("plan", plan)):
        lines += ["", f"[{table}]"]
        for item, option in options(type(value)):
            found = getattr(value, item.name)
            if found != item.default or item.name in ("seq_len", "micro_batch", "grad_accum", "precision"):
                lines += [f"# {option.help}", f"{item.name} = {_toml(found)}"]
    return "\n".join(lines) + "\n"


def read(path: Path) -> PlanFile:
    """What a file says.  Raises UnreadableFile where it is no such file, UsageError for what it must not say."""
    try:
        document = tomllib.loads(read_text(path, _MOST_BYTES))
    except FileNotFoundError as error:
        raise UnreadableFile(f"{path} is not there; give a file that tonnage plan --save wrote.") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UnreadableFile(f"{path} is not a plan that can be read ({' '.join(str(error).split())}).") from error
    version = document.pop("schema_version", None)
    if version is None:
        raise UnreadableFile(
            f"{path} is no plan file: it has no schema_version; give a file that tonnage plan --save wrote."
        )
    if type(version) is not int or version != SCHEMA_VERSION:  # True and 1.0 are equal to 1
        raise UnreadableFile(f"{path} has schema_version {_shown(version)}; this tonnage reads {SCHEMA_VERSION}.")
    known = ("model", "gpu", "gpu_memory_bytes", *_TABLES)
    _only(document, known, f"{path}")
    found: dict[str, Any] = {}
    for table, kind in _TABLES.items():
        values = document.get(table, {})
        if not isinstance(values, dict):
            raise UsageError(f"{path}: [{table}] must be a table.")
        declared = {item.name: option for item, option in options(kind)}
        _only(values, tuple(declared), f"{path}, [{table}]")
        found |= {name: _checked(value, declared[name], f"{path}: {name}") for name, value in values.items()}
    return PlanFile(
        model=_word(document, "model", path),
        gpu=_word(document, "gpu", path),
        gpu_memory_bytes=_memory(document, path),
        options=found,
    )


def _only(values: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for name in values:
        if name not in known:
            raise UsageError(f"{where}: unknown key {name!r}; possible: {', '.join(known)}.")


def _word(document: Mapping[str, Any], name: str, path: Path) -> str:
    value = document.get(name)
    if value is None:
        example = {"model": "gpt2", "gpu": "8xh100-80gb"}[name]
        raise UsageError(f"{path}: {name} is missing; add a line such as {name} = {_toml(example)}.")
    if not isinstance(value, str) or not value:
        raise UsageError(f"{path}: {name} must be a text, and is {_shown(value)}.")
    return value


def _memory(document: Mapping[str, Any], path: Path) -> int | None:
    value = document.get("gpu_memory_bytes")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise UsageError(f"{path}: gpu_memory_bytes must be a whole number above zero, and is {_shown(value)}.")
    return value


_KINDS: Final[Mapping[str, tuple[type, str]]] = {
    "word": (str, "a text"),
    "number": (int, "a whole number"),
    "amount": (float, "a number"),
    "fraction": (float, "a number"),
    "switch": (bool, "true or false"),
    "names": (list, "a list of texts"),
}


def _checked(value: Any, option: Option, where: str) -> Any:
    """The value as a field wants it; what words are possible, the field checks itself."""
    kind, called = _KINDS[option.kind]
    if kind is float and type(value) is int:
        value = float(value)
    wrong = not isinstance(value, kind) or (kind is int and isinstance(value, bool))
    if wrong or (kind is list and not all(isinstance(item, str) for item in value)):
        raise UsageError(f"{where} must be {called}, and is {_shown(value)}.")
    return tuple(value) if kind is list else value


def _shown(value: Any) -> str:
    """A value as the file has it, where that is short to say."""
    try:
        return _toml(value)
    except TypeError:  # a date
        return str(value)


def _toml(value: Any) -> str:
    """A value as TOML writes it: its strings, numbers, lists and truth values are those of JSON."""
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
