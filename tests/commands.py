"""How a test runs tonnage as a program of its own."""

import sys

TONNAGE = [sys.executable, "-m", "tonnage"]
