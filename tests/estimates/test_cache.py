"""Cached Traces: found again for the same request, and for no other."""

import json
import zipfile
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.estimates import cache, predict
from tonnage.job import Job
from tonnage.model import ModelRef
from tonnage.plans import Plan
from tonnage.recorder.tonnage_recorder.record_layout import EVENT_COLUMNS
from tonnage.trace import trace
from tonnage.trace.trace import Mark, Trace
from tonnage.workers.worker import request

CARD = parse_cluster("t4")
MODEL = ModelRef(name="mine", kind="config", config={"model_type": "llama", "hidden_size": 64})
JOB = Job(model=MODEL, seq_len=64)
TRACE = Trace(
    source="ghost",
    versions={"torch": "2.13.0"},
    device={"name": "Tesla T4"},
    steps=3,
    marks=(Mark(step=0, phase="load", module=""),),
    event_columns={name: array("q", [0, 0] if name != "size" else [512, 1024]) for name in EVENT_COLUMNS},
    log=bytes(64),
)


class Counting:
    """A worker that counts the runs it is asked for."""

    torch_version: str | None = None
    trace_file: Path | None = None

    def __init__(self) -> None:
        self.runs = 0

    def run(self, *asked: Any, **options: Any) -> Trace:
        self.runs += 1
        return TRACE


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide an empty cache."""
    folder = tmp_path / "traces"
    monkeypatch.setattr(cache, "folder", lambda: folder)
    return folder


def key(job: Job = JOB, plan: Plan | None = None, gpu: str = "t4", version: str | None = None, **options: int) -> str:
    asked = request(job, plan or Plan(), parse_cluster(gpu), **{"rank": 0, "steps": 3, **options})
    found = cache.key(asked, version)
    assert found is not None
    return found


def test_what_was_kept_is_found_as_it_was() -> None:
    cache.keep(key(), TRACE)
    assert cache.find(key()) == TRACE


def test_only_the_same_question_has_the_same_key(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [
        key(replace(JOB, seq_len=128)),
        key(replace(JOB, lengths=("16", "32"))),
        key(replace(JOB, model=replace(MODEL, config={**MODEL.config, "hidden_size": 128}))),
        key(plan=Plan(precision="fp32")),
        key(gpu="l4"),
        key(gpu="8xt4"),
        key(gpu="2xt4", rank=0),
        key(gpu="2xt4", rank=1),
        key(steps=2),
        key(version="2.12.0"),
    ]
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    others.append(key())
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    assert len({key(), *others}) == len(others) + 1


def test_a_name_is_no_part_of_the_question() -> None:
    renamed = replace(MODEL, name="yours", source="a folder", config={**MODEL.config, "_name_or_path": "/there"})
    assert key(replace(JOB, model=renamed)) == key()


def test_another_installed_version_is_another_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    before = key()
    (tmp_path / "peft-99.0.dist-info").mkdir()
    assert key() != before


def test_libraries_in_flux_and_factories_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(JOB, Plan(), CARD, rank=0, steps=3)
    factory = ModelRef(name="mine:net", kind="factory", factory="mine:net")
    assert cache.key(request(replace(JOB, model=factory), Plan(), CARD, rank=0, steps=3)) is None
    info = tmp_path / "transformers-99.0.dist-info"
    info.mkdir()
    (info / "direct_url.json").write_text(json.dumps({"url": "file:///src", "dir_info": {"editable": True}}))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert cache.key(asked) is None


def test_a_damaged_trace_is_run_again_and_replaced(own_folder: Path) -> None:
    cache.keep(key(), TRACE)
    (file,) = own_folder.iterdir()
    file.write_bytes(file.read_bytes()[:-100])
    assert cache.find(key()) is None
    cache.keep(key(), TRACE)
    assert cache.find(key()) == TRACE


def test_what_was_not_used_for_longest_goes_first(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [key(steps=steps) for steps in (1, 2, 3)]
    cache.keep(keys[0], TRACE)
    (file,) = own_folder.iterdir()
    monkeypatch.setattr(cache, "MOST_BYTES", 2 * file.stat().st_size)
    cache.keep(keys[1], TRACE)
    assert cache.find(keys[0]) is not None  # used after the second was kept
    cache.keep(keys[2], TRACE)
    assert [cache.find(each) is not None for each in keys] == [True, False, True]


def test_the_shelf_is_not_looked_through_for_each_trace(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    make_room = cache._make_room
    monkeypatch.setattr(cache, "_make_room", lambda: (looks.append(1), make_room()))
    cache.keep(key(), TRACE)
    (file,) = own_folder.iterdir()
    monkeypatch.setattr(cache, "MOST_BYTES", 10 * file.stat().st_size)
    monkeypatch.setattr(cache, "_CHECKS_PER_CAPACITY", 2)  # each time that half of it was added
    for steps in range(2, 20):
        cache.keep(key(steps=steps), TRACE)
    assert 1 < len(looks) < 6
    assert 10 <= len(list(own_folder.iterdir())) <= 15


def test_a_folder_that_cannot_be_written_keeps_nothing(own_folder: Path) -> None:
    own_folder.write_text("a file where the folder should be")
    cache.keep(key(), TRACE)
    assert cache.find(key()) is None


def test_a_repeated_estimate_runs_nothing_and_says_so() -> None:
    worker = Counting()
    first = predict.estimate(Case(JOB, Plan(), CARD), worker=worker)
    again = predict.estimate(Case(JOB, Plan(), CARD), worker=worker)
    assert worker.runs == 1
    assert again.traces == first.traces
    *run, kept = again.estimate.coverage.run
    assert "earlier run" in kept
    coverage = replace(again.estimate.coverage, run=tuple(run))
    assert replace(again.estimate, coverage=coverage) == first.estimate


def test_a_file_that_a_worker_has_written_is_taken_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    with zipfile.ZipFile(file, "w") as archive:
        trace.write(TRACE, archive)
    written = file.read_bytes()
    cache.keep("a", TRACE, file)
    assert not file.exists()
    assert cache.find("a") == TRACE
    assert (cache.folder() / "a.trace").read_bytes() == written


def test_where_it_cannot_be_moved_it_is_written(tmp_path: Path) -> None:
    cache.keep("a", TRACE, tmp_path / "on another disk")
    assert cache.find("a") == TRACE


def test_fresh_runs_again() -> None:
    worker = Counting()
    for fresh in (False, True, False):
        predict.estimate(Case(JOB, Plan(), CARD), worker=worker, fresh=fresh)
    assert worker.runs == 2


def test_metas_answers_are_kept_although_torch_sets_its_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing torch's compiler names the folder of its kernels in the environment."""
    runs = []
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)

    def run(case: Case, **options: Any) -> Trace:
        runs.append(case)
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/torchinductor")
        return replace(TRACE, source="meta")

    monkeypatch.setattr("tonnage.meta.step.run", run)
    for _ in range(2):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        again = predict.estimate(Case(JOB, Plan(), CARD), source="meta")
    assert len(runs) == 1
    assert "earlier run" in again.estimate.coverage.run[-1]
