"""Experiment trackers: a dry-run reports to none, because its losses are zeros.

The variables are the trackers' own; each was tried with wandb 0.31, mlflow 3.17, comet_ml 3.58, clearml 2.1,
swanlab 0.10, neptune 1.14, neptune-scale 0.30 and trackio 0.43.  Settings in the program's own code
(`wandb.init(mode="online")`, `mlflow.set_tracking_uri`) override them.
"""

from collections.abc import Mapping
from pathlib import Path

_OFF = ("disabled", "offline", "dryrun")
"""Values of WANDB_MODE that send nothing."""


def offline(folder: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep trackers offline and, if they have a setting for it, write into `folder`."""
    path = str(folder)
    mode = inherited.get("WANDB_MODE", "").lower()
    return {
        "WANDB_MODE": mode if mode in _OFF else "offline",
        "WANDB_DIR": path,
        "MLFLOW_TRACKING_URI": (folder / "mlflow").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "COMET_START_ONLINE": "0",
        "COMET_OFFLINE_DIRECTORY": path,
        "CLEARML_OFFLINE_MODE": "1",
        "SWANLAB_MODE": "disabled",
        "NEPTUNE_MODE": "offline",
        "NEPTUNE_LOG_DIRECTORY": path,
        "TRACKIO_DIR": path,
    }
