"""Steps that are made ready on the CPU, in a process group of one rank where they want one."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tonnage.job import Job
from tonnage.plans import Plan
from tonnage.step.step import ReadyStep
from tonnage.techniques import build


def ready(job: Job, **choices: Any) -> ReadyStep:
    """With weights that are the same each time; in fp32 unless the plan says otherwise."""
    torch.manual_seed(0)
    return build(job, Plan(**{"precision": "fp32", **choices}), device="cpu", initialise=True)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """For a module that imports it: no test leaves its process group to the next."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
