"""Headers of safetensors files: names, dtypes and shapes of the tensors of a model folder, without their data.

A file begins with the length of a JSON header (8 bytes, little endian), then the header, then the data (the format's
own README: github.com/huggingface/safetensors).  Files come from anywhere: every number in them is checked before it
is used, and no more than the header is read.
"""

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final, TypeGuard

from tonnage.errors import UnreadableModel
from tonnage.units import MIB

LARGEST_HEADER_BYTES: Final = 100 * MIB
"""Limit of the format itself."""

WHOLE: Final = "model.safetensors"
"""File that holds all weights, where they are not divided among several; its index names the others."""

MOST_FILES: Final = 4096
_PART: Final = re.compile(r"-of-(\d{1,6})\.safetensors$")
_MOST_DIMENSIONS: Final = 16
_LARGEST_DIMENSION: Final = 2**40

ELEMENT_BITS: Final = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
    **{"I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64},
}
"""Bits of an element of each dtype."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file."""

    name: str
    dtype: str
    """One of ELEMENT_BITS."""
    shape: tuple[int, ...]
    bytes: int
    """Bytes of its data."""


def read_folder(folder: Path) -> tuple[StoredTensor, ...]:
    """Return the tensors of the safetensors files of a folder; none where there is no such file.

    These are the files that its index names, or one file for all, or else every such file.  Raises UnreadableModel
    for a file that is damaged or lacks, or a tensor that several files hold.
    """
    files = _indexed_files(folder)
    if files is None:
        files = [folder / WHOLE] if (folder / WHOLE).is_file() else sorted(folder.glob("*.safetensors"))
        parts = [int(part[1]) for part in (_PART.search(file.name) for file in files) if part is not None]
        if len(parts) < max(parts, default=0):
            raise UnreadableModel(f"{str(folder)!r} has {len(parts):,} of {max(parts):,} parts, by their names.")
    if len(files) > MOST_FILES:
        raise UnreadableModel(
            f"{str(folder)!r} has {len(files):,} safetensors files; at most {MOST_FILES:,} are read."
        )
    found: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in read_header(file):
            if tensor.name in found:
                raise UnreadableModel(f"{str(folder)!r}: two files hold the tensor {tensor.name[:80]!r}.")
            found[tensor.name] = tensor
    return tuple(found.values())


def _indexed_files(folder: Path) -> list[Path] | None:
    """Return the files that the index of a folder names; None without an index."""
    index = folder / f"{WHOLE}.index.json"
    if not index.is_file():
        return None
    try:
        if index.stat().st_size > LARGEST_HEADER_BYTES:
            raise UnreadableModel(f"{str(index)!r} is larger than {LARGEST_HEADER_BYTES // MIB} MiB.")
        names = {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except OSError as error:
        raise UnreadableModel(f"{str(index)!r} cannot be read: {error.strerror or type(error).__name__}.") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UnreadableModel(f"{str(index)!r} is no index: it has no weight_map of tensors and files.") from None
    here = {file.name: file for file in folder.glob("*.safetensors")}
    lacking = sorted(names - here.keys())
    if lacking:
        raise UnreadableModel(
            f"{str(folder)!r} lacks {len(lacking):,} of the {len(names):,} files that its index names, such as "
            f"{lacking[0][:80]!r}."
        )
    return [here[name] for name in sorted(names)]


def read_header(file: Path) -> tuple[StoredTensor, ...]:
    """Return the tensors of one file.  Raises UnreadableModel for a header that cannot be that of the file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= min(LARGEST_HEADER_BYTES, size - 8):
                raise UnreadableModel(
                    f"{str(file)!r} is not a safetensors file: its header would have {length:,} bytes, the file has "
                    f"{size:,}."
                )
            content = stream.read(length)
    except OSError as error:
        raise UnreadableModel(f"{str(file)!r} cannot be read: {error.strerror or type(error).__name__}.") from None
    try:
        header = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError):
        raise UnreadableModel(f"{str(file)!r} has a header that is not JSON.") from None
    if not isinstance(header, dict):
        raise UnreadableModel(f"{str(file)!r} has a header without names.")
    return tuple(_read_tensors(file, header, size - 8 - length))


def _read_tensors(file: Path, header: dict[str, Any], data_bytes: int) -> Iterator[StoredTensor]:
    """Yield the tensors of a header whose data must fill `data_bytes` without gaps or overlaps."""
    ranges = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape, offsets, dtype = _read_entry(file, name, entry)
        stored = offsets[1] - offsets[0]
        if stored != (prod(shape) * ELEMENT_BITS[dtype] + 7) // 8:
            raise UnreadableModel(
                f"{str(file)!r}: the tensor {name[:80]!r} has {stored:,} bytes, not those of its shape."
            )
        ranges.append(offsets)
        yield StoredTensor(name, dtype, shape, stored)
    end = 0
    for first, last in sorted(ranges):
        if first != end:
            raise UnreadableModel(f"{str(file)!r}: the tensors do not follow one another at byte {end:,}.")
        end = last
    if end != data_bytes:
        raise UnreadableModel(f"{str(file)!r} has {data_bytes:,} bytes of tensors; its header says {end:,}.")


def _read_entry(file: Path, name: str, entry: Any) -> tuple[tuple[int, ...], tuple[int, int], str]:
    """Return the shape, the byte range and the dtype of an entry of a header."""

    def refuse(what: str) -> UnreadableModel:
        return UnreadableModel(f"{str(file)!r}: the tensor {name[:80]!r} has {what}.")

    if not isinstance(entry, dict):
        raise refuse("no description")
    shape, offsets, dtype = entry.get("shape"), entry.get("data_offsets"), entry.get("dtype")
    if not _are_counts(shape, _MOST_DIMENSIONS, _LARGEST_DIMENSION):
        raise refuse("no shape")
    if not _are_counts(offsets, 2, 2**63) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise refuse("no place in the file")
    if not isinstance(dtype, str) or dtype not in ELEMENT_BITS:
        raise refuse(f"the unknown dtype {str(dtype)[:20]!r}")
    return tuple(shape), (offsets[0], offsets[1]), dtype


def _are_counts(value: Any, most: int, limit: int) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) <= most and all(type(n) is int and 0 <= n <= limit for n in value)
