"""`plan.toml`: a job, its plan and its GPUs in a file that people keep, edit, estimate again and export.

    schema_version = 1
    model = "llama-3.1-8b"
    gpu = "8xa100-80gb"

    [job]
    seq_len = 8192

    [plan]
    shard = "zero3"

Only values that differ from the defaults are written; the prediction is a comment.  Reading a file executes nothing:
a model that is a factory, whose code would run, must be named by the user (`PlanFile.network`).  A key that is
unknown or has a value of the wrong type is refused, with the possible keys.
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
from tonnage.planner.solution import Candidate, Choice
from tonnage.plans import Plan
from tonnage.synonyms import find_option
from tonnage.units import format_gib

SCHEMA_VERSION: Final = 1
_TABLES: Final[Mapping[str, type]] = {"job": Job, "plan": Plan}
_ALWAYS_WRITTEN: Final = ("seq_len", "micro_batch", "grad_accum", "precision", "shard")
"""Fields that are written even if they have their default value."""

_MOST_BYTES: Final = 2**20
"""Size of the largest file that is read."""


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """The content of a plan file."""

    model: str
    """The model as on the command line.

    A folder or file has its absolute path; older files have the path from the folder in which they were written.
    """
    gpu: str
    """The GPUs as on the command line: `4x8xh100-80gb`."""
    gpu_memory_bytes: int | None
    """Memory of each GPU; None: the catalog's."""
    host_memory_bytes: int | None
    """Host memory of each machine; None: what is usual with the GPUs."""
    options: dict[str, Any]
    """Values of fields of Job and Plan, by the names of the fields."""

    def network(self, stated: str | None) -> str:
        """Return the model to estimate: the one that the user `stated`, else the file's.

        Raises UsageError for a factory that only the file names, because its code would run.
        """
        if stated is None and is_factory(self.model):
            raise UsageError(
                f"The plan's model is the factory {self.model!r}, whose code would be run. If you trust it, name it "
                f"on the command line: tonnage estimate {self.model} --plan FILE."
            )
        return stated or self.model

    def under(self, stated: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of the file, overridden by those that the user `stated`."""
        return {**self.options, **stated}


def found_anywhere(model: str) -> str:
    """Return a model by a name that is valid in every folder: a folder or file by its absolute path."""
    if find_model(model) is not None:
        return model
    try:
        path = Path(model).expanduser()
        return os.path.abspath(path) if path.exists() else model
    except (OSError, ValueError, RuntimeError):  # cannot be the name of a file
        return model


def text(
    choice: Choice,
    *,
    gpu: str,
    gpu_memory_bytes: int | None = None,
    host_memory_bytes: int | None = None,
    model: str | None = None,
) -> str:
    """Return the content of the file for a plan.

    `model` replaces the name of the job's model if that does not find it again, as for a folder.
    """
    estimate = choice.estimate
    seconds = estimate.time.get("step_seconds")
    capacity = format_gib(estimate.cluster["capacity_bytes"])
    return text_of(
        choice.candidate,
        remark=f"{choice.name}: {format_gib(estimate.peak.process_bytes)} of {capacity} on each GPU"
        + (f", {seconds:.3g} s a step" if seconds else ""),
        gpu=gpu,
        gpu_memory_bytes=gpu_memory_bytes,
        host_memory_bytes=host_memory_bytes,
        model=model,
    )


def text_of(
    candidate: Candidate,
    *,
    remark: str,
    gpu: str,
    gpu_memory_bytes: int | None = None,
    host_memory_bytes: int | None = None,
    model: str | None = None,
) -> str:
    """Return the content of the file for a candidate; the `remark` is its first line."""
    job, plan = candidate.job, candidate.plan
    model = model or job.model.name
    again = f"{model} --plan FILE" if is_factory(model) else "--plan FILE"
    lines = [
        f"# {remark}",
        f"# tonnage estimate {again} estimates it again; tonnage export FILE --to TARGET writes it for a trainer.",
        f"schema_version = {SCHEMA_VERSION}",
        f"model = {_to_toml(model)}",
        f"gpu = {_to_toml(gpu)}",
    ]
    if gpu_memory_bytes is not None:
        lines.append(f"gpu_memory_bytes = {gpu_memory_bytes}")
    if host_memory_bytes is not None:
        lines.append(f"host_memory_bytes = {host_memory_bytes}")
    for table, value in (("job", job), ("plan", plan)):
        lines += ["", f"[{table}]"]
        for item, option in options(type(value)):
            chosen = getattr(value, item.name)
            if chosen != item.default or item.name in _ALWAYS_WRITTEN:
                lines += [f"# {option.help}", f"{item.name} = {_to_toml(chosen)}"]
    return "\n".join(lines) + "\n"


def read(path: Path) -> PlanFile:
    """Return the content of a plan file.

    Raises UnreadableFile if it is no plan file of this version, UsageError for a wrong key or value.
    """
    try:
        document = tomllib.loads(read_text(path, _MOST_BYTES))
    except FileNotFoundError as error:
        raise UnreadableFile(f"{path} does not exist; give a file that tonnage plan --save wrote.") from error
    except UnicodeDecodeError as error:
        raise UnreadableFile(
            f"{path} is no text, as a plan file is; give a file that tonnage plan --save wrote (estimate and dry-run "
            "save answers, which tonnage report shows)."
        ) from error
    except (OSError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UnreadableFile(f"{path} cannot be read as a plan file ({' '.join(str(error).split())}).") from error
    version = document.pop("schema_version", None)
    if version is None:
        raise UnreadableFile(
            f"{path} is not a plan file: it has no schema_version; give a file that tonnage plan --save wrote, or "
            f"add schema_version = {SCHEMA_VERSION} to one of your own."
        )
    if type(version) is not int or version != SCHEMA_VERSION:  # True and 1.0 are equal to 1
        raise UnreadableFile(
            f"{path} has schema_version {_spell_value(version)}; this tonnage reads {SCHEMA_VERSION}."
        )
    if document.get("task") == "serve":
        raise UsageError(
            f"{path} is a serving plan, not one of training; tonnage estimate --plan {path} answers it, and tonnage "
            f"export {path} --to vllm writes what starts it."
        )
    known = ("model", "gpu", "gpu_memory_bytes", "host_memory_bytes", *_TABLES)
    _check_keys(document, known, f"{path}")
    read_options: dict[str, Any] = {}
    for table, kind in _TABLES.items():
        values = document.get(table, {})
        if not isinstance(values, dict):
            raise UsageError(f"{path}: [{table}] must be a table.")
        declared = _names(kind)
        _check_keys(values, tuple(declared), f"{path}, [{table}]")
        read_options |= {
            name: _convert_value(value, declared[name], f"{path}: {name}") for name, value in values.items()
        }
    return PlanFile(
        model=_read_text_value(document, "model", path),
        gpu=_read_text_value(document, "gpu", path),
        gpu_memory_bytes=_read_memory(document, "gpu_memory_bytes", path),
        host_memory_bytes=_read_memory(document, "host_memory_bytes", path),
        options=read_options,
    )


def _names(kind: type) -> dict[str, Option]:
    """Return the options of a table by their keys."""
    return {item.name: option for item, option in options(kind)}


def _check_keys(values: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    """Raise UsageError for a key that is not `known`, with the table that it belongs to or its name here."""
    for name in values:
        if name not in known:
            other = find_option(name)
            key = name if other is None else other.in_python
            table = next((table for table, kind in _TABLES.items() if key in _names(kind)), None)
            place = f" under [{table}]" if table is not None and key not in known else ""
            meant = f"; here it is {key}{place}" if key != name else f"; it belongs{place}" if place else ""
            raise UsageError(f"{where}: unknown key {name!r}{meant}; possible: {', '.join(known)}.")


def _read_text_value(document: Mapping[str, Any], name: str, path: Path) -> str:
    """Return the value of `model` or `gpu`.  Raises UsageError if it is missing or no text."""
    value = document.get(name)
    if value is None:
        example = {"model": "gpt2", "gpu": "8xh100-80gb"}[name]
        raise UsageError(f"{path}: {name} is missing; add a line such as {name} = {_to_toml(example)}.")
    if not isinstance(value, str) or not value:
        raise UsageError(f"{path}: {name} must be a text, not {_spell_value(value)}.")
    return value


def _read_memory(document: Mapping[str, Any], name: str, path: Path) -> int | None:
    """Return an amount of memory, if the file has it.  Raises UsageError unless it is a positive whole number."""
    value = document.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise UsageError(f"{path}: {name} must be a whole number above zero, not {_spell_value(value)}.")
    return value


_KINDS: Final[Mapping[str, tuple[type, str]]] = {
    "word": (str, "a text"),
    "number": (int, "a whole number"),
    "amount": (float, "a number"),
    "fraction": (float, "a number"),
    "switch": (bool, "true or false"),
    "names": (list, "a list of texts"),
}
"""Type of the value of each kind of option, and its name in messages."""


def _convert_value(value: Any, option: Option, where: str) -> Any:
    """Return a value of the file in the type of its field; the field itself checks which words are possible.

    Raises UsageError for a value of another type.
    """
    kind, description = _KINDS[option.kind]
    if kind is float and type(value) is int:
        value = float(value)
    is_wrong = not isinstance(value, kind) or (kind is int and isinstance(value, bool))
    if is_wrong or (kind is list and not all(isinstance(item, str) for item in value)):
        raise UsageError(f"{where} must be {description}, not {_spell_value(value)}.")
    return tuple(value) if kind is list else value


def _spell_value(value: Any) -> str:
    """Return a value as the file has it, for a message; a date as Python writes it."""
    try:
        return _to_toml(value)
    except TypeError:  # a date
        return str(value)


def _to_toml(value: Any) -> str:
    """Return a value as TOML writes it: strings, numbers, lists and truth values are those of JSON."""
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
