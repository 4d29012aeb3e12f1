"""The portable source as one rank of several, without a ghost: real DDP, ZeRO-1 and FSDP2 on imitated GPUs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from networks import tiny_job
from tonnage.allocator import AllocatorSettings
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.catalog.overheads import overheads
from tonnage.errors import CannotEstimate
from tonnage.estimates import predict
from tonnage.estimates.estimate import Estimate
from tonnage.meta import card, packed, step
from tonnage.meta.memory import CardMemory
from tonnage.meta.streams import Streams
from tonnage.plans import Plan
from tonnage.trace.trace import Activity, Trace
from tonnage.units import MIB

EIGHT = parse_cluster("8xa100-80gb")
NODES = parse_cluster("2x4xa100-80gb")


def traced(plan: Plan, rank: int = 0, steps: int = 2, **options: object) -> Trace:
    cluster = NODES if plan.shard == "hsdp" else EIGHT
    return step.run(Case(tiny_job(**options), plan, cluster), rank=rank, steps=steps)  # type: ignore[arg-type]


def exchanged(trace: Trace) -> list[Activity]:
    return list(trace.activities("collective"))


def estimate(shard: str) -> Estimate:
    return predict.estimate(Case(tiny_job(), Plan(shard=shard), EIGHT), steps=1, source="meta").estimate


def test_layers_are_gathered_twice_and_reduced_once_on_streams_of_their_own() -> None:
    trace = traced(Plan(shard="zero3"), steps=1)
    names = [each.name for each in exchanged(trace)]
    assert names.count("AllGather") == 4 + 4  # three layers and what is outside of them
    assert names.count("ReduceScatter") == 4
    assert {each.grid for each in exchanged(trace)} == {(8, 0, 0)}
    assert len(set(trace.event_columns["stream"])) == 3  # of the program, of gathering, of reducing


def test_zero2_gathers_each_layer_once() -> None:
    names = [each.name for each in exchanged(traced(Plan(shard="zero2"), steps=1))]
    assert (names.count("AllGather"), names.count("ReduceScatter")) == (4, 4)


def test_hsdp_divides_within_a_machine_and_averages_across() -> None:
    groups = {(each.name, each.grid[0]) for each in exchanged(traced(Plan(shard="hsdp"), steps=1))}
    assert groups == {("AllGather", 4), ("ReduceScatter", 4), ("AllReduce", 2)}


def test_gradients_are_averaged_with_the_last_micro_batch_or_with_each() -> None:
    for plan, times in ((Plan(shard="zero3"), 1), (Plan(shard="zero3", accum_sync=True), 2)):
        names = [each.name for each in exchanged(traced(plan, steps=1, grad_accum=2))]
        assert names.count("ReduceScatter") == 4 * times


def test_ddp_makes_its_buckets_anew_in_the_second_step() -> None:
    """They follow the order of gradients; a tiny network has one bucket, then the same again."""
    trace = traced(Plan(shard="ddp"), steps=3)
    whole = trace.model["parameters"] * 4
    assert [each.bytes for each in exchanged(trace) if each.name == "AllReduce"] == [whole] * 3
    made = [event for event in trace.events() if event.action == "alloc" and event.size_bytes == whole]
    assert [trace.marks[event.mark].step for event in made] == [0, 1]


def test_zero1_sends_what_each_rank_updated_to_all() -> None:
    trace = traced(Plan(shard="zero1"), steps=1)
    sent = [each for each in exchanged(trace) if each.name == "Broadcast"]
    updated = [each for each in sent if trace.marks[each.mark].phase not in ("load", "forward")]
    assert sum(each.bytes for each in updated) == trace.model["parameters"] * 4


def test_ranks_count_as_nccls_communicator_and_their_buffers_by_name() -> None:
    found = estimate("zero3")
    assert found.peak.by_category["runtime"] == overheads(EIGHT.device, [8]).bytes
    assert found.cluster["gpus"] == 8
    assert estimate("ddp").peak.by_category["communication"] > 0


def test_each_rank_holds_its_part() -> None:
    def parameters(trace: Trace) -> int:
        return sum(event.size_bytes for event in trace.events() if event.action == "alloc" and event.mark == 0)

    whole = parameters(traced(Plan(shard="ddp"), steps=1))
    for rank in (0, 7):
        assert parameters(traced(Plan(shard="zero3"), rank=rank, steps=1)) < whole / 5


def test_nothing_of_the_group_stays() -> None:
    traced(Plan(shard="zero3"), steps=1)
    assert not dist.is_initialized()
    assert torch.cuda.Stream.__module__ == "torch.cuda.streams"


def test_a_process_that_is_a_rank_already_is_told_so() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        with pytest.raises(CannotEstimate, match="part of a process group"):
            traced(Plan(shard="zero3"))
    finally:
        dist.destroy_process_group()


def test_a_streams_blocks_are_its_own() -> None:
    streams = Streams(card.CARD)
    memory = CardMemory(EIGHT, AllocatorSettings(), "2.13.0", stream=lambda: streams.current.number)
    with card.present(EIGHT.device, streams):
        first = memory.allocate(4096, 0)
        memory.free(first, 4096, 0)
        with torch.cuda.stream(torch.cuda.Stream(priority=-1)):
            assert memory.allocate(4096, 0) != first
            with torch.cuda.stream(torch.cuda.default_stream()):
                assert memory.allocate(4096, 0) == first
            with torch.cuda.stream(None):
                assert torch.cuda.current_stream() is not torch.cuda.default_stream()
        assert torch.cuda.current_stream() is torch.cuda.default_stream()


@pytest.mark.parametrize(
    ("options", "gpu", "said"),
    [
        ({}, "8xa100-80gb", "each of the 8 GPUs trains a copy of its own"),
        ({"tp": 2}, "4xa100-80gb", "each of the 2 groups of 2 GPUs trains a copy of its own"),
        ({"shard": "ddp"}, "8xa100-80gb", None),
        ({"tp": 2}, "2xa100-80gb", None),
        ({}, "a100-80gb", None),
    ],
)
def test_gpus_that_exchange_no_gradients_are_said_to(options: dict[str, Any], gpu: str, said: str | None) -> None:
    found = predict.estimate(Case(tiny_job(), Plan(**options), parse_cluster(gpu)), steps=1, source="meta").estimate
    about = [text for text in found.coverage.assumed if "copy of its own" in text]
    assert len(about) == (said is not None)
    assert not about or (said in about[0] and "--shard ddp" in about[0])


@pytest.mark.parametrize(
    ("options", "gpu", "said"),
    [
        ({"shard": "ddp"}, "8xa100-80gb", True),
        ({"shard": "zero1"}, "8xa100-80gb", True),
        ({"shard": "zero3"}, "8xa100-80gb", False),
        ({"shard": "ddp", "tp": 2}, "2xa100-80gb", False),
    ],
)
def test_that_ddps_first_buckets_are_gone_is_said_to_be_assumed(
    options: dict[str, Any], gpu: str, said: bool
) -> None:
    found = predict.estimate(Case(tiny_job(), Plan(**options), parse_cluster(gpu)), steps=1, source="meta").estimate
    assert any("DDP's first buckets" in text for text in found.coverage.assumed) == said


def test_nccls_buffers_are_taken_from_the_card() -> None:
    need = estimate("zero3").peak
    for less_bytes in (0, 4 * MIB):
        small = replace(EIGHT, device=EIGHT.device.with_capacity(need.process_bytes - less_bytes))
        found = predict.estimate(Case(tiny_job(), Plan(shard="zero3"), small), steps=1, source="meta").estimate
        assert found.fits == (less_bytes == 0)
        assert found.peak.process_bytes <= need.process_bytes - less_bytes


def test_a_card_without_room_for_nccl_is_out_of_memory() -> None:
    small = replace(EIGHT, device=EIGHT.device.with_capacity(overheads(EIGHT.device).bytes + 100 * MIB))
    found = predict.estimate(Case(tiny_job(), Plan(shard="ddp"), small), steps=1, source="meta").estimate
    assert found.oom is not None
    assert "Cuda failure 2 'out of memory'" in found.oom.message


LAYER = [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536), (576,), (576,)]
REST = [(49152, 576), (576,)]
"""SmolLM2-135M's layer, and what is outside of its layers."""


@pytest.mark.parametrize(("shapes", "copied", "reduced"), [(LAYER, 3784, 7376), (REST, 9296, 55416)])
def test_tables_of_fsdps_copies_are_those_of_a_ghost(
    shapes: list[tuple[int, ...]], copied: int, reduced: int
) -> None:
    """Sizes on a ghost A100 with eight ranks, bf16 weights, gradients reduced in fp32 (torch 2.13)."""
    whole = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    sizes = [tensor.numel() // 8 for tensor in whole]
    gathered = torch.empty(8, sum(sizes), dtype=torch.bfloat16, device="meta")
    parts = [torch.empty(8, size, dtype=torch.bfloat16, device="meta") for size in sizes]
    assert packed.split_with_sizes_copy((gathered, sizes), {"dim": 1, "out": parts}, EIGHT.device) == (copied,)
    sent = torch.empty(8, sum(sizes), device="meta")
    assert packed.chunk_cat((whole,), {"dim": 0, "num_chunks": 8, "out": sent}, EIGHT.device) == (reduced,)


def test_pieces_of_other_dtypes_are_padded_instead() -> None:
    odd = torch.empty(9, 4, dtype=torch.float16, device="meta")
    even = torch.empty(8, 4, dtype=torch.float16, device="meta")
    out = torch.empty(8, 12, device="meta")
    told = {"dim": 0, "num_chunks": 8, "out": out}
    assert packed.chunk_cat(([odd, even],), told, EIGHT.device) == [16 * 4 * 2]


def test_what_is_on_the_card_is_not_moved_there() -> None:
    with card.present(EIGHT.device) as fake, fake:
        tensor = torch.zeros(3, device="cuda:0")
        assert tensor.to("cuda") is tensor.to(card.CARD, non_blocking=True) is tensor.to(device="cuda:0") is tensor
        assert tensor.to("cuda", torch.float32) is tensor.to("cuda", None, True) is tensor
        assert tensor.to("cuda", copy=True) is not tensor
        assert tensor.to("cuda", torch.float16).dtype == torch.float16
        assert torch.zeros(3).to("cuda").device == card.CARD
        assert torch.zeros(3).to("meta", torch.float16).device.type == "meta"


def test_stages_send_one_to_one_and_both_ways_at_once() -> None:
    """A lone send uses a communicator of two ranks, a batched exchange that of all three stages."""
    trace = step.run(Case(tiny_job(grad_accum=4), Plan(pp=3), parse_cluster("3xa100-80gb")), rank=1, steps=1)
    sent = {(each.name, each.grid[0]) for each in exchanged(trace)}
    assert sent == {("Send", 2), ("Recv", 2), ("Send", 3), ("Recv", 3)}
    assert trace.outcome["kind"] == "completed"


def test_ranks_one_after_the_other_do_not_take_each_others_groups() -> None:
    from torch.distributed.pipelining.stage import PipelineStage

    asked, sending = dict(vars(PipelineStage)), dist.isend
    for rank in (0, 4):
        trace = step.run(Case(tiny_job(grad_accum=2), Plan(pp=2, tp=2, shard="zero3"), EIGHT), rank=rank, steps=1)
        assert (trace.rank, trace.outcome["kind"]) == (rank, "completed")
    assert (dict(vars(PipelineStage)), dist.isend) == (asked, sending)
