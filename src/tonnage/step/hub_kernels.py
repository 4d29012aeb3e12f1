"""Kernels that transformers would fetch from the Hub and import while a network is built.

With the package `kernels` installed, a configuration's type is enough for that: Mamba's fetch `mamba-ssm`.  Without
it, transformers runs its reference code, and the report says so.
"""

import sys


def hide() -> None:
    """Make the package `kernels` look as if it were not installed, if transformers has not been imported yet.

    Meant for processes of tonnage's own: what is imported later cannot fetch anything.
    """
    if "transformers" not in sys.modules:
        sys.modules["kernels"] = None  # type: ignore[assignment]  # by which Python finds no such module
