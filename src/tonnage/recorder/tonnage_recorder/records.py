"""Records of the ghost's log (`struct ghost_record`), as NumPy reads them: for the worker, since it takes NumPy."""

from typing import Final

import numpy as np

from . import layout

_READ: Final = ("kind", "mark", "bytes", "address", "address2")

RECORD: Final = np.dtype(
    {
        "names": list(_READ),
        "formats": [f"<{dict(layout.FIELDS)[name]}" for name in _READ],
        "offsets": [layout.offset_of(name) for name in _READ],
        "itemsize": layout.RECORD.size,
    }
)
"""What is read of a record."""

OF_CARD: Final = (6, 7, 8, 9)
"""Kinds of records: memory of the card is taken or given back, whole or as pages of reserved addresses."""

PINNED: Final = (10, 11)
"""Kinds of records: the same of the host's memory."""
