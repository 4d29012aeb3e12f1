"""tonnage: know what your GPUs can carry before you load them.

`tonnage.estimate` predicts the memory and time of a training step, `tonnage.plan` finds the fastest plan that fits,
`tonnage.apply` trains a network by it, `tonnage.tune` measures plans on this machine, and `tonnage.dry_run` runs a
training script on ghost GPUs.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if sys.version_info < (3, 11):  # noqa: UP036 - a checkout on the path runs without pip's check
    _NEEDED = (
        f"tonnage needs Python 3.11 or newer, and this is {sys.version.split()[0]}; run it with another one, such as "
        "python3.12 -m tonnage."
    )
    if sys.argv[:1] == ["-m"]:
        print(f"error: {_NEEDED}", file=sys.stderr)
        raise SystemExit(2)
    raise ImportError(_NEEDED)

if TYPE_CHECKING:
    from tonnage.api import apply, dry_run, estimate, plan, tune
    from tonnage.cluster import Cluster, Device
    from tonnage.errors import TonnageError
    from tonnage.estimates.estimate import Estimate
    from tonnage.job import Job
    from tonnage.planner.solution import Solution
    from tonnage.plans import Plan
    from tonnage.trace.trace import Trace
    from tonnage.workers.worker import Worker

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "Device",
    "Estimate",
    "Job",
    "Plan",
    "Solution",
    "TonnageError",
    "Trace",
    "Worker",
    "apply",
    "dry_run",
    "estimate",
    "plan",
    "tune",
]

_MODULES = {
    "Cluster": "tonnage.catalog.devices",
    "Device": "tonnage.catalog.devices",
    "Estimate": "tonnage.estimates.estimate",
    "Job": "tonnage.job",
    "Plan": "tonnage.plans",
    "Solution": "tonnage.planner.solution",
    "TonnageError": "tonnage.errors",
    "Trace": "tonnage.trace.trace",
    "Worker": "tonnage.workers.worker",
    "apply": "tonnage.api",
    "dry_run": "tonnage.api",
    "estimate": "tonnage.api",
    "plan": "tonnage.api",
    "tune": "tonnage.api",
}


def __dir__() -> list[str]:
    """Return the public names, of which most are not imported yet."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import tonnage` stays cheap."""
    if name not in _MODULES:
        raise AttributeError(f"module 'tonnage' has no attribute {name!r}")
    import_module("tonnage.api")  # which lets values print as reports
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value
