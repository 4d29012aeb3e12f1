"""Members of an archive that a stranger may have made: how much is unpacked depends on the bytes that there are.

A thousand bytes of zeros pack into one.  Recordings pack to a twentieth or thirtieth (`benchmarks/fuzz.py` measures
it); what claims to be much more is refused before it is unpacked.
"""

import json
import math
import os
import zipfile
from typing import Any, Final

from tonnage.errors import UnreadableFile
from tonnage.units import MIB, format_size

MOST_BYTES: Final = 4 * 2**30
"""Bytes of all members together."""

_FREE_BYTES: Final = 16 * MIB
"""Bytes that a file of any size may unpack to, of all members and of a document."""

_UNPACKED: Final = 60
"""Bytes for each byte of a file that all members may unpack to."""

_DOCUMENT: Final = 16
"""Bytes for each byte of a file that a document of JSON may unpack to; as Python's values it takes ten times that."""

DAMAGED: Final = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError)
"""Errors by which values of a wrong kind or size show themselves where a document is taken apart."""

_METHODS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Ways of packing that tonnage uses; others may ask for gigabytes to unpack a few bytes."""


def check(archive: zipfile.ZipFile, name: object) -> None:
    """Check how much an archive claims to hold, beside its own bytes.  Raises UnreadableFile."""
    claimed = sum(info.file_size for info in archive.infolist())
    most = min(MOST_BYTES, _FREE_BYTES + _UNPACKED * _packed_bytes(archive))
    if claimed > most:
        raise UnreadableFile(
            f"{name} claims to hold {format_size(claimed)}; the limit for a file of its size is {format_size(most)}."
        )
    if any(info.compress_type not in _METHODS for info in archive.infolist()):
        raise UnreadableFile(f"{name} is packed in another way than tonnage's files.")


def read(archive: zipfile.ZipFile, name: str, most_bytes: int) -> bytes:
    """Return a member.  Raises UnreadableFile if it has more bytes than that, and KeyError if there is none."""
    size = archive.getinfo(name).file_size
    if size > most_bytes:
        raise UnreadableFile(f"The member {name} has {format_size(size)}; the limit is {format_size(most_bytes)}.")
    with archive.open(name) as member:
        return member.read(size)  # reading without a number would unpack whatever is there, claimed or not


def read_document(archive: zipfile.ZipFile, name: str, most_bytes: int) -> Any:
    """Return the values of a member in JSON.

    Raises UnreadableFile if it has more bytes than that, KeyError if there is none, and ValueError if it is no JSON
    or a number in it is not finite: JSON has no word for those, but `1e999` reads as one.
    """
    return json.loads(read(archive, name, most_bytes), parse_float=_parse_finite, parse_constant=_parse_finite)


def _parse_finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is not a finite number")
    return value


def document_bytes(archive: zipfile.ZipFile) -> int:
    """Return how many bytes a document of JSON in the archive may have."""
    return _FREE_BYTES + _DOCUMENT * _packed_bytes(archive)


def _packed_bytes(archive: zipfile.ZipFile) -> int:
    assert archive.fp is not None
    return os.fstat(archive.fp.fileno()).st_size
