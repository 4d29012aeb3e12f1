"""The operations of one step: what each multiplies, reads and writes, and the order in which they were launched.

A ghost process writes them (`tonnage_recorder.operations`); they are read here without torch.
"""

import json
import zipfile
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from tonnage.errors import UnreadableFile
from tonnage.recorder.tonnage_recorder.record_layout import RECORD
from tonnage.trace import members

_DOCUMENT, _NUMBERS, _LOG = "worked.json", "worked.places", "worked.log"
"""Names of the members of an archive."""

LAUNCHED: Final = (1, 2, 3, 4, 5, 13)
"""Kinds of records that are work for the card: kernels, copies, fills, operations of libraries."""


class Operation(NamedTuple):
    """One operation of torch's dispatcher that launched work."""

    phase: str
    """`forward`, `backward`, `recompute`, `optimizer` or `other`."""
    name: str
    """Name in torch; ` masked` is appended for an attention with a mask."""
    family: str
    """`product`, `attention` or `pass`."""
    dtype: str
    """torch's name of the dtype of the first floating-point tensor; `tf32` for fp32 products computed in tf32."""
    flops: int
    """Multiplications and additions, by torch's formulas."""
    bytes: int
    """Bytes read and written."""
    kernels: int
    """Number of kernels, copies and library operations that it launched."""
    aligned: bool
    """True for a product whose rows begin at multiples of 16 bytes."""
    causal: bool
    """True for an attention in which a token sees only those before it."""
    tokens: int
    """Number of keys of an attention."""
    tensors: int
    """Number of its tensor arguments."""


class Record(NamedTuple):
    """One record of the ghost's log."""

    kind: int
    """Kind of record, numbered as in docs/explanation/ghost.md."""
    flags: int
    mark: int
    name: str
    grid: tuple[int, int, int]
    block: int
    stream: int
    bytes: int
    address: int


@dataclass(frozen=True, kw_only=True)
class StepOperations:
    """The operations of one step of one rank."""

    operations: tuple[Operation, ...]
    """The distinct operations."""
    numbers: "array[int]"
    """Three numbers for each operation in launch order: its index in `operations`, its first record, and the end of
    its records (exclusive)."""
    phases: dict[int, str]
    """Phase of each mark in the records."""
    passed_on: dict[str, int]
    """Number of tensors by phase whose class (DTensor) implements operations by others, in Python."""
    names: tuple[str, ...]
    """Names of kernels and collectives; the log points at them by index."""
    log: bytes
    """The ghost's log of the step, records of 64 bytes (`struct ghost_record`)."""

    def places(self) -> Iterator[tuple[int, int, int]]:
        """Return each operation in launch order: index in `operations`, first record, end of its records."""
        return zip(self.numbers[::3], self.numbers[1::3], self.numbers[2::3], strict=True)

    def records(self) -> list[Record]:
        """Return the records of the log."""
        names = dict(enumerate(self.names))
        return [
            Record(kind, flags, mark, names.get(name, ""), (x, y, z), block, stream, moved, address)
            for kind, _, flags, mark, name, x, y, z, block, _, stream, moved, address, _ in RECORD.iter_unpack(
                self.log
            )
        ]


def with_another_micro_batch(worked: StepOperations) -> StepOperations:
    """Return the step with the last of its micro-batches twice.  Raises ValueError if it has only one."""
    phases = [worked.phases.get(record.mark, "") for record in worked.records()]
    passes = [place for place, phase in enumerate(phases) if phase in ("forward", "backward")]
    ends = [
        place + 1
        for place, following in pairwise(passes)
        if (phases[place], phases[following]) == ("backward", "forward")
    ]
    if not ends:
        raise ValueError("the step has only one micro-batch")
    begin, end = ends[-1], passes[-1] + 1
    numbers: array[int] = array("q")
    for number, first, last in worked.places():
        if first >= end:
            break
        numbers.extend((number, first, last))
    for number, first, last in worked.places():
        if last > begin:
            numbers.extend((number, first + end - begin, last + end - begin))
    log = worked.log[: end * RECORD.size] + worked.log[begin * RECORD.size :]
    return replace(worked, numbers=numbers, log=log)


def read(archive: zipfile.ZipFile, prefix: str = "") -> StepOperations | None:
    """Return the operations in an archive; None if it has none.  Raises UnreadableFile where they are damaged."""
    if f"{prefix}{_DOCUMENT}" not in archive.namelist():
        return None
    try:
        document = members.read_document(archive, f"{prefix}{_DOCUMENT}", members.document_bytes(archive))
        numbers = array("q")
        numbers.frombytes(members.read(archive, f"{prefix}{_NUMBERS}", members.MOST_BYTES))
        worked = StepOperations(
            operations=tuple(map(_parse_operation, document["rows"])),
            numbers=numbers,
            phases={int(mark): str(phase) for mark, phase in document["phases"].items()},
            passed_on={str(phase): int(count) for phase, count in document["passed_on"].items()},
            names=tuple(map(str, document["names"])),
            log=members.read(archive, f"{prefix}{_LOG}", members.MOST_BYTES),
        )
        _check(worked)
    except (*members.DAMAGED, zipfile.BadZipFile, OSError, EOFError) as error:
        raise UnreadableFile(f"The operations of a step are damaged ({type(error).__name__}: {error}).") from error
    return worked


def write(worked: StepOperations, archive: zipfile.ZipFile, prefix: str = "") -> None:
    """Write the operations into an open archive, under member names that start with `prefix`."""
    document = {
        "rows": [list(operation) for operation in worked.operations],
        "phases": {str(mark): phase for mark, phase in worked.phases.items()},
        "passed_on": worked.passed_on,
        "names": list(worked.names),
    }
    archive.writestr(f"{prefix}{_DOCUMENT}", json.dumps(document))
    archive.writestr(f"{prefix}{_NUMBERS}", worked.numbers.tobytes())
    archive.writestr(f"{prefix}{_LOG}", worked.log)


def load(path: Path) -> StepOperations | None:
    """Return the operations in a file; None if there is no such file.  Raises UnreadableFile."""
    if not path.exists():
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            return read(archive)
    except (OSError, zipfile.BadZipFile) as error:
        raise UnreadableFile(f"{path} cannot be read ({error}).") from error


def _parse_operation(row: list[Any]) -> Operation:
    phase, name, family, dtype, flops, moved, kernels, aligned, causal, tokens, tensors = row
    numbers = (int(flops), int(moved), int(kernels))
    if min(*numbers, int(tokens), int(tensors)) < 0:
        raise ValueError(f"{name} has a negative number")
    texts = (str(phase), str(name), str(family), str(dtype))
    return Operation(*texts, *numbers, bool(aligned), bool(causal), int(tokens), int(tensors))


def _check(worked: StepOperations) -> None:
    records = len(worked.log) // RECORD.size
    if len(worked.log) % RECORD.size or len(worked.numbers) % 3:
        raise ValueError("its parts have incomplete records")
    import numpy as np  # imported here to keep the command line's start fast

    number, first, last = np.frombuffer(worked.numbers, dtype=np.int64).reshape(-1, 3).T
    if not len(number):
        return
    if not (
        0 <= number.min() and number.max() < len(worked.operations) and first.min() >= 0 and last.max() <= records
    ):
        raise ValueError("an operation points at records that do not exist")
    kinds = np.frombuffer(worked.log[:: RECORD.size], dtype=np.uint8)
    launched = np.append(0, np.cumsum(np.isin(kinds, LAUNCHED)))
    if bool((first >= last).any()) or bool((launched[first] == launched[last]).any()):  # in this order
        raise ValueError("an operation launched nothing")
