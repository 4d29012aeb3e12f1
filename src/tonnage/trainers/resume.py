"""Files of a trainer's checkpoints: what a run saves ends with it, what it resumes from an earlier run has saved.

The torch half of the engines, as `given` is.
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
from tonnage.trainers.hf_trainer.run import parts_or_whole

if TYPE_CHECKING:
    from tonnage.job import Job
    from tonnage.plans import Plan
    from tonnage.step.world import World

Run = Callable[["Job", "World", int, str], object]
"""Trains a job on a rank for so many steps, with its files in a folder."""


def trained(job: Job, world: World, steps: int, run: Run, kept: str = "full") -> object:
    """What `run` returns; a job that resumes finds in the folder what earlier runs of one step have `kept`.

    These are of rank 0, which saves what all ranks share, and of this one.
    """
    with tempfile.TemporaryDirectory(prefix="tonnage-") as folder, _without_values():
        if job.resume != "none":
            earlier = replace(
                job, resume="none", save_checkpoint=kept, eval_batch=None, eval_logits=None, generate=None
            )
            for rank in dict.fromkeys((0, world.rank)):
                _in_a_fork(partial(run, earlier, replace(world, rank=rank), 1, folder))
        return run(job, world, steps, folder)


def check_rank(job: Job, plan: Plan, world: World) -> None:
    """Of whole files of what FSDP2 divides rank 0 reads all, and sends the others pickles of what they will get.

    Raises CannotEstimate on one of these.
    """
    if job.resume != "none" and plan.shard in SHARDING and parts_or_whole(job, plan) == "full" and world.rank != 0:
        raise CannotEstimate(
            f"What rank {world.rank} is sent of whole files is not known: rank 0 reads them; choose rank 0, which "
            "holds no less, or save-checkpoint sharded."
        )


@contextmanager
def _without_values() -> Iterator[None]:
    """What is saved inside is in files that end with the run and hold no values."""
    from tonnage_inside.saves import Saves

    with tempfile.TemporaryDirectory(prefix="tonnage-") as folder:
        Saves(torch, Path(folder), lambda assumption: None).install()
        yield


def _in_a_fork(earlier: Callable[[], object]) -> None:
    """Which leaves files alone.  Raises CannotEstimate where it comes to no end."""
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
