"""What the operations of one step multiply, read and write, and in which order the card was asked for them.

Written inside a ghost process (`tonnage_inside.worked`), read here without torch.
"""

import json
import struct
import zipfile
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from tonnage.errors import UnreadableFile

_DOCUMENT, _NUMBERS, _LOG = "worked.json", "worked.places", "worked.log"
"""The members of an archive."""

_RECORD: Final = struct.Struct("<BBHIIIIIIIQQQQ")  # struct ghost_record, 64 bytes


LAUNCHED: Final = (1, 2, 3, 4, 5, 13)
"""Kinds of records that are work of the card: kernels, copies, fills, operations of libraries."""


class Operation(NamedTuple):
    """One operation of torch's dispatcher that launched something."""

    phase: str
    """`forward`, `backward`, `recompute`, `optimizer` or `other`."""
    name: str
    """As torch calls it; with ` masked` behind it where an attention is given a mask."""
    family: str
    """`product`, `attention` or `pass`."""
    dtype: str
    """Of the first tensor of floating-point numbers, in torch's word; `tf32` where products of fp32 are so."""
    flops: int
    """Multiplications and additions, by torch's formulas."""
    bytes: int
    """Read and written."""
    kernels: int
    """Kernels, copies and operations of libraries that it launched."""
    aligned: bool
    """Of a product: whether rows begin at multiples of 16 bytes."""
    causal: bool
    """Of an attention: whether a token sees only those before it."""
    tokens: int
    """Keys of an attention."""
    tensors: int
    """How many it was given."""


class Record(NamedTuple):
    """One record of the ghost's log."""

    kind: int
    """As docs/explanation/ghost.md numbers them."""
    flags: int
    mark: int
    name: str
    grid: tuple[int, int, int]
    block: int
    stream: int
    bytes: int
    address: int


@dataclass(frozen=True, kw_only=True)
class Worked:
    """One step of one rank."""

    operations: tuple[Operation, ...]
    """Those that differ."""
    numbers: "array[int]"
    """Three for each operation in order: which of `operations` it was, its first record, the one behind its last."""
    phases: dict[int, str]
    """Of each mark that records carry."""
    passed_on: dict[str, int]
    """By phase: tensors of classes of their own (DTensor), which do operations by others, in Python."""
    names: tuple[str, ...]
    """Names of kernels and collectives; the log points at them by index."""
    log: bytes
    """The ghost's log of the step, records of 64 bytes (`struct ghost_record`)."""

    def places(self) -> Iterator[tuple[int, int, int]]:
        """Which operation, its first record, the one behind its last."""
        return zip(self.numbers[::3], self.numbers[1::3], self.numbers[2::3], strict=True)

    def records(self) -> list[Record]:
        """The log."""
        names = dict(enumerate(self.names))
        return [
            Record(kind, flags, mark, names.get(name, ""), (x, y, z), block, stream, moved, address)
            for kind, _, flags, mark, name, x, y, z, block, _, stream, moved, address, _ in _RECORD.iter_unpack(
                self.log
            )
        ]


def read(archive: zipfile.ZipFile, prefix: str = "") -> Worked | None:
    """What is in an archive; None if there is nothing of the kind.  Raises UnreadableFile where it is damaged."""
    if f"{prefix}{_DOCUMENT}" not in archive.namelist():
        return None
    try:
        document = json.loads(archive.read(f"{prefix}{_DOCUMENT}"))
        numbers = array("q")
        numbers.frombytes(archive.read(f"{prefix}{_NUMBERS}"))
        found = Worked(
            operations=tuple(map(_operation, document["rows"])),
            numbers=numbers,
            phases={int(mark): str(phase) for mark, phase in document["phases"].items()},
            passed_on={str(phase): int(count) for phase, count in document["passed_on"].items()},
            names=tuple(map(str, document["names"])),
            log=archive.read(f"{prefix}{_LOG}"),
        )
        _check(found)
    except (KeyError, TypeError, ValueError, AttributeError, zipfile.BadZipFile, OSError, EOFError) as error:
        raise UnreadableFile(f"The operations of a step are damaged ({type(error).__name__}: {error}).") from error
    return found


def write(worked: Worked, archive: zipfile.ZipFile, prefix: str = "") -> None:
    """Put it into an open archive."""
    document = {
        "rows": [list(one) for one in worked.operations],
        "phases": {str(mark): phase for mark, phase in worked.phases.items()},
        "passed_on": worked.passed_on,
        "names": list(worked.names),
    }
    archive.writestr(f"{prefix}{_DOCUMENT}", json.dumps(document))
    archive.writestr(f"{prefix}{_NUMBERS}", worked.numbers.tobytes())
    archive.writestr(f"{prefix}{_LOG}", worked.log)


def load(path: Path) -> Worked | None:
    """What is in a file; None where there is no such file.  Raises UnreadableFile."""
    if not path.exists():
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            return read(archive)
    except (OSError, zipfile.BadZipFile) as error:
        raise UnreadableFile(f"{path} cannot be read ({error}).") from error


def _operation(row: list[Any]) -> Operation:
    phase, name, family, dtype, flops, moved, kernels, aligned, causal, tokens, tensors = row
    numbers = (int(flops), int(moved), int(kernels))
    if min(*numbers, int(tokens), int(tensors)) < 0:
        raise ValueError(f"{name} works less than nothing")
    texts = (str(phase), str(name), str(family), str(dtype))
    return Operation(*texts, *numbers, bool(aligned), bool(causal), int(tokens), int(tensors))


def _check(worked: Worked) -> None:
    records = len(worked.log) // _RECORD.size
    if len(worked.log) % _RECORD.size or len(worked.numbers) % 3:
        raise ValueError("its parts differ in length")
    kinds = worked.log[:: _RECORD.size]
    for number, first, last in worked.places():
        if not (0 <= number < len(worked.operations) and 0 <= first < last <= records):
            raise ValueError("an operation points at records that are not there")
        if not any(kind in LAUNCHED for kind in kinds[first:last]):
            raise ValueError("an operation launched nothing")
