"""How a test runs tonnage, and other programs, in processes of their own."""

import os
import sys
from pathlib import Path

TONNAGE = [sys.executable, "-m", "tonnage"]

_SOON = Path(__file__).parent / "programs" / "soon"
SOON = {"PYTHONPATH": os.pathsep.join(filter(None, [str(_SOON), os.environ.get("PYTHONPATH")]))}
"""Variables of Pythons that spare themselves their full looks for garbage."""
