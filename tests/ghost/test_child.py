"""Jobs that one process does one after the other, beside each in a process of its own."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch

from networks import tiny_job
from tonnage.catalog.configurations import resolve
from tonnage.catalog.devices import parse_cluster
from tonnage.errors import CannotEstimate
from tonnage.ghost.pool import Worker, request
from tonnage.ghost.process import INSIDE
from tonnage.job import Job
from tonnage.plans import Plan
from tonnage.shallow.few import with_layers
from tonnage.trace.trace import ACTIONS, Trace

LLAMA = with_layers(Job(model=resolve("llama-3.2-1b", offline=True), seq_len=512, grad_accum=2), 3)
EXPERTS = with_layers(Job(model=resolve("qwen3-30b-a3b", offline=True), seq_len=512), 2)
SEEING = tiny_job("qwen2_5_vl")
MACHINES = "2x4xh100-80gb"

DENSE = (
    {"shard": "zero3", "checkpointing": "selective", "loss": "chunked", "optimizer": "adamw-fused"},
    {"shard": "zero3", "tp": 2, "cp": 2, "accum_sync": True, "loss": "chunked"},
    {"shard": "zero2", "checkpointing": "full", "clip_grad_norm": 1.0},
    {"shard": "zero3", "tp": 2, "cp": 2, "optimizer": "adamw-fused"},
    {"shard": "ddp"},
    {"shard": "zero3", "pp": 2},
    {"shard": "hsdp", "precision": "bf16-true", "accum_sync": True},
    {"shard": "zero2", "cp": 4, "attention": "flash"},
    {"shard": "zero3", "tp": 4, "checkpointing": "selective", "accum_sync": True},
    {"shard": "zero3"},
)
ADAPTED = (
    {"shard": "zero3", "checkpointing": "full"},
    {"shard": "ddp", "precision": "bf16-true"},
    {"shard": "zero3", "tp": 2, "loss": "chunked", "checkpointing": "selective"},
    {"shard": "zero2", "cp": 2, "optimizer": "adamw-fused"},
    {"shard": "zero3", "optimizer": "sgd"},
)
ALONE = (
    {"optimizer": "muon", "loss": "chunked"},
    {"optimizer": "adamw-foreach", "checkpointing": "every-2"},
    {"optimizer": "adafactor", "outputs": "loop"},
    {"optimizer": "sgd", "checkpointing": "sqrt"},
    {"precision": "fp16-mixed", "attention": "eager", "clip_grad_norm": 1.0},
)
SPARSE = ({"shard": "zero3", "ep": 4}, {"shard": "zero2", "ep": 2, "accum_sync": True}, {"shard": "zero3", "tp": 2})


one_after_another = pytest.mark.skipif(
    torch.__version__ < (2, 12), reason="jobs are done one after the other by torch 2.12 and later"
)


class Asked:
    """A worker, and which process did each job."""

    def __init__(self, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.worker = worker
        self.processes: list[int] = []
        ask = worker._ask

        def heard(asked: dict[str, Any]) -> dict[str, Any]:
            answer = ask(asked)
            self.processes.append(answer.get("process", 0))
            return answer

        monkeypatch.setattr(worker, "_ask", heard)

    def one(self, job: Job, plan: Plan, gpu: str = MACHINES, **more: Any) -> Trace:
        """The Trace of a step of the first rank."""
        return self.worker._traced(request(job, plan, parse_cluster(gpu), rank=0, steps=1) | more)


@pytest.fixture
def asked(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(worker, monkeypatch)


def said(trace: Trace) -> dict[str, Any]:
    """All that a Trace says that does not hang on where things lie in the memory of a process.

    Blocks that are given back one after the other are in the order of their sizes, streams are numbered.
    """
    columns = {name: list(column) for name, column in trace.event_columns.items()}
    streams = numbered(columns["stream"])
    rows = zip(columns["mark"], columns["size"], columns["action"], streams, strict=True)
    events: list[tuple[int, ...]] = []
    given: list[tuple[int, ...]] = []
    for row in rows:
        if not ACTIONS[row[2]].startswith("free"):
            events += [*sorted(given), row]
            given = []
        else:
            given.append(row)
    kinds = [each for each in trace.activities() if each.kind not in ("malloc", "free", "vm_map", "vm_unmap")]
    facts = ("kind", "name", "mark", "grid", "block", "bytes")
    return {
        "events": events + sorted(given),
        "marks": trace.marks,
        "claims": sorted((claim.mark, claim.category) for claim in trace.claims),
        "activities": [tuple(getattr(each, name) for name in facts) for each in kinds],
        "streams": numbered([each.stream for each in kinds]),
        "unknown": (trace.unknown_calls, trace.unknown_workspaces),
        "pinned": trace.host["pinned_bytes"],
        **{name: getattr(trace, name) for name in ("peaks", "model", "assumed", "alike", "steps", "outcome")},
    }


def numbered(values: Sequence[int]) -> list[int]:
    """Each value as a number, in the order in which they first come."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]


@one_after_another
@pytest.mark.ghost
@pytest.mark.parametrize(
    ("job", "plans", "allocator", "gpu"),
    [
        (LLAMA, DENSE, "default", MACHINES),
        (LLAMA, DENSE[::-1], "expandable", MACHINES),
        (EXPERTS, SPARSE, "expandable", MACHINES),
        (replace(LLAMA, method="lora"), ADAPTED, "default", MACHINES),
        (LLAMA, ALONE, "default", "a100-40gb"),
        (LLAMA, ({}, {"optimizer": "sgd"}, {"attention": "eager"}), "default", "t4"),
    ],
    ids=["forwards", "backwards", "experts", "adapters", "alone", "before Ampere"],
)
def test_each_finds_what_it_would_find_alone(
    asked: Asked, job: Job, plans: Sequence[dict[str, Any]], allocator: str, gpu: str
) -> None:
    again = 0
    for options in plans:
        plan = Plan(**options, allocator=allocator)
        found = said(asked.one(job, plan, gpu))
        again += asked.processes[-1] in asked.processes[:-1]
        assert found == said(asked.one(job, plan, gpu, alone=True)), options
    assert again >= len(plans) // 2


@pytest.mark.ghost
def test_what_torch_keeps_of_cudnn_ends_a_process(asked: Asked) -> None:
    first, second = (asked.one(SEEING, Plan(shard="zero2")) for _ in range(2))
    assert first.unknown_workspaces
    assert said(first) == said(second)
    assert len(set(asked.processes)) == 2


@pytest.mark.ghost
def test_memory_that_runs_out_is_told_as_alone(asked: Asked) -> None:
    fits, lacks = Plan(precision="bf16-true"), Plan()
    job = replace(LLAMA, model=resolve("llama-3.2-1b", offline=True))
    asked.one(job, fits, "t4")
    found, alone = asked.one(job, lacks, "t4"), asked.one(job, lacks, "t4", alone=True)
    assert found.outcome["kind"] == "oom"
    assert found.outcome == alone.outcome
    assert len(set(asked.processes)) == 3
    assert asked.one(job, fits, "t4").outcome["kind"] == "completed"


@pytest.mark.ghost
def test_what_cannot_be_run_is_told_as_alone(asked: Asked) -> None:
    works, fails = Plan(precision="fp32"), Plan(precision="fp32", attention="flash")
    asked.one(LLAMA, works, "h100-80gb")
    told: list[str] = []
    for more in ({}, {"alone": True}):
        with pytest.raises(CannotEstimate) as error:
            asked.one(LLAMA, fails, "h100-80gb", **more)
        told.append(str(error.value))
    assert told[0] == told[1]
    assert asked.one(LLAMA, works, "h100-80gb").outcome["kind"] == "completed"


@one_after_another
@pytest.mark.ghost
def test_few_wait_for_more(asked: Asked) -> None:
    for gpu in ("t4", "l4", "a100-40gb", "h100-80gb", "rtx-4090"):
        asked.one(LLAMA, Plan(), gpu)
    assert len(set(asked.processes)) == 5
    asked.one(LLAMA, Plan(), "rtx-4090")
    assert asked.processes[-1] == asked.processes[-2]
    assert len(psutil.Process(asked.worker._process.pid).children()) == 3


@pytest.fixture
def alike(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [*sys.path, str(INSIDE)])
    from tonnage.ghost import child

    def common(job: Job = LLAMA, gpu: str = MACHINES, rank: int = 0, more: Any = None, **options: Any) -> str | None:
        asked = request(job, Plan(**options), parse_cluster(gpu), rank=rank, steps=1)
        return child.alike(asked | (more or {}))

    return common


@pytest.mark.parametrize("options", DENSE)
def test_techniques_may_differ(alike: Any, options: dict[str, Any]) -> None:
    assert alike(**options) == alike() is not None


def test_card_rank_allocator_and_model_may_not(alike: Any) -> None:
    others = (alike(gpu="h100-80gb"), alike(gpu="2x4xh200"), alike(rank=1), alike(allocator="expandable"))
    assert len({alike(), *others, alike(job=EXPERTS)}) == 6


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "paged-adamw"},
        {"optimizer": "adamw-4bit"},
        {"checkpointing": "budget=2GiB"},
        {"loss": "liger"},
        {"compile": "layers"},
        {"activation_offload": "cpu"},
        {"engine": "hf-trainer"},
        {"attention": "flex"},
        {"job": replace(LLAMA, eval_batch=2)},
        {"job": replace(LLAMA, lengths=(10, 20))},
        {"job": replace(LLAMA, save_checkpoint="full")},
        {"job": replace(LLAMA, model=replace(LLAMA.model, kind="factory", factory="os:abort"))},
        {"more": {"worked": "file"}},
        {"more": {"requests": "file"}},
    ],
    ids=str,
)
def test_what_keeps_something_is_done_alone(alike: Any, options: dict[str, Any]) -> None:
    assert alike(**options) is None
