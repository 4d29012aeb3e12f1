"""Host memory of a machine: its ranks added up, copies from the card, weights while they are loaded, the verdict."""

import struct
from dataclasses import asdict, replace
from typing import Any

import pytest

import estimates
from tonnage.case import Case
from tonnage.catalog.configurations import resolve
from tonnage.catalog.devices import parse_cluster
from tonnage.errors import UsageError
from tonnage.estimates import host_memory, predict
from tonnage.estimates.estimate import Estimate, Host
from tonnage.estimates.from_traces import combine
from tonnage.estimates.host_memory import (
    CATEGORIES,
    add_up,
    loaded_bytes,
    offloads_into_files,
    peak_of,
    split_by_category,
)
from tonnage.job import Job
from tonnage.plans import Plan
from tonnage.recorder.tonnage_recorder.record_layout import FIELDS, KERNEL_KINDS, RECORD
from tonnage.report import html, terminal
from tonnage.trace.trace import Mark, Trace
from tonnage.units import GIB, MIB

CODES = {name: code for code, name in KERNEL_KINDS.items()}


def record(kind: str, **fields: int) -> bytes:
    values = {"kind": CODES[kind], **fields}
    return RECORD.pack(*(values.get(name, 0) for name, _ in FIELDS))


def trace(*records: bytes, **host: int) -> Trace:
    phases = ("forward", "save")
    return Trace(
        source="ghost",
        versions={},
        device={},
        host={"peak_bytes": 300 * MIB, **host},
        marks=tuple(Mark(step=0, phase=phase, module="") for phase in phases),
        log=b"".join(records),
    )


def rank(number: int, **held: int) -> dict[str, Any]:
    return {"rank": number, "host": {name: size * GIB for name, size in held.items()}}


def test_a_record_is_read_as_it_is_written():
    assert struct.calcsize("<BBHIIIIIIIQQQQ") == RECORD.size
    copied = split_by_category(trace(record("copy_d2h", address=4096, bytes=MIB)))
    assert copied is not None
    assert copied["tensors"] == MIB


def test_copies_to_pinned_memory_count_as_pinned_alone():
    held = split_by_category(
        trace(
            record("pinned_alloc", address=2**30, bytes=4 * MIB),
            record("copy_d2h", address=2**30 + MIB, bytes=2 * MIB),
            record("copy_d2h", address=2**31, bytes=2 * MIB),
            pinned_bytes=4 * MIB,
        ),
    )
    assert held is not None
    assert (held["process"], held["pinned"], held["tensors"]) == (296 * MIB, 4 * MIB, 2 * MIB)


def test_memory_that_is_written_again_counts_once_and_small_copies_do_not():
    held = split_by_category(
        trace(
            *[record("copy_d2h", address=2**31, bytes=8 * MIB)] * 5,
            record("copy_d2h", address=2**31 + 4 * MIB, bytes=8 * MIB),
            record("copy_d2h", address=2**32, bytes=1024),
        ),
    )
    assert held is not None
    assert held["tensors"] == 12 * MIB


def test_copies_into_files_are_not_the_hosts():
    copied = trace(
        record("copy_d2h", address=2**31, bytes=8 * MIB), record("copy_d2h", mark=1, address=2**32, bytes=MIB)
    )
    held = split_by_category(copied, into_files=offloads_into_files({"optimizer_offload": "nvme=0.5"}))
    assert held is not None
    assert (held["tensors"], held["checkpoint"]) == (0, MIB)
    assert not offloads_into_files({"optimizer_offload": "cpu", "param_offload": "none"})


def test_a_checkpoint_is_what_is_copied_while_it_is_saved():
    held = split_by_category(
        trace(
            record("copy_d2h", mark=0, address=2**31, bytes=8 * MIB),
            record("copy_d2h", mark=1, address=2**31, bytes=8 * MIB),
            record("copy_d2h", mark=1, address=2**32, bytes=16 * MIB),
        ),
    )
    assert held is not None
    assert (held["tensors"], held["checkpoint"]) == (8 * MIB, 16 * MIB)


def test_a_trace_without_host_memory_says_nothing():
    assert split_by_category(replace(trace(), host={})) is None
    assert add_up([{"rank": 0, "host": None}], gpus=8, gpus_per_node=8).total_bytes is None


def test_weights_are_there_before_the_steps():
    """Loading and steps are two moments, of which the higher one counts."""
    held = rank(0, process=1, loading=16, pinned=6, tensors=3)["host"]
    assert peak_of(held) == 17 * GIB
    assert peak_of({**held, "checkpoint": 20 * GIB}) == 30 * GIB
    need = add_up([rank(0, process=1, loading=16, pinned=6, tensors=3)], gpus=8, gpus_per_node=8)
    assert need.total_bytes == 8 * 17 * GIB
    assert sum(need.by_category.values()) == need.total_bytes
    assert list(need.by_category) == list(CATEGORIES)


def test_one_rank_saves_for_all_unless_each_saves_its_part():
    one = [rank(0, process=1, checkpoint=24)]
    assert add_up(one, gpus=8, gpus_per_node=8).total_bytes == (8 + 24) * GIB
    assert add_up(one, gpus=8, gpus_per_node=8, all_save=True).total_bytes == 8 * 25 * GIB


def test_ranks_of_a_pipeline_are_added_up_as_they_are():
    """16 ranks, four stages of four: two machines, of which the one with the last stage needs most."""
    stages = [rank(0, process=1, pinned=2), rank(4, process=1, pinned=3), rank(12, process=1, pinned=9)]
    need = add_up(stages, gpus=16, gpus_per_node=8)
    assert need.total_bytes == (4 * 4 + 4 * 10) * GIB
    assert add_up(stages, gpus=16, gpus_per_node=16).total_bytes == (4 * 3 + 8 * 4 + 4 * 10) * GIB


def test_all_ranks_of_a_script_are_added_up():
    ranks = [rank(number, process=1, workers=number) for number in range(4)]
    assert add_up(ranks, gpus=4, gpus_per_node=4).total_bytes == (4 + 6) * GIB


@pytest.mark.parametrize(
    ("options", "bytes_each"),
    [
        ({"shard": "ddp"}, 4),
        ({"shard": "ddp", "precision": "bf16-true"}, 0),
        ({"shard": "ddp", "precision": "fp16-true"}, 2),
        ({"shard": "ddp", "method": "lora"}, 0),
        ({"shard": "ddp", "method": "lora", "precision": "fp16-mixed"}, 2),
        ({"shard": "ddp", "method": "lora", "base_dtype": "fp32"}, 4),
        ({"shard": "zero3"}, 0),
        ({"shard": "zero3", "engine": "hf-trainer"}, 4),
        ({"shard": "zero3", "engine": "deepspeed"}, 0),
        ({"shard": "zero2", "engine": "deepspeed"}, 4),
        ({"tp": 2}, 0),
        ({"method": "qlora"}, 0),
    ],
)
def test_weights_that_every_rank_loads(options, bytes_each):
    method = options.pop("method", "full")
    job = Job(model=resolve("llama-3.1-8b", offline=True), seq_len=512, method=method)
    assert loaded_bytes(Case(job, Plan(**options), parse_cluster("2xa100-80gb")), 1000) == 1000 * bytes_each


def with_host(needed: int, limit: int | None, **held: int) -> Estimate:
    made = estimates.fitting()
    host = Host(peak_bytes=needed, pinned_bytes=0).with_machine(needed, held, limit)
    return made.with_host(host)


def test_the_verdict_is_of_both_memories():
    fits, full = with_host(10 * GIB, 64 * GIB), with_host(96 * GIB, 64 * GIB, loading=96 * GIB)
    assert (fits.fits, fits.fits_card, full.fits, full.fits_card) == (True, True, False, True)
    assert fits.verdict().startswith("fits: ")
    assert full.verdict().startswith("does not fit in host memory: a machine needs 96.00 GiB and has 64.00 GiB; ")
    lacking = estimates.full_card().with_host(full.host)
    assert not lacking.fits_card
    assert lacking.verdict().startswith("does not fit: out of memory in backward")
    assert lacking.with_host(fits.host).fits is False, "room on the host does not help the card"
    assert with_host(96 * GIB, None).fits


def test_reports_say_what_is_missing_and_what_to_do():
    full = with_host(96 * GIB, 64 * GIB, loading=90 * GIB, process=6 * GIB)
    text = " ".join(terminal.render(full).split())
    for shown in (text, html.page(full)):
        assert "DOES NOT FIT" in shown
        assert "32.00 GiB of host memory missing on each machine; the GPU has room" in shown
        assert "a machine with H100-80GB needs 96.00 GiB and usually has 64.00 GiB, 32.00 GiB too little" in shown
        assert "load the weights on one rank of each machine" in shown
        assert "--host-memory" in shown
    assert "90.00 GiB weights being loaded, 6.00 GiB Python and its libraries" in text
    stopped = terminal.render(estimates.full_card().with_host(with_host(9 * GIB, 64 * GIB).host))
    assert "Host memory until then: a machine with 4 x H100-80GB needed 9.00 GiB" in " ".join(stopped.split())
    unknown = " ".join(terminal.render(with_host(96 * GIB, None)).split())
    assert "what such machines have is not known, --host-memory says what yours has" in unknown


def test_estimates_of_before_still_load():
    document = estimates.fitting().to_json()
    document["host"] = {"peak_bytes": 3 * GIB, "pinned_bytes": 0, "managed_bytes": 0}
    old = Estimate.from_json(document)
    assert (old.fits, old.host.fits, old.host.machine_bytes, old.host.limit_bytes) == (True, True, None, None)
    assert "Host memory" not in terminal.render(old)


def test_new_fields_come_back():
    full = with_host(96 * GIB, 64 * GIB, loading=96 * GIB)
    assert Estimate.from_json(full.to_json()) == full
    assert asdict(full.host)["machine_bytes"] == 96 * GIB


def test_a_stated_size_needs_a_unit():
    with pytest.raises(UsageError, match="less than 1 MiB; give its unit too"):
        parse_cluster("t4", host_memory_bytes=64)


@pytest.mark.ghost
def test_a_machine_is_judged_by_what_all_its_ranks_offload(worker):
    """SmolLM2 135M: 12 bytes for each weight are divided among the ranks, and each has a process of its own."""
    job = Job(model=resolve("smollm2-135m", offline=True), seq_len=256)
    plan = Plan(shard="zero3", param_offload="cpu")

    roomy = predict.estimate(Case(job, plan, parse_cluster("4xa100-40gb")), worker=worker).estimate
    tight = combine([roomy], parse_cluster("4xa100-40gb", host_memory_bytes=GIB))
    assert (roomy.fits, tight.fits, tight.fits_card) == (True, False, True)
    assert tight.host.machine_bytes == roomy.host.machine_bytes
    held = roomy.host.by_category
    assert held["pinned"] + held["tensors"] >= 12 * 134_515_008
    assert held["process"] == 4 * roomy.ranks[0]["host"]["process"]
    assert tight.cluster["host_memory_bytes"] == GIB


@pytest.mark.ghost
def test_the_whole_checkpoint_is_on_the_host_of_one_rank(worker):
    job = Job(model=resolve("smollm2-135m", offline=True), seq_len=256, save_checkpoint="full")
    saved = predict.estimate(
        Case(job, Plan(shard="zero3"), parse_cluster("2xa100-40gb")), worker=worker
    ).estimate.host.by_category["checkpoint"]
    assert 12 * 134_515_008 <= saved < 14.5 * 134_515_008  # the tied head is copied with the embedding


def test_a_peak_has_an_interval_of_a_hundredth_of_the_process():
    held = {"process": 400 * MIB, "pinned": 100 * MIB}
    assert host_memory.interval_of(held) == (496 * MIB, 504 * MIB)
    assert host_memory.interval_of({"loading": 7}) == (7, 7)
