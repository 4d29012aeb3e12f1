"""What a resumed run finds: files of earlier runs, in forks."""

import contextlib
from pathlib import Path

import pytest

from networks import tiny_job
from tonnage.errors import CannotEstimate
from tonnage.job import Job
from tonnage.plans import Plan
from tonnage.step.world import World
from tonnage.trainers import resume


@pytest.fixture(autouse=True)
def _real_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "_without_values", contextlib.nullcontext)


def world(rank: int) -> World:
    import torch

    return World(size=4, rank=rank, gpus_per_node=8, device=torch.device("cpu"))


def found(job: Job, rank: int) -> object:
    """What lies in the folder when the job itself is run."""

    def run(job: Job, world: World, steps: int, folder: str) -> object:
        if job.resume == "none":
            said = f"{steps} step, {job.save_checkpoint}, {job.eval_batch}, {job.generate}"
            (Path(folder) / f"rank {world.rank}").write_text(said, encoding="utf-8")
        return {one.name: one.read_text(encoding="utf-8") for one in Path(folder).iterdir()}

    return resume.run_with_files(job, world(rank), 3, run, kind="sharded")


def test_rank_0_and_the_own_have_saved_after_a_step() -> None:
    job = tiny_job(resume="cpu", eval_batch=2, generate=4)
    saved = "1 step, sharded, None, None"
    assert found(job, 0) == {"rank 0": saved}
    assert found(job, 3) == {"rank 0": saved, "rank 3": saved}
    assert found(tiny_job(), 3) == {"rank 3": "3 step, none, None, None"}


def test_an_earlier_run_that_fails_is_told() -> None:
    def run(job: Job, world: World, steps: int, folder: str) -> object:
        raise ValueError

    with pytest.raises(CannotEstimate, match="does not end; leave resume out to see why"):
        resume.run_with_files(tiny_job(resume="cpu"), world(0), 3, run)


def test_other_ranks_are_sent_what_the_first_one_reads() -> None:
    resumed, in_parts = tiny_job(resume="cpu"), tiny_job(resume="cpu", save_checkpoint="sharded")
    fine = ((resumed, "zero3", 0), (resumed, "ddp", 1), (tiny_job(), "zero3", 1), (in_parts, "zero3", 1))
    resume.check_rank(resumed, Plan(shard="zero3", engine="accelerate"), world(1))
    for job, shard, rank in fine:
        resume.check_rank(job, Plan(shard=shard), world(rank))
    with pytest.raises(CannotEstimate, match="choose rank 0, which holds no less"):
        resume.check_rank(resumed, Plan(shard="zero3"), world(1))
