"""Names that a shared library exports, read from the file itself."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

DYNAMIC_SYMBOLS: Final = 11
"""Section type SHT_DYNSYM of the ELF format."""
SECTION: Final = struct.Struct("<IIQQQQIIQQ")
SYMBOL: Final = struct.Struct("<IBBHQQ")


def exported_symbols(path: Path) -> list[str]:
    """Defined names of the dynamic symbol table of a 64-bit little-endian ELF file, sorted; [] for another file."""
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        return []
    offset = struct.unpack_from("<Q", data, 0x28)[0]
    size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [SECTION.unpack_from(data, offset + size * index) for index in range(count)]
    names: set[str] = set()
    for section in sections:
        if section[1] == DYNAMIC_SYMBOLS:
            names |= _defined(data, start=section[4], size_bytes=section[5], strings=sections[section[6]][4])
    return sorted(names)


def _defined(data: bytes, *, start: int, size_bytes: int, strings: int) -> set[str]:
    names = set()
    for name, _, _, section, _, _ in SYMBOL.iter_unpack(data[start : start + size_bytes]):
        if section and name:
            names.add(data[strings + name : data.index(b"\0", strings + name)].decode())
    return names
