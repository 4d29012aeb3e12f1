"""tonnage: know what your GPUs can carry before you load them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tonnage.api import estimate, plan
    from tonnage.device import Cluster, Device
    from tonnage.dryrun import run as dry_run
    from tonnage.errors import TonnageError
    from tonnage.estimates import Estimate
    from tonnage.ghost.pool import Worker
    from tonnage.job import Job
    from tonnage.plans import Plan
    from tonnage.solution import Solution
    from tonnage.trace import Trace

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
    "dry_run",
    "estimate",
    "plan",
]

_HOME = {
    "Cluster": "tonnage.device",
    "Device": "tonnage.device",
    "Estimate": "tonnage.estimates",
    "Job": "tonnage.job",
    "Plan": "tonnage.plans",
    "Solution": "tonnage.solution",
    "TonnageError": "tonnage.errors",
    "Trace": "tonnage.trace",
    "Worker": "tonnage.ghost.pool",
    "dry_run": "tonnage.dryrun",
    "estimate": "tonnage.api",
    "plan": "tonnage.api",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import tonnage` costs nothing."""
    if name not in _HOME:
        raise AttributeError(f"module 'tonnage' has no attribute {name!r}")
    module = import_module(_HOME[name])
    value = globals()[name] = getattr(module, "run" if name == "dry_run" else name)
    return value
