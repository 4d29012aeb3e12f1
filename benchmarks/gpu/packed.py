"""Large columns as text inside a line of JSON; needs no torch."""

from __future__ import annotations

import base64
import json
import lzma
from typing import Any


def pack(value: Any) -> str:
    """JSON, compressed, as text: for the large columns inside a line of JSON."""
    return base64.b85encode(lzma.compress(json.dumps(value, separators=(",", ":")).encode())).decode()


def unpack(text: str) -> Any:
    """The value that `pack` was given."""
    return json.loads(lzma.decompress(base64.b85decode(text)))
