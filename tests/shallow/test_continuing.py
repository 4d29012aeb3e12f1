"""Networks of a few layers, extended: the requests of a deep one, and a ghost's trace of them."""

from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from networks import tiny_job
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.errors import CannotEstimate
from tonnage.estimates import cache, sources
from tonnage.estimates.predict import estimate
from tonnage.plans import Plan
from tonnage.recorder.tonnage_recorder.record_layout import ACTIONS, EVENT_COLUMNS
from tonnage.shallow import continuing, depths
from tonnage.shallow.depths import with_layers
from tonnage.shallow.requests import ALLOC, EMPTY, FREE, MARK, Requests
from tonnage.shallow.sizes import Sizes
from tonnage.shallow.tokens import IN_SERIES, BlockRegistry, tokens
from tonnage.trace.trace import Claim, Mark, Trace
from tonnage.trainers.cases import request
from tonnage.units import MIB

SMALL, DEEP = 3, 11


class Program:
    """A made-up step: each layer keeps blocks until its backward, and the optimizer goes over all layers."""

    def __init__(self, layers, kept, passing, states, odd=0):
        self.marks, self.claims = [Mark(0, "load", "")], []
        self.columns = {name: array("q") for name in EVENT_COLUMNS}
        self.next_address = 512
        weights = [self.alloc(1024 + layer % 2 * odd) for layer in range(layers)]
        held = [[self.passed(layer, passing), *map(self.alloc, kept)][1:] for layer in range(layers)]
        self.mark("forward", "head")
        head = self.alloc(4096)
        for layer in reversed(range(layers)):
            self.mark("backward", f"layers.{layer}.mlp")
            gradient = self.alloc(256)
            for block in held[layer]:
                self.free(block)
            self.claim(gradient, "gradient")
            weights.append(gradient)
        self.free(head)
        self.mark("optimizer", "")
        for _ in range(layers):
            for size in states:
                self.alloc(size)
        self.free(self.alloc(12 * layers))  # norms of all gradients
        several = [self.alloc(2048) for _ in range(layers)]  # a foreach operation's
        for block in several:
            self.free(block)
        self.mark("other", "", 1)

    def passed(self, layer, passing):
        self.mark("forward", f"layers.{layer}.mlp")
        for size in passing:
            self.free(self.alloc(size))

    def mark(self, phase, module, step=0):
        self.marks.append(Mark(step, phase, module))

    def claim(self, block, category):
        self.mark("backward", "")
        self.claims.append(Claim(len(self.marks) - 1, block[0], category))

    def alloc(self, size):
        block = (self.next_address, size)
        self.next_address += 2**20
        self.note("alloc", block)
        return block

    def free(self, block):
        for action in ("free_requested", "free_completed"):
            self.note(action, block)

    def note(self, action, block):
        values = (ACTIONS.index(action), *block, 0, len(self.marks) - 1)
        for name, value in zip(EVENT_COLUMNS, values, strict=True):
            self.columns[name].append(value)

    @property
    def trace(self):
        return Trace(
            source="ghost",
            versions={},
            device={},
            outcome={"kind": "completed"},
            marks=tuple(self.marks),
            claims=tuple(self.claims),
            event_columns=self.columns,
        )


def requests_of(depths, steps, *program, **options):
    traces = [Program(layers, *program, **options).trace for layers in depths]
    return continuing.requests_of(traces, depths, depths[0] + steps * (depths[1] - depths[0]))


def asked(requests):
    """Return allocated sizes and freed blocks; frees that follow one another may be in any order."""
    found = []
    for kind, first, _ in zip(*(requests.columns[place::3] for place in range(3)), strict=True):
        if kind == FREE and found and isinstance(found[-1], set):
            found[-1].add(first)
        elif kind != MARK:
            found.append(first if kind == ALLOC else {first})
    return found


sizes = st.lists(st.sampled_from([8, 512, 4096, 2**20]), min_size=1, max_size=4)


@given(kept=sizes, passing=sizes, states=sizes)
def test_a_deep_program_asks_for_what_follows_from_three_shallow_ones(kept, passing, states):
    program = (kept, passing, states)
    continued = requests_of((SMALL, SMALL + 1, SMALL + 2), DEEP - SMALL, *program)
    whole = requests_of((DEEP, DEEP + 1, DEEP + 2), 0, *program)
    assert asked(continued) == asked(whole)
    assert continued.marks == whole.marks
    assert continued.claims == whole.claims


def test_two_layers_of_activations_by_hand():
    """Depth 4 from depths 1 to 3: weights, one block a layer until backward, a head, states."""
    continued = requests_of((1, 2, 3), 3, [100], [7], [1024])
    weights, forward = [1024] * 4, [7, 100] * 4
    sizes = [first for kind, first, _ in triples(continued) if kind == ALLOC]
    assert sizes == [*weights, *forward, 4096, *[256] * 4, *[1024] * 4, 48, *[2048] * 4]
    assert continued.growing == {"optimizer"}
    blocks = [first for kind, first, _ in triples(continued) if kind == FREE]
    assert blocks[:4] == [4, 6, 8, 10]  # what passes through a layer, at once
    assert blocks[4:8] == [11, 9, 7, 5]  # what it keeps, the last layer's first
    assert [mark.module for mark in continued.marks if mark.phase == "forward"] == [
        *(f"layers.{layer}.mlp" for layer in range(4)),
        "head",
    ]


def triples(requests):
    return list(zip(*(requests.columns[place::3] for place in range(3)), strict=True))


class Adapted(Program):
    """Two blocks of each layer's weights, then two of its adapter, one of them as large; claimed in turn."""

    def __init__(self, layers):
        self.marks, self.claims = [Mark(0, "load", "")], []
        self.columns = {name: array("q") for name in EVENT_COLUMNS}
        self.next_address = 512
        weights = [[self.alloc(size) for size in (4096, 256)] for _ in range(layers)]
        adapters = [[self.alloc(size) for size in (64, 256)] for _ in range(layers)]
        for layer in range(layers):
            for block in (weights[layer][1], adapters[layer][1], weights[layer][0]):
                self.mark("forward", f"layers.{layer}.mlp")
                self.claims.append(Claim(len(self.marks) - 1, block[0], "parameter"))
        self.mark("other", "", 1)


def test_blocks_of_equal_size_are_told_apart_by_those_before_them():
    traces = [Adapted(layers).trace for layers in (2, 3, 4)]
    continued = continuing.requests_of(traces, (2, 3, 4), 6)
    claimed = [block for _, block, _ in continued.claims]
    assert claimed == [block for layer in range(6) for block in (2 * layer + 1, 12 + 2 * layer + 1, 2 * layer)]


class Emptied(Program):
    """Frees the segments of what it loaded, one by one, before its layers."""

    def mark(self, phase, module, step=0):
        if phase == "forward" and len(self.marks) == 1:
            for segment in range(len(self.columns["size"])):
                self.note("segment_free", (2**40 + segment, 2**21))
        super().mark(phase, module, step)


def test_the_cache_is_emptied_where_it_was():
    traces = [Emptied(layers, [100], [7], [1024]).trace for layers in (2, 3, 4)]
    requests = list(triples(continuing.requests_of(traces, (2, 3, 4), 6)))
    (place,) = (number for number, (kind, *_) in enumerate(requests) if kind == EMPTY)
    assert [kind for kind, *_ in requests[:place]] == [MARK, *[ALLOC] * 6]
    assert requests[place + 1][0] == MARK


def test_only_what_grows_evenly_has_a_name():
    traces = [Program(layers, [8], [8], [8 * layers**2]).trace for layers in (3, 4, 5)]
    (growing,) = Sizes.of(traces).growing
    assert (growing.place, growing.first, growing.more) == (("optimizer", ""), 36, 12)
    with pytest.raises(CannotEstimate, match="more than their layers"):
        continuing.requests_of(traces, (3, 4, 5), 9)


def test_layers_that_are_not_alike_are_refused():
    with pytest.raises(CannotEstimate, match="more than their layers"):
        requests_of((SMALL, SMALL + 1, SMALL + 2), 1, [8], [8], [8], odd=512)


class Norms(Program):
    """Layers with two small weights each beside a large one, and three more small ones after them, all claimed."""

    def __init__(self, layers):
        self.marks, self.claims = [Mark(0, "load", "")], []
        self.columns = {name: array("q") for name in EVENT_COLUMNS}
        self.next_address = 512
        weights = [self.alloc(size) for _ in range(layers) for size in (4096, 48, 48)]
        weights += [self.alloc(48) for _ in range(3)]
        self.mark("forward", "")
        self.claims = [Claim(1, address, "parameter") for address, _ in weights]
        self.mark("other", "", 1)


def test_of_small_weights_that_follow_one_another_those_of_the_layers_are_found():
    """By their distance alone the last three would look like layers."""
    continued, whole = (
        continuing.requests_of([Norms(depth).trace for depth in depths], depths, DEEP)
        for depths in ((SMALL, SMALL + 1, SMALL + 2), (DEEP, DEEP + 1, DEEP + 2))
    )
    assert sorted(continued.claims) == sorted(whole.claims)
    assert len({block for _, block, _ in continued.claims}) == 3 * DEEP + 3


def test_a_block_of_another_kind_is_not_the_one_that_is_meant():
    named = BlockRegistry()
    large, small = (named.group(("load", "", size, 0, 0)) for size in (4096, 48))
    blocks = [named.add(alike) for alike in (small, large)]
    in_series = named.ways("claim", blocks[0])
    way, value = IN_SERIES[0], in_series[IN_SERIES[0]] + 1
    with pytest.raises(IndexError):
        named.block("claim", small, way, value)


def test_of_the_host_grows_what_is_not_touched():
    """About 100 are resident at every depth; pinned and untouched memory grows."""
    runs = [
        replace(
            Program(layers, (10,), (20,), (10,)).trace,
            host={"peak_bytes": peak, "pinned_bytes": 10 * layers, "zero_bytes": 4 * layers, "managed_bytes": 0},
        )
        for layers, peak in ((3, 142), (4, 157), (5, 170))
    ]
    found = continuing.extend(runs[0], runs, (3, 4, 5), 9).host
    assert found == {"peak_bytes": 170 + 4 * 14, "pinned_bytes": 90, "zero_bytes": 36, "managed_bytes": 0}


def test_an_unfinished_step_is_refused():
    trace = replace(Program(3, [8], [8], [8]).trace, outcome={"kind": "oom"})
    with pytest.raises(CannotEstimate, match="without a shortage"):
        tokens(trace)


# ---- beside whole runs on a ghost


LAYERS = 24


@pytest.mark.ghost
@pytest.mark.parametrize(
    ("gpu", "plan", "fields"),
    [
        ("4xa100-40gb", Plan(shard="zero3", checkpointing="full", allocator="expandable"), {"grad_accum": 2}),
        ("4xa100-40gb", Plan(shard="zero2", loss="chunked", optimizer="adamw-fused"), {}),
        ("2x2xa100-40gb", Plan(shard="hsdp", checkpointing="every-2"), {}),
        ("4xa100-40gb", Plan(shard="zero3", tp=2, checkpointing="selective"), {}),
        ("4xa100-40gb", Plan(shard="zero3", tp=2, checkpointing="full"), {"method": "lora", "lora_rank": 4}),
        ("4xa100-40gb", Plan(shard="zero3", tp=2, checkpointing="selective"), {"method": "lora", "lora_rank": 4}),
        ("a100-40gb", Plan(precision="fp16-mixed"), {"method": "lora", "lora_rank": 5}),
        ("4xa100-40gb", Plan(shard="zero3", cp=2, optimizer="sgd"), {}),
        ("4xa100-40gb", Plan(shard="zero3", clip_grad_norm=1), {}),
    ],
    ids=["zero3", "zero2", "hsdp", "tp", "tp lora", "tp lora selective", "lora", "cp", "clipped"],
)
def test_a_network_of_few_layers_continued_is_the_whole_one(worker, gpu, plan, fields):
    job = with_layers(tiny_job("llama", seq_len=256, **fields), LAYERS)
    compare(worker, job, plan, parse_cluster(gpu))


def compare(worker, job, plan, cluster, rank=0):
    whole = estimate(Case(job, plan, cluster), worker=worker, rank=rank, steps=1, repeated=2, fresh=True)
    found = estimate(
        Case(job, plan, cluster), worker=worker, rank=rank, steps=1, repeated=2, few_layers=True, fresh=True
    )
    assert found.traces[0].layers == (*depths.choose_assembly_depths(job, plan), depths.layers_of(job))
    assert replace(found.estimate.peak, by_category={}) == replace(whole.estimate.peak, by_category={})
    largest = whole.estimate.peak.allocated_bytes
    assert found.estimate.peak.by_category == pytest.approx(whole.estimate.peak.by_category, abs=0.01 * largest)
    assert found.estimate.phases == whole.estimate.phases
    assert found.estimate.steps == whole.estimate.steps
    assert found.estimate.model == whole.estimate.model
    assert found.traces[0].peaks == whole.traces[0].peaks
    assert "layers" in found.estimate.coverage.run[0]


@pytest.mark.ghost
@pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("qwen2_5_vl", Plan(shard="zero3", allocator="expandable")),
        ("llava", Plan(shard="zero2", checkpointing="selective")),
    ],
)
def test_the_decoder_of_an_image_text_model_continued_is_the_whole_one(worker, family, plan):
    job = tiny_job(family, seq_len=512)
    config = {name: value for name, value in job.model.config.items() if name != "num_hidden_layers"}
    job = with_layers(replace(job, model=replace(job.model, config=config)), LAYERS)
    compare(worker, job, plan, parse_cluster("4xa100-40gb"))


@pytest.mark.ghost
@pytest.mark.parametrize("allocator", ["default", "expandable"])
def test_quantized_layers_continued_are_the_whole_ones(worker, allocator):
    """The loader takes one block for all weights first, frees it, and empties the cache."""
    pytest.importorskip("bitsandbytes")
    job = with_layers(tiny_job("llama", seq_len=256, method="qlora", lora_rank=4), LAYERS)
    compare(worker, job, Plan(checkpointing="full", allocator=allocator), parse_cluster("a100-40gb"))


def on_a_t4(worker, *columns):
    """Return the Trace of requests on a T4."""
    requests = Requests(
        marks=(Mark(0, "load", ""),),
        columns=array("q", [number for each in columns for number in each]),
        claims=(),
        exchanges=(),
        growing=frozenset(),
    )
    return worker.repeat(requests, tiny_job("llama"), Plan(), parse_cluster("t4"), rank=0, repeated=0)


@pytest.mark.ghost
def test_a_cache_that_is_emptied_is_emptied_again(worker):
    large, small = (ALLOC, 100 * MIB, 0), (ALLOC, 30 * MIB, 0)
    made = []
    for emptied in ([], [(EMPTY, 0, 0)]):
        found = on_a_t4(worker, (MARK, 0, 0), large, (FREE, 0, 0), *emptied, small)
        made.append([ACTIONS[action] for action in found.event_columns["action"]])
    block = ["alloc", "free_requested", "free_completed"]
    assert made[0] == ["segment_alloc", *block, "alloc"]
    assert made[1] == ["segment_alloc", *block, "segment_free", "segment_alloc", "alloc"]


@pytest.mark.ghost
def test_a_first_block_larger_than_the_card_does_not_fit(worker):
    """Loaders of quantized weights take one for all of them, before anything else."""
    found = on_a_t4(worker, (MARK, 0, 0), (ALLOC, 40_000 * MIB, 0), (FREE, 0, 0))
    assert found.outcome["kind"] == "oom"
    assert {ACTIONS[action] for action in found.event_columns["action"]} <= {"oom", "segment_free"}
    assert set(found.event_columns["mark"]) == {0}


@pytest.mark.ghost
@pytest.mark.parametrize(
    ("rank", "shard", "schedule"), [(0, "zero2", "1f1b"), (2, "zero3", "1f1b"), (0, "zero2", "interleaved")]
)
def test_a_stage_of_few_layers_continued_is_the_whole_one(worker, rank, shard, schedule):
    plan = Plan(shard=shard, pp=2, pp_schedule=schedule, checkpointing="full", allocator="expandable")
    job = with_layers(tiny_job("llama", seq_len=256, grad_accum=4), 120)
    compare(worker, job, plan, parse_cluster("4xa100-40gb"), rank)


@pytest.mark.ghost
@pytest.mark.parametrize(
    ("model", "plan", "fields"),
    [
        ("llama", Plan(shard="zero3", checkpointing="selective", loss="chunked", optimizer="adamw-fused"), {}),
        ("llama", Plan(shard="zero2", tp=2, cp=2, accum_sync=True), {"grad_accum": 3}),
        ("mixtral", Plan(shard="zero3", ep=2, checkpointing="full"), {}),
        ("llama", Plan(checkpointing="full"), {"method": "lora", "lora_rank": 5}),
    ],
    ids=["zero3", "tp and cp", "experts", "lora"],
)
def test_few_layers_say_what_is_asked_for_whichever_allocator_answered(
    worker, tmp_path, monkeypatch, model, plan, fields
):
    run, ran = worker.run, []
    monkeypatch.setattr(cache, "folder", lambda: tmp_path)
    monkeypatch.setattr(worker, "run", lambda *asked, **how: ran.append(asked) or run(*asked, **how))
    job = with_layers(tiny_job(model, seq_len=256, **fields), LAYERS)
    cluster = parse_cluster("a100-40gb" if plan.shard == "none" else "4xa100-40gb")
    options = {"worker": worker, "rank": 0, "steps": 1, "repeated": 2, "few_layers": True}
    plans = [replace(plan, allocator=allocator) for allocator in ("expandable", "default")]
    for one, other in (plans, plans[::-1]):
        alone = estimate(Case(job, one, cluster), **options, fresh=True)
        for kept in tmp_path.iterdir():
            kept.unlink()
        estimate(Case(job, other, cluster), **options)
        ran.clear()
        found = estimate(Case(job, one, cluster), **options)
        assert ran == []
        assert found.traces[0].layers
        assert found.estimate.peak == alone.estimate.peak
        assert found.estimate.phases == alone.estimate.phases
        assert found.traces[0].peaks == alone.traces[0].peaks
        grown = ACTIONS.index("segment_map") in found.traces[0].event_columns["action"]
        assert grown == (one.allocator == "expandable")


@pytest.mark.ghost
def test_what_does_not_fit_does_not_fit_continued(worker):
    job, plan = with_layers(tiny_job("llama", seq_len=256, method="lora", lora_rank=5), LAYERS), Plan()
    cluster = parse_cluster("a100-40gb")
    need = estimate(Case(job, plan, cluster), worker=worker, steps=1, repeated=1, fresh=True).estimate.peak
    for less_bytes in (need.allocated_bytes // 4, need.allocated_bytes * 3 // 4):
        small = replace(cluster, device=cluster.device.with_capacity(need.process_bytes - less_bytes))
        options = {"worker": worker, "steps": 1, "repeated": 1, "fresh": True}
        whole = estimate(Case(job, plan, small), **options).estimate
        found = estimate(Case(job, plan, small), few_layers=True, **options)
        assert found.traces[0].layers
        oom = found.estimate.oom
        assert (oom.phase, oom.step, oom.layer) == (whole.oom.phase, whole.oom.step, whole.oom.layer)


@pytest.mark.ghost
def test_what_nccl_takes_of_a_card_is_taken_continued_too(worker):
    """The cache is as large as the GPU allows: it is freed, or memory does not suffice."""
    job, plan = with_layers(tiny_job("llama", seq_len=256), LAYERS), Plan(shard="zero3", checkpointing="full")
    cluster = parse_cluster("4xa100-40gb")
    need = estimate(Case(job, plan, cluster), worker=worker, rank=0, steps=1, repeated=1, fresh=True).estimate.peak
    outside = need.process_bytes - need.reserved_bytes
    half = outside + need.allocated_bytes // 2
    for card_bytes in (need.process_bytes, need.process_bytes - 4 * MIB, half, outside):
        small = replace(cluster, device=cluster.device.with_capacity(card_bytes))
        options = {"worker": worker, "rank": 0, "steps": 1, "repeated": 1, "fresh": True}
        whole = estimate(Case(job, plan, small), **options)
        found = estimate(Case(job, plan, small), few_layers=True, **options)
        assert found.traces[0].layers
        assert found.estimate.fits == whole.estimate.fits
        assert found.estimate.fits == (card_bytes == need.process_bytes), card_bytes
        assert found.estimate.peak.process_bytes <= card_bytes
        assert whole.estimate.peak.process_bytes <= card_bytes


def test_why_a_worker_died_is_said_and_not_that_it_is_closed():
    class Dead:
        torch_version, trace_file, closed = None, None, False

        def run(self, *asked, **options):
            self.closed = True
            raise CannotEstimate("The ghost process ended early: no libcudart.so.13")

    job, plan = request("llama-3.1-70b", offline=True, shard="zero3")
    with pytest.raises(CannotEstimate, match=r"no libcudart\.so\.13"):
        estimate(
            Case(job, plan, parse_cluster("8xh100-80gb")), rank=0, steps=1, few_layers=True, worker=Dead(), fresh=True
        )


def test_requests_of_the_same_runs_are_made_once(monkeypatch):
    """Two are kept; runs without a key never match."""
    monkeypatch.setattr(sources, "_made_requests", {})
    made = []

    def requests(*key):
        return sources._requests(key, lambda: made.append(key) or key)

    for key in (("a", 1), ("a", 1), ("b", 1), ("a", 1), ("c", 1), ("b", 1), ("a", 1), (None, 1), (None, 1)):
        assert requests(*key) == key
    assert made == [("a", 1), ("b", 1), ("c", 1), ("a", 1), (None, 1), (None, 1)]
