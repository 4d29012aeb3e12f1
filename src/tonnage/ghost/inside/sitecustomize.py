"""Installs the watch in every process of a dry-run: Python imports this at start-up, first on PYTHONPATH.

Afterwards it runs the environment's own sitecustomize, which this file shadows.
"""

import importlib.machinery
import importlib.util
import os
import sys


def _run_shadowed() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    elsewhere = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("TONNAGE_OUT"):
    from tonnage_inside import bootstrap

    bootstrap.install()

_run_shadowed()
