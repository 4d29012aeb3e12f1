"""Files of a trainer's checkpoints: they end with the run, and a run that resumes gets those of an earlier run.

The torch half of the engines, as `common` is.
"""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tonnage.errors import CannotEstimate
from tonnage.mesh import SHARDING
from tonnage.trainers.accelerate.plugin import checkpoint_kind

if TYPE_CHECKING:
    from tonnage.job import Job, SaveCheckpoint
    from tonnage.plans import Plan
    from tonnage.step.world import World

Run = Callable[["Job", "World", int, str], object]
"""Trains a job on a rank for so many steps, with its files in a folder."""


def run_with_files(job: Job, world: World, steps: int, run: Run, kind: SaveCheckpoint = "full") -> object:
    """Return what `run` returns; a job that resumes finds in its folder the files of earlier runs of one step.

    `kind` is that of these files, as in `save_checkpoint`.  The earlier runs are of rank 0, which saves what all
    ranks share, and of this rank.
    """
    with tempfile.TemporaryDirectory(prefix="tonnage-") as folder, _without_values():
        if job.resume != "none":
            earlier = replace(
                job, resume="none", save_checkpoint=kind, eval_batch=None, eval_logits=None, generate=None
            )
            for rank in dict.fromkeys((0, world.rank)):
                _run_in_fork(partial(run, earlier, replace(world, rank=rank), 1, folder))
        return run(job, world, steps, folder)


def check_rank(job: Job, plan: Plan, world: World) -> None:
    """Raise CannotEstimate on a rank that would be sent its part of whole files.

    Of whole files of what FSDP2 divides, rank 0 reads all and sends the other ranks pickles of their parts.
    """
    if job.resume != "none" and plan.shard in SHARDING and checkpoint_kind(job, plan) == "full" and world.rank != 0:
        raise CannotEstimate(
            f"What rank {world.rank} is sent of whole files is not known: rank 0 reads them; choose rank 0, which "
            "holds no less, or save-checkpoint sharded."
        )


@contextmanager
def _without_values() -> Iterator[None]:
    """Have files that are saved inside hold no values, and end with the run."""
    from tonnage_inside.saves import Saves

    with tempfile.TemporaryDirectory(prefix="tonnage-") as folder:
        Saves(torch, Path(folder), lambda assumption: None).install()
        yield


def _run_in_fork(earlier: Callable[[], object]) -> None:
    """Run it in a fork, which leaves nothing but files.  Raises CannotEstimate where it fails."""
    child = os.fork()
    if child == 0:
        try:
            earlier()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        raise CannotEstimate("The run whose checkpoint would be resumed does not end; leave resume out to see why.")
