"""Members of archives whose headers say other sizes than there are."""

import io
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tonnage.errors import UnreadableFile
from tonnage.trace import members
from tonnage.units import MIB

ENTRY = b"PK\x01\x02"
"""Beginning of a member's entry, whose sizes count."""


def write(path: Path, content: bytes, **claimed: int) -> zipfile.ZipFile:
    """Return an archive of one member whose entry claims other sizes."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("one", content)
    data = bytearray(packed.getvalue())
    for name, offset in (("packed", 20), ("unpacked", 24)):
        if name in claimed:
            struct.pack_into("<I", data, data.index(ENTRY) + offset, claimed[name])
    path.write_bytes(data)
    return zipfile.ZipFile(path)


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the most memory that Python had at once during a call that may fail."""
    tracemalloc.start()
    try:
        call()
    except zipfile.BadZipFile:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return peak


def test_a_member_is_read_whole(tmp_path: Path) -> None:
    with write(tmp_path / "whole", b"x" * 70_000) as archive:
        assert members.read(archive, "one", MIB) == b"x" * 70_000
    with write(tmp_path / "empty", b"") as archive:
        assert members.read(archive, "one", MIB) == b""


@pytest.mark.parametrize(
    "claimed", [{"unpacked": 112}, {"packed": 2**32 - 2}, {"packed": 2**32 - 2, "unpacked": 112}]
)
def test_memory_follows_what_a_member_claims_to_hold(tmp_path: Path, claimed: dict[str, int]) -> None:
    size = MIB if "unpacked" not in claimed else 64 * MIB
    with write(tmp_path / "claims", bytes(size), **claimed) as archive:
        assert peak_bytes(lambda: members.read(archive, "one", MIB)) < 4 * MIB


def test_reading_by_zipfile_alone_takes_what_is_there(tmp_path: Path) -> None:
    with write(tmp_path / "claims", bytes(64 * MIB), unpacked=112) as archive:
        assert peak_bytes(lambda: archive.read("one")) > 32 * MIB


def test_a_damaged_member_is_noticed(tmp_path: Path) -> None:
    with write(tmp_path / "damaged", bytes(1000), unpacked=112) as archive, pytest.raises(zipfile.BadZipFile):
        members.read(archive, "one", MIB)


def test_a_member_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with write(tmp_path / "large", b"x" * 100) as archive, pytest.raises(UnreadableFile, match="limit"):
        members.read(archive, "one", 99)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "Infinity", "NaN"])
def test_a_number_that_is_not_finite_is_no_value(tmp_path: Path, number: str) -> None:
    """It could not be written again, and no peak or time is one."""
    path = tmp_path / "file.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("document.json", f'{{"size": [1.5, {number}]}}')
    with zipfile.ZipFile(path) as archive, pytest.raises(ValueError, match="not a finite number"):
        members.read_document(archive, "document.json", 100)
