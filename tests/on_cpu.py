"""Steps on the CPU, in a process group of one rank if they need one."""

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
    """Return a ready step with the same weights each time, in fp32 unless the plan says otherwise."""
    torch.manual_seed(0)
    return build(job, Plan(**{"precision": "fp32", **choices}), device="cpu", initialise=True)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Destroy the process group after each test of a module that imports this."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
