"""What differs between versions of torch.

With the pinned torch: both ways of finding an event's mark, and that they find the same.  With
TONNAGE_TEST_TORCH="2.8.0 2.15.0": the same jobs with these versions too, fetched where they are not cached.
"""

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tonnage
from tonnage.case import Case
from tonnage.catalog import configurations
from tonnage.catalog.devices import parse_cluster
from tonnage.errors import CannotEstimate
from tonnage.estimates import predict
from tonnage.estimates.timeline import timeline
from tonnage.ghost.environment import PATH
from tonnage.job import Job
from tonnage.plans import Plan
from tonnage.script import dry_run as dry_run_module
from tonnage.techniques import checkpointing, environment
from tonnage.trace.trace import Trace
from tonnage.units import MIB
from tonnage.workers.worker import Worker

sys.path.extend(PATH.split(":"))
from tonnage_recorder import written

OTHERS = os.environ.get("TONNAGE_TEST_TORCH", "").split()
PROGRAMS = Path(__file__).parents[1] / "programs"
EXAMPLE = Path(__file__).parents[2] / "examples" / "lora.py"


# -- marks


def event(action: str, note: str | None = None) -> dict[str, Any]:
    return {"action": action} | ({} if note is None else {"user_metadata": note})


def marks(events: list[dict[str, Any]], positions: dict[int, int], ooms: tuple[int, ...] = ()) -> list[int]:
    watch = SimpleNamespace(positions=positions, oom_marks=ooms, early_block_count=0)
    return list(written.event_marks(written.fields_of(events), watch))


def test_marks_by_the_allocators_notes() -> None:
    events = [event("alloc", "2"), event("alloc", ""), event("free_requested", "5"), event("alloc", "3")]
    assert marks(events, {0: 0}) == [2, 2, 5, 5]


def test_marks_by_counting_where_there_are_no_notes() -> None:
    events = [
        *(event("segment_alloc"), event("alloc"), event("alloc")),
        *(event("free_requested"), event("free_completed")),
        *(event("segment_map"), event("alloc")),
    ]
    assert marks(events, {1: 0, 2: 1, 4: 3}) == [1, 1, 2, 2, 2, 4, 4]


def test_what_comes_after_running_out_of_memory_is_not_before() -> None:
    events = [event("alloc"), event("segment_free"), event("oom"), event("free_requested"), event("alloc")]
    assert marks(events, {0: 0, 1: 1, 2: 1, 3: 2}, ooms=(1,)) == [0, 1, 1, 2, 3]


def test_a_thread_that_has_announced_nothing_is_overtaken_by_the_count() -> None:
    events = [event("alloc", "7"), event("alloc", "3"), event("alloc", "9")]
    assert marks(events, {0: 0, 8: 1}) == [7, 8, 9]


def marks_one_by_one(events: list[dict[str, Any]], positions: dict[int, int], ooms: list[int]) -> list[int]:
    """The same by going through the events once, as they happened."""
    waiting, ceilings = list(positions.items()), [*ooms, sys.maxsize]
    latest = seen = 0
    found = []
    for each in events:
        latest = max(latest, int(each.get("user_metadata") or 0))
        while waiting and waiting[0][1] <= seen and waiting[0][0] <= ceilings[0]:
            if each["action"] == "free_completed":
                break
            latest = max(latest, waiting.pop(0)[0])
        found.append(latest)
        if each["action"] == "oom" and len(ceilings) > 1:
            ceilings.pop(0)
        seen += each["action"] in ("alloc", "free_requested")
    return found


@given(st.data())
def test_marks_are_those_of_events_one_by_one(data: st.DataObject) -> None:
    actions = st.sampled_from(("alloc", "free_requested", "free_completed", "segment_alloc", "oom"))
    notes = st.one_of(st.none(), st.sampled_from(("", "1", "4", "9")))
    events = data.draw(st.lists(st.builds(event, actions, notes), max_size=20))
    numbers = data.draw(st.lists(st.integers(0, 12), unique=True, max_size=6).map(sorted))
    counts = data.draw(st.lists(st.integers(0, 12), min_size=len(numbers), max_size=len(numbers)).map(sorted))
    ooms = data.draw(st.lists(st.integers(0, 12), max_size=3).map(sorted))
    positions = dict(zip(numbers, counts, strict=True))
    assert marks(events, positions, tuple(ooms)) == marks_one_by_one(events, positions, ooms)


OLD = """
from tonnage_recorder import marks
begin = marks.Marks.__init__

def begin_as_before_2_10(self, *args, **options):
    begin(self, *args, **options)
    self._set_metadata = None

marks.Marks.__init__ = begin_as_before_2_10
"""


@pytest.mark.ghost
@pytest.mark.parametrize(
    ("command", "options"),
    [
        (["families.py", "t5", "--checkpointing", "--accumulate", "2"], {}),
        (["parallel.py", "fsdp"], {"gpu": "8xa100-40gb", "rank": 3}),
        (["too_big.py", "backward"], {}),
    ],
    ids=["checkpointing", "fsdp", "oom"],
)
def test_both_ways_find_the_same_marks(
    dry_run: Any, tmp_path: Path, command: list[str], options: dict[str, Any]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(OLD)
    as_before = (("PYTHONPATH", str(tmp_path)),)
    runs = [dry_run(*command, **options), dry_run(*command, **options, variables=as_before)]
    found: list[Trace] = [trace for answer in runs for trace in answer.run.traces]
    # What is given back together comes in any order, so the events of each mark are sorted.
    noted, counted = (sorted((e.mark, e.action, e.size_bytes) for e in trace.events()) for trace in found)
    assert noted == counted
    assert len({mark for mark, *_ in noted}) > 5
    assert found[0].marks == found[1].marks
    assert timeline(found[0]).by_category() == timeline(found[1]).by_category()


# -- settings


def test_allocator_options_go_under_the_old_and_the_new_name() -> None:
    set_to = {"expandable_segments:True"}
    assert set(environment(Plan(allocator="expandable")).values()) == set_to
    # PYTORCH_ALLOC_CONF came with torch 2.9, and is read by the CUDA allocator since 2.10
    assert set(environment(Plan(allocator="expandable"))) == {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}


def test_the_new_name_of_the_allocators_settings_is_not_read_before_torch_2_10(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    read = {version: written.allocator_settings(version) for version in ("2.8.0+cu128", "2.9.1", "2.10.0", "2.15.0")}
    assert read.pop("2.8.0+cu128") == ""
    assert read.pop("2.9.1") == ""
    assert set(read.values()) == {"expandable_segments:True"}
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert written.allocator_settings("2.8.0") == "max_split_size_mb:64"


class OldNetwork:
    """What transformers 5.0 offers."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any]) -> None:
        self.asked.append(gradient_checkpointing_kwargs)


def test_checkpointing_with_a_transformers_that_cannot_choose_layers() -> None:
    network, arguments = OldNetwork(), {"use_reentrant": False}
    checkpointing._enable_in_transformers(network, arguments, 1)
    assert network.asked == [arguments]
    with pytest.raises(
        CannotEstimate, match=r"checkpoints all layers or none, not every-4; choose checkpointing full"
    ):
        checkpointing._enable_in_transformers(network, arguments, 4)
    assert network.asked == [arguments]


# -- other versions

JOBS: dict[str, tuple[str, str, Plan]] = {
    "full": ("t4", "full", Plan()),
    "lora": ("t4", "lora", Plan(precision="bf16-true", checkpointing="full")),
    "expandable": ("t4", "full", Plan(allocator="expandable")),
    "fp16": ("t4", "full", Plan(precision="fp16-mixed", checkpointing="selective")),
    "ddp": ("8xa100-80gb", "full", Plan(shard="ddp")),
    "zero3": ("8xa100-80gb", "full", Plan(shard="zero3", checkpointing="full")),
}


@pytest.fixture(scope="session", params=OTHERS or [None])
def other(request: pytest.FixtureRequest) -> str:
    """A version of torch to run besides the pinned one."""
    if request.param is None:
        pytest.skip("TONNAGE_TEST_TORCH names no other versions of torch")
    return str(request.param)


@pytest.fixture(scope="session")
def other_worker(other: str) -> Iterator[Worker]:
    with Worker(other) as worker:
        yield worker


def exact(trace: Trace, version: str) -> None:
    """The trace is of this torch, and the walk through its events gives that torch's own counters."""
    walked = timeline(trace)
    assert trace.versions["torch"].split("+")[0] == version
    assert walked.peak_allocated_bytes == trace.peaks["allocated_bytes"] > 100 * MIB
    assert walked.peak_reserved_bytes == trace.peaks["reserved_bytes"]
    assert sum(walked.by_category().values()) == walked.peak_allocated_bytes
    assert trace.unknown_calls == {}
    assert (trace.steps, trace.outcome["kind"]) == (3, "completed")
    assert {mark.phase for mark in trace.marks} >= {"load", "forward", "backward", "optimizer"}


@pytest.mark.ghost
@pytest.mark.parametrize("name", JOBS)
def test_estimates_with_another_version(other: str, other_worker: Worker, name: str) -> None:
    gpu, method, plan = JOBS[name]
    job = Job(model=configurations.resolve("smollm2-135m"), method=method, seq_len=256)
    run = predict.estimate(Case(job, plan, parse_cluster(gpu)), worker=other_worker)
    again = predict.estimate(Case(job, plan, parse_cluster(gpu)), worker=other_worker)
    trace = run.traces[0]
    exact(trace, other)
    assert run.estimate.peak.allocated_bytes == again.estimate.peak.allocated_bytes
    assert not any("block sizes" in line for line in run.estimate.coverage.modelled)
    segments = {e.action for e in trace.events()} & {"segment_alloc", "segment_map"}
    assert segments == ({"segment_map"} if name == "expandable" else {"segment_alloc"})
    collectives = {activity.name for activity in trace.activities() if activity.kind == "collective"}
    assert collectives >= {"ddp": {"AllReduce"}, "zero3": {"AllGather", "ReduceScatter"}}.get(name, set())
    held = timeline(trace).by_category()
    whole = (2 if name == "lora" else 4) * run.estimate.model["parameters"]
    assert held["parameter"] < whole / 2 if name == "zero3" else 0.99 * whole < held["parameter"] < 1.05 * whole


@pytest.mark.ghost
def test_what_a_version_does_not_have_is_said(other: str, other_worker: Worker) -> None:
    job = Job(model=configurations.resolve("smollm2-135m"), seq_len=256)
    if tuple(map(int, other.split(".")[:2])) >= (2, 9):
        plan = Plan(optimizer="muon")
        exact(predict.estimate(Case(job, plan, parse_cluster("t4")), worker=other_worker).traces[0], other)
        return
    with pytest.raises(CannotEstimate, match=r"has no Muon \(2\.9 and newer have\); choose optimizer adamw"):
        predict.estimate(Case(job, Plan(optimizer="muon"), parse_cluster("t4")), worker=other_worker)


@pytest.mark.ghost
@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_a_script_with_another_version(other: str, tmp_path: Path, settings: str) -> None:
    catalog = Path(tonnage.__file__).parent / "catalog" / "configs"
    shutil.copy(catalog / "smollm2-135m.json", tmp_path / "config.json")
    words = [sys.executable, str(EXAMPLE), str(tmp_path)]
    variables = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": settings}
    exact(dry_run_module.run(words, parse_cluster("t4"), torch_version=other, variables=variables).traces[0], other)


ALONE = """
import torch
layers = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8))).cuda()
optimizer = torch.optim.AdamW(layers.parameters())
for rows in (4096, 6144, 5120):
    layers(torch.ones(rows, 2048, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.ghost
@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_a_trace_says_of_the_allocator_what_that_torch_has_read(other: str, tmp_path: Path, name: str) -> None:
    (tmp_path / "alone.py").write_text(ALONE)
    words = [sys.executable, str(tmp_path / "alone.py")]
    variables = {**os.environ, name: "expandable_segments:True"}
    trace = dry_run_module.run(words, parse_cluster("t4"), torch_version=other, variables=variables).traces[0]
    exact(trace, other)
    has_grown = any(event.action == "segment_map" for event in trace.events())
    assert has_grown == (trace.allocator_settings == "expandable_segments:True")


# -- extension libraries


@pytest.mark.ghost
@pytest.mark.parametrize("kind", ["adamw8bit", "paged", "linear4bit", "torchao"])
def test_libraries_for_fewer_bits(dry_run: Any, kind: str) -> None:
    package = "torchao" if kind == "torchao" else "bitsandbytes"
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    answer = dry_run("low_bits.py", kind)
    assert answer.error is None, answer.error
    trace = answer.run.traces[0]
    walked = timeline(trace)
    assert walked.peak_allocated_bytes == trace.peaks["allocated_bytes"] == answer.printed[-1]["allocated"]
    assert (trace.steps, trace.unknown_calls) == (3, {})
    assert package in trace.versions
    parameters = answer.printed[-1]["parameters"]
    states = {life.address: life.size_bytes for life in walked.lives if life.category == "optimizer_state"}
    if kind in ("adamw8bit", "torchao"):  # two states of a byte, and a 4-byte scale for each block of 256
        assert 2.03 * parameters < sum(states.values()) < 2.04 * parameters
    elif kind == "paged":  # the states lie in managed memory, outside the allocator; only the scales are on the card
        assert sum(states.values()) < 0.04 * parameters
    else:  # half a byte a weight, scales of a byte for 64 and of four for 16,384, and the trained layer at the end
        last = 2 * 1024 * 1024
        assert 0.5158 * parameters + last <= walked.by_category()["parameter"] < 0.52 * parameters + last
