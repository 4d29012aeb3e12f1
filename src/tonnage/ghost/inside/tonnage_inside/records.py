"""Records of the ghost's log (`struct ghost_record`), as NumPy reads them: for the worker, since it takes NumPy."""

from typing import Final

import numpy as np

RECORD: Final = np.dtype(
    {
        "names": ["kind", "mark", "bytes", "address", "address2"],
        "formats": ["u1", "<u4", "<u8", "<u8", "<u8"],
        "offsets": [0, 4, 40, 48, 56],
        "itemsize": 64,
    }
)
"""What is read of a record."""

OF_CARD: Final = (6, 7, 8, 9)
"""Kinds of records: memory of the card is taken or given back, whole or as pages of reserved addresses."""

PINNED: Final = (10, 11)
"""Kinds of records: the same of the host's memory."""
