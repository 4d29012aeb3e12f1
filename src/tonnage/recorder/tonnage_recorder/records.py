"""Records of the ghost's log (`struct ghost_record`) as NumPy arrays, for the worker, which has NumPy."""

from typing import Final

import numpy as np

from . import record_layout

_READ: Final = ("kind", "mark", "bytes", "address", "address2")

RECORD: Final = np.dtype(
    {
        "names": list(_READ),
        "formats": [f"<{dict(record_layout.FIELDS)[name]}" for name in _READ],
        "offsets": [record_layout.offset_of(name) for name in _READ],
        "itemsize": record_layout.RECORD.size,
    }
)
"""NumPy type of a record, with the fields that are read."""

OF_CARD: Final = (6, 7, 8, 9)
"""Kinds of records for memory of the card that is allocated or freed, whole or as pages of reserved addresses."""

PINNED: Final = (10, 11)
"""Kinds of records for pinned memory of the host that is allocated or freed."""
