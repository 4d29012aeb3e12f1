"""Estimates on the ghost through one warm worker: a model's name or configuration, no script."""

import dataclasses
from typing import Any

import pytest

from networks import tiny_job
from tonnage.case import Case
from tonnage.catalog.configurations import resolve
from tonnage.catalog.devices import parse_cluster
from tonnage.errors import CannotEstimate, TonnageError, UsageError
from tonnage.estimates.from_traces import Run
from tonnage.estimates.predict import estimate
from tonnage.estimates.timeline import timeline
from tonnage.job import Job
from tonnage.model import ModelRef
from tonnage.plans import Plan
from tonnage.workers.worker import Worker

pytestmark = pytest.mark.ghost

GIB = 2**30

TINY = ModelRef(
    name="tiny",
    kind="config",
    config={
        **{"model_type": "llama", "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512},
        **{"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4},
        **{"max_position_embeddings": 1024, "tie_word_embeddings": False},
    },
)


def run(worker: Worker, job: Job, plan: Plan, gpu: str = "a100-40gb", **options: Any) -> Run:
    """An estimate that agrees with itself and with torch's counters."""
    found = estimate(Case(job, plan, parse_cluster(gpu)), worker=worker, **options)
    trace, walked = found.traces[0], timeline(found.traces[0])
    assert walked.peak_allocated_bytes == trace.peaks["allocated_bytes"] == found.estimate.peak.allocated_bytes
    assert walked.peak_reserved_bytes == trace.peaks["reserved_bytes"] == found.estimate.peak.reserved_bytes
    assert sum(found.estimate.peak.by_category.values()) == found.estimate.peak.process_bytes
    assert trace.unknown_calls == {}
    return found


JOB = Job(model=TINY, seq_len=256, micro_batch=2)
VARIANTS = {
    "defaults": {},
    "bf16-true": {"precision": "bf16-true"},
    "fp16-mixed": {"precision": "fp16-mixed"},
    "fp32": {"precision": "fp32"},
    "loop": {"optimizer": "adamw-loop"},
    "fused": {"optimizer": "adamw-fused"},
    "sgd": {"optimizer": "sgd"},
    "sgd-plain": {"optimizer": "sgd-plain"},
    "adafactor": {"optimizer": "adafactor"},
    "muon": {"optimizer": "muon"},
    "checkpointed": {"checkpointing": "full"},
    "every-2": {"checkpointing": "every-2"},
    "selective": {"checkpointing": "selective"},
    "checkpointed-bf16": {"checkpointing": "full", "precision": "bf16-true", "optimizer": "adamw-fused"},
    "eager": {"attention": "eager"},
    "math": {"attention": "math"},
    "chunked": {"loss": "chunked"},
    "ddp": {"shard": "ddp"},
    "zero1": {"shard": "zero1"},
    "zero2": {"shard": "zero2"},
    "zero3": {"shard": "zero3"},
    "zero3-checkpointed": {"shard": "zero3", "checkpointing": "full", "precision": "bf16-mixed"},
    "hsdp": {"shard": "hsdp"},
    "offload": {"shard": "zero3", "param_offload": "cpu"},
}


@pytest.mark.parametrize("allocator", ["default", "expandable"])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_walk_agrees_with_torchs_counters(worker: Worker, name: str, allocator: str) -> None:
    plan = Plan(**VARIANTS[name], allocator=allocator)
    gpu = "2x4xa100-40gb" if plan.shard == "hsdp" else "8xa100-40gb" if plan.shard != "none" else "a100-40gb"
    found = run(worker, JOB, plan, gpu, rank=0 if plan.shard == "none" else 3)
    assert found.traces[0].steps == 3
    assert found.estimate.fits
    modelled = [text for text in found.estimate.coverage.modelled if "differs" in text]
    assert modelled == []


@pytest.mark.parametrize("allocator", ["default", "expandable"])
def test_adapters(worker: Worker, allocator: str) -> None:
    job = dataclasses.replace(JOB, method="lora", lora_rank=4)
    found = run(worker, job, Plan(allocator=allocator))
    assert 0 < found.estimate.model["trainable_parameters"] < found.estimate.model["parameters"] / 10


def test_accumulation_runs_more_forwards_for_a_step(worker: Worker) -> None:
    one = run(worker, JOB, Plan()).traces[0]
    four = run(worker, dataclasses.replace(JOB, grad_accum=4), Plan()).traces[0]

    def forwards(trace: Any) -> int:
        entered = [mark.phase == "forward" for mark in trace.marks]
        return sum(now and not before for before, now in zip([False, *entered], entered, strict=False))

    assert (forwards(one), forwards(four)) == (3, 12)


def test_llama_2_7b_loop_foreach_and_fused(worker: Worker) -> None:
    """Foreach holds temporaries of all parameters at once: 12.55 GiB at the step."""
    job = Job(model=resolve("llama-2-7b", offline=True), seq_len=2048, micro_batch=1)
    peaks = {}
    for kind in ("loop", "foreach", "fused"):
        plan = Plan(precision="bf16-true", optimizer=f"adamw-{kind}", allocator="expandable")
        found = run(worker, job, plan, "h100-80gb", steps=2)
        assert found.estimate.fits
        peaks[kind] = found.estimate.peak.allocated_bytes
        [step] = [phase for phase in found.estimate.phases if phase.name == "optimizer"]
        if kind == "foreach":
            states = found.estimate.model["parameters"] * 2 * 4
            assert (step.allocated_bytes - states) / GIB == pytest.approx(12.55, abs=0.1)
    assert peaks["fused"] <= peaks["loop"] < peaks["foreach"]


def test_llama_3_8b_fits_an_h100_only_with_expandable_segments(worker: Worker) -> None:
    """Peaks of a real H200 limited to 78.69 GiB: 75.450 GiB allocated, 76.545 GiB reserved with expandable segments.

    measurements/h200-2026-11-20.jsonl, llama-3.1-8b, the same network.
    """
    job = Job(model=resolve("llama-3-8b", offline=True), seq_len=4096, micro_batch=1)
    default = run(worker, job, Plan(precision="bf16-true"), "h100-80gb")
    assert not default.estimate.fits
    assert default.estimate.oom is not None
    assert (default.estimate.oom.step, default.traces[0].steps) == (3, 2), "two steps are done, in the third it ends"
    assert "reserved by PyTorch but unallocated" in default.estimate.oom.message
    expandable = run(worker, job, Plan(precision="bf16-true", allocator="expandable"), "h100-80gb")
    assert expandable.estimate.fits
    assert expandable.estimate.peak.allocated_bytes / GIB == pytest.approx(75.450, abs=0.001)
    assert expandable.estimate.peak.reserved_bytes / GIB == pytest.approx(76.545, abs=0.001)


def test_a_vision_language_model(worker: Worker) -> None:
    """Places of images are known from the token ids, so their features go where they belong."""
    job = Job(model=resolve("gemma-3-4b", offline=True), seq_len=512)
    found = run(worker, job, Plan(precision="bf16-true", checkpointing="full"), "h100-80gb", steps=2)
    assert found.estimate.fits
    assert found.traces[0].steps == 2
    assert found.estimate.coverage.assumed == ("every sequence holds 1 image of 896 x 896 pixels, 256 tokens each",)


def test_a_rank_of_sixty_four(worker: Worker) -> None:
    found = run(worker, JOB, Plan(shard="zero3"), "8x8xa100-40gb", rank=37)
    trace = found.traces[0]
    assert (found.estimate.rank, trace.rank, trace.world_size) == (37, 37, 64)
    assert found.estimate.model["parameters"] > 10**6, "of the whole network, not of a shard"


def test_jobs_do_not_disturb_each_other(worker: Worker) -> None:
    first = run(worker, JOB, Plan()).traces[0]
    run(worker, JOB, Plan(precision="fp32", allocator="expandable"), "t4")
    again = run(worker, JOB, Plan()).traces[0]
    assert list(again.events()) == list(first.events())


def refused(worker: Worker, kind: type[TonnageError], job: Job, plan: Plan, gpu: str = "a100-40gb") -> str:
    with pytest.raises(kind) as caught:
        estimate(Case(job, plan, parse_cluster(gpu)), worker=worker)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_only_the_versions_of_what_a_job_uses_are_told(worker: Worker) -> None:
    """A worker that has imported peft for one job tells the next one nothing of it."""
    pytest.importorskip("peft")
    adapted = run(worker, dataclasses.replace(JOB, method="lora"), Plan(), fresh=True, steps=1)
    plain = run(worker, JOB, Plan(), fresh=True, steps=1)
    assert "peft" in adapted.estimate.versions
    assert set(plain.estimate.versions) == {"tonnage", "torch", "cuda", "python", "transformers"}


def test_an_unknown_architecture_is_named(worker: Worker) -> None:
    model = ModelRef(name="mine", kind="config", config={"model_type": "no_such_architecture", "hidden_size": 8})
    assert "no_such_architecture" in refused(worker, CannotEstimate, Job(model=model), Plan())


@pytest.mark.parametrize("more", [{"clip_grad_norm": 1}, {"precision": "fp16-mixed"}])
def test_gradients_on_the_host_are_compared_between_ranks_there(worker: Worker, more: dict[str, Any]) -> None:
    """Their norm, and whether a scaled loss made them overflow: NCCL exchanges nothing between hosts."""
    offloaded = Plan(shard="zero3", param_offload="cpu", **more)
    found = estimate(Case(JOB, offloaded, parse_cluster("8xa100-40gb")), worker=worker).estimate
    assert found.fits
    assert found.host.pinned_bytes > 0


def test_buffers_stay_on_the_card_where_parameters_rest_on_the_host(worker: Worker) -> None:
    """FSDP2 brings parameters for their layer, and not what a router is corrected by."""
    found = estimate(
        Case(tiny_job("deepseek_v3"), Plan(shard="zero3", param_offload="cpu"), parse_cluster("8xa100-40gb")),
        worker=worker,
    )
    assert found.estimate.fits


def test_an_absurd_configuration_is_one_line(worker: Worker) -> None:
    for change in (
        {"hidden_size": -5},
        {"num_attention_heads": 0},
        {"vocab_size": "many"},
        {"hidden_act": "no_such"},
    ):
        model = dataclasses.replace(TINY, config={**TINY.config, **change})
        assert refused(worker, CannotEstimate, dataclasses.replace(JOB, model=model), Plan())
    assert run(worker, JOB, Plan()).estimate.fits, "the worker lives on"


def test_what_a_technique_refuses_never_reaches_the_ghost(worker: Worker) -> None:
    assert "param_offload" in refused(worker, UsageError, JOB, Plan(param_offload="cpu"))
    with pytest.raises(UsageError, match="Rank 8 does not exist"):
        estimate(Case(JOB, Plan(shard="ddp"), parse_cluster("8xa100-40gb")), worker=worker, rank=8)


def test_a_card_smaller_than_a_context(worker: Worker) -> None:
    cluster = parse_cluster("t4")
    tiny = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, capacity_bytes=16 * 2**20))
    found = estimate(Case(JOB, Plan(), tiny), worker=worker)
    assert not found.estimate.fits
    assert found.estimate.oom is not None
    assert "CUDA error: out of memory" in found.estimate.oom.message
