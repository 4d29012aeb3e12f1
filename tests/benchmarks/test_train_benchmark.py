"""The training benchmark: contestants run on a ghost, and the report judges the aims; no GPU is needed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from networks import TINY

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def record(contestant: str, speed: float | None, **more: Any) -> dict[str, Any]:
    usual = {"allocated_bytes": 2**30, "reserved_bytes": 2**30, "losses": [5.0], "mfu": 0.4, "steps": 10}
    return {"contest": {"name": "job"}, "contestant": contestant, "tokens_per_second": speed, **usual, **more}


def test_every_job_has_its_contestants_and_settings() -> None:
    import contests

    names = [contest.name for contest in contests.CONTESTS]
    assert len(set(names)) == len(names)
    for contest in contests.CONTESTS:
        listed = contests.list_contestants(contest)
        assert len(set(listed)) == len(listed) > 0
        rows = contest.micro_batch * contest.grad_accum
        for contestant in listed:
            options = contests.plan_of(contest, contestant)
            assert options["micro_batch"] * options["grad_accum"] == rows


def test_the_report_judges_the_aims() -> None:
    import train

    page = train.report(
        [
            record("trainer", 100.0),
            record("trl", None, error="trl is not installed"),
            record("tonnage, the Trainer's settings", 99.0, predicted_allocated_bytes=2**30 + 2**20),
            record("tonnage: micro-batch 8", 150.0),
            record("tonnage planned", 147.0, predicted_allocated_bytes=2**30),
            record("trainer checkpointed", None, oom="CUDA out of memory", steps=1),
        ]
    )
    assert "the Trainer's settings: 0.99 times the Trainer's defaults; the aim is 1.0" in page
    assert "tonnage planned: 1.47 times" in page
    assert "98.0% of the grid's best" in page
    assert "memory: at most 0.10% from the estimate" in page
    assert "| trl | failed: trl is not installed |" in page
    assert "out of memory after 1 steps" in page


@pytest.mark.ghost
def test_contestants_run_on_a_ghost(tmp_path: Path, torch_build: object) -> None:
    """The Trainer and tonnage under the same settings, each in a process; three processes of torch take 20 s."""
    import contests

    import train

    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(TINY["llama"]))
    contest = contests.Contest(
        name="tiny", model=str(tmp_path / "tiny"), seq_len=32, against=("trainer",), searched=False
    )
    out = tmp_path / "out.jsonl"
    records = list(train.compete([contest], out, tmp_path / "work", "ghost", "a100-40gb", float("inf")))
    assert [one["contestant"] for one in records] == ["trainer", "tonnage, the Trainer's settings"]
    for one in records:
        assert "error" not in one, one
        assert one["steps"] == contests.WARM_STEPS + contests.TIMED_STEPS
        assert one["tokens_per_second"] is None  # of a ghost
        assert one["losses"] == []
    own = records[1]
    assert own["allocated_bytes"] == own["predicted_allocated_bytes"]
    assert own["reserved_bytes"] == own["predicted_reserved_bytes"]
    assert "+0.00%" in train.report(records)
    assert list(train.compete([contest], out, tmp_path / "work", "ghost", "a100-40gb", float("inf"))) == []
    one_more = replace(contest, name="another", against=("trl",))
    if contests.missing_package("trl"):
        first = next(iter(train.compete([one_more], out, tmp_path / "work", "ghost", "a100-40gb", float("inf"))))
        assert first["error"] == "trl is not installed"
