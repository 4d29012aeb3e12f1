"""The archive of `--save FILE`: an Estimate and the Traces it was computed from, in one zip file.

Members: `estimate.json` (the document that `--json` prints) and, for each rank that was run, the parts of its Trace
under `rank<N>/`.  Reading never executes anything: the archive holds JSON and raw numbers, nothing is unpickled and
nothing is unpacked to disk.
"""

import json
import lzma
import re
import struct
import types
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from tonnage.errors import UnreadableFile
from tonnage.estimates import estimate as estimates
from tonnage.estimates.estimate import Estimate
from tonnage.files import open_replacing
from tonnage.trace import members
from tonnage.trace import trace as traces_format
from tonnage.trace.trace import Trace

_MAX_NUMBER: Final = 2**63
_RANK: Final = re.compile(r"(rank[0-9]{1,7}/)trace\.json")
_RANK_FIELDS: Final = {"rank": int, "fits": bool, "allocated_bytes": int, "reserved_bytes": int, "process_bytes": int}
_DAMAGE: Final = (
    OSError,
    EOFError,
    KeyError,
    ValueError,
    TypeError,
    AttributeError,
    IndexError,
    OverflowError,
    RecursionError,
    NotImplementedError,  # unknown compression method
    RuntimeError,  # an encrypted member
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
)

_MAY_BE_ABSENT: Final = ("low_seconds", "high_seconds", "tokens_per_second_per_gpu", "uncorrected_step_seconds")
"""Times that may be unknown although the seconds are known: a script's tokens are."""

_TIMES: Final = ("step_seconds", "low_seconds", "high_seconds", "tokens_per_second_per_gpu", "mfu")

Value = TypeVar("Value")


def save(path: Path, estimate: Estimate, traces: Sequence[Trace] = ()) -> None:
    """Write the archive, completely or not at all.  Raises UnwritableFile."""
    with open_replacing(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=3) as archive:
        archive.writestr("estimate.json", json.dumps(estimate.to_json(), allow_nan=False))
        for trace in traces:
            traces_format.write(trace, archive, f"rank{trace.rank}/")


def load_estimate(path: Path) -> Estimate:
    """Return the Estimate of a saved file, with every field checked for its type.  Raises UnreadableFile."""
    return _report_damage(path, lambda: _verify(estimates.load(_check_file(path))))


def is_saved(path: Path) -> bool:
    """Return True if a file is an archive that `save` wrote, judged by its list of members."""
    try:
        with zipfile.ZipFile(path) as archive:
            return "estimate.json" in archive.namelist()
    except _DAMAGE:
        return False


def _check_file(path: Path) -> Path:
    if path.is_file():
        return path
    reason = "a folder" if path.is_dir() else "no file" if path.exists() else "not there"
    raise UnreadableFile(f"{path} is {reason}; give a file written by --save.")


def load_traces(path: Path) -> tuple[Trace, ...]:
    """Return the Traces of a saved file, by rank; empty if it was saved without.  Raises UnreadableFile."""
    return _report_damage(path, lambda: _read_traces(path))


def _read_traces(path: Path) -> tuple[Trace, ...]:
    with zipfile.ZipFile(path) as archive:
        members.check(archive, path)
        prefixes = [match[1] for name in archive.namelist() if (match := _RANK.fullmatch(name))]
        return tuple(sorted((traces_format.read(archive, prefix) for prefix in prefixes), key=_rank))


def _rank(trace: Trace) -> int:
    return trace.rank


def _report_damage(path: Path, read: Callable[[], Value]) -> Value:
    """Raise whatever the standard library raises for a damaged archive as one line."""
    try:
        return read()
    except UnreadableFile:
        raise
    except _DAMAGE as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UnreadableFile(f"{path} is damaged, or no file that tonnage saved ({reason}).") from error


def _verify(estimate: Estimate) -> Estimate:
    """Return the Estimate after checking every field.  Raises UnreadableFile."""
    _check(estimate, Estimate, "estimate")
    for entry in estimate.ranks:
        for name, expected in _RANK_FIELDS.items():
            _check(entry.get(name), expected, f"ranks: {name}")
    _check_times(estimate.time)
    return estimate


def _check_times(time: dict[str, Any]) -> None:
    """Raise UnreadableFile for times that are no numbers, or that are missing although the seconds are known."""
    for name in _TIMES:
        value = time.get(name)
        missing = value is None and (time.get("step_seconds") is None or name in _MAY_BE_ABSENT)
        if not missing and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
            shown = value if type(value) in (int, float) else _kind(value)
            raise UnreadableFile(f"The saved estimate is damaged: time: {name} is {shown}, and no number from 0 on.")


def _check(value: object, expected: Any, where: str) -> None:
    """Compare a value with a type annotation, through dataclasses and containers; numbers must be in range."""
    origin, arguments = get_origin(expected), get_args(expected)
    if is_dataclass(expected) and isinstance(value, expected):  # type: ignore[arg-type]
        hints = get_type_hints(expected)
        for item in fields(expected):
            _check(getattr(value, item.name), hints[item.name], f"{where}: {item.name}")
    elif origin in (Union, types.UnionType):
        if value is not None:
            _check(value, next(choice for choice in arguments if choice is not types.NoneType), where)
    elif origin is tuple and isinstance(value, tuple):
        for item in value:
            _check(item, arguments[0], where)
    elif origin is dict and isinstance(value, dict):
        for name, item in value.items():
            _check(item, arguments[1], f"{where}: {name}"[:100])
    elif expected is Any:
        _check_plain(value, where)
    elif type(value) is not expected:
        raise UnreadableFile(f"The saved estimate is damaged: {where} is {_kind(value)}.")
    elif expected is int and not 0 <= cast(int, value) < _MAX_NUMBER:
        raise UnreadableFile(f"The saved estimate is damaged: {where} is out of range.")


def _kind(value: object) -> str:
    """Return the kind of a value in JSON's terms."""
    known = {dict: "an object", str: "a text", bool: "a truth value", int: "a number", float: "a number"}
    return "missing" if value is None else known.get(type(value), "a list")


def _check_plain(value: object, where: str) -> None:
    """Check values of any JSON type: numbers must be in range."""
    if isinstance(value, dict):
        for item in value.values():
            _check_plain(item, where)
    elif isinstance(value, list):
        for item in value:
            _check_plain(item, where)
    elif isinstance(value, int | float) and not abs(value) < _MAX_NUMBER:  # also false for NaN
        raise UnreadableFile(f"The saved estimate is damaged: {where} holds a number out of range.")
