"""Networks whose course depends on integers on the card take on a ghost the course that they take on the host."""

from collections.abc import Iterator

import pytest

from networks import SEEING, tiny_job
from tonnage.device import parse_cluster
from tonnage.ghost.pool import Worker
from tonnage.ghost.wheel import Torch
from tonnage.plans import Plan

pytestmark = pytest.mark.ghost


@pytest.fixture(scope="module")
def worker(torch_build: Torch) -> Iterator[Worker]:
    with Worker() as worker:
        yield worker


@pytest.mark.parametrize("name", [*SEEING, "gemma3", "whisper", "deepseek_v3"])
def test_nothing_about_sizes_is_assumed(worker: Worker, name: str) -> None:
    """Their own checks of tokens against features hold; tests/test_model.py trains the same batches on the host."""
    trace = worker.run(tiny_job(name), Plan(), parse_cluster("h100-80gb"), steps=1)
    assert trace.unknown_calls == {}
    made_up = ("checked", "selects every", "balanced")
    assert [text for text in trace.assumed if any(word in text for word in made_up)] == []
    pictures = [text for text in trace.assumed if "every sequence holds 1 image of" in text]
    assert len(pictures) == (name in SEEING or name == "gemma3")
