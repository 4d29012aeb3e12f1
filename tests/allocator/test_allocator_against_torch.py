"""The replica equals the allocator inside torch on a ghost GPU in all events, statistics and segments.

Both run the same random programs.  Each program runs in its own fork, made before torch initialises the GPU.
"""

import functools
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from allocator_programs import (
    Operation,
    compare_events,
    compare_segments,
    compare_statistics,
    graph_program,
    random_program,
    replicate,
)
from tonnage.allocator import AllocatorSettings, replay
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.errors import GhostUnavailable, UsageError
from tonnage.estimates import predict
from tonnage.ghost.environment import environment
from tonnage.trace.trace import Event
from tonnage.trainers.cases import request
from tonnage.units import GIB, MIB
from tonnage.workers.worker import Worker

pytestmark = pytest.mark.ghost

SCRIPT = Path(__file__).parents[1] / "programs" / "allocator_fuzz.py"
LENGTH = 1500

SETTINGS = {
    "default": ("", 8 * GIB),
    "tight": ("", GIB),
    "split": ("max_split_size_mb:128", 2 * GIB),
    "split tight": ("max_split_size_mb:20", GIB),
    "split and rounding": ("max_split_size_mb:40,max_non_split_rounding_mb:64", 2 * GIB),
    "powers of two": ("roundup_power2_divisions:4", 4 * GIB),
    "powers of two by size": ("roundup_power2_divisions:[4:2,16:4,64:8,256:1,>:2]", 4 * GIB),
    "powers of two above": ("roundup_power2_divisions:[>:4]", 4 * GIB),
    "garbage collection": ("garbage_collection_threshold:0.6,per_process_memory_fraction:0.5", 4 * GIB),
    "expandable": ("expandable_segments:True", 8 * GIB),
    "expandable tight": ("expandable_segments:True", GIB),
    "expandable fraction": ("expandable_segments:True,per_process_memory_fraction:0.25", 4 * GIB),
    "expandable collection": (
        "expandable_segments:True,per_process_memory_fraction:0.25,garbage_collection_threshold:0.5",
        4 * GIB,
    ),
    "expandable split": (
        "expandable_segments:True,roundup_power2_divisions:8,max_split_size_mb:64",
        GIB,
    ),
    "large segments": ("large_segment_size_mb:64", 4 * GIB),
    "expandable large segments": ("expandable_segments:True,large_segment_size_mb:64", 2 * GIB),
    "rejection": ("throw_on_cudamalloc_oom:True,per_process_memory_fraction:0.5", 2 * GIB),
    "rejection of all": ("throw_on_cudamalloc_oom:True", GIB),
}
PROGRAMS = {
    "streams": {},
    "private pools": {"pools": True},
    "late events": {"late": True},
}


GRAPHS = ("default", "tight", "split tight", "powers of two", "garbage collection", "expandable")


@functools.cache
def ghost() -> tuple[str, ...]:
    """Return the environment variables of a ghost process, as name=value; skip where no ghost can run."""
    try:
        variables = environment(total_bytes=8 * GIB, context_bytes=0, capability="9.0")
    except GhostUnavailable as error:
        pytest.skip(str(error))
    variables["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # one warning for each failed mapping otherwise
    return tuple(f"{name}={value}" for name, value in variables.items())


def run_on_ghost(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    variables = dict(each.split("=", 1) for each in ghost())
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        input=json.dumps(jobs),
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert (done.returncode, len(lines)) == (0, len(jobs)), done.stderr[-2000:]
    return [json.loads(line) for line in lines]


def job(operations: list[Operation], text: str, total_bytes: int, *, lazy: bool) -> dict[str, Any]:
    variables = {
        "PYTORCH_ALLOC_CONF": text,
        "GHOST_TOTAL_BYTES": str(total_bytes),
        "GHOST_EVENTS": "lazy" if lazy else "immediate",
    }
    return {"environment": variables, "operations": operations}


@functools.cache
def real_runs(kind: str, seed: int) -> dict[tuple[str, int], tuple[list[Operation], dict[str, Any]]]:
    """Return the results of a kind's programs of a seed, which torch runs in one process."""
    keys = [(name, seed) for name in SETTINGS]
    programs = [random_program(seed, LENGTH, **PROGRAMS[kind]) for _, seed in keys]
    jobs = [
        job(program, *SETTINGS[name], lazy=kind == "late events")
        for (name, _), program in zip(keys, programs, strict=True)
    ]
    return dict(zip(keys, zip(programs, run_on_ghost(jobs), strict=True), strict=True))


@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_replica_equals_torch(kind: str, name: str, seed: int) -> None:
    operations, real = real_runs(kind, seed)[name, seed]
    assert "failed" not in real
    text, total_bytes = SETTINGS[name]
    replica = replicate(operations, real, total_bytes=total_bytes, settings=text, lazy=kind == "late events")
    assert compare_events(real["events"], replica.allocator) is None
    assert compare_statistics(real["statistics"], replica.allocator) == {}
    assert compare_segments(real["segments"], replica.allocator) is None
    assert replica.out_of_memory == real["out_of_memory"]


@functools.cache
def graph_runs() -> dict[str, tuple[list[Operation], dict[str, Any]]]:
    programs = {name: graph_program(seed, LENGTH) for seed, name in enumerate(GRAPHS, 1)}
    jobs = [job(program, *SETTINGS[name], lazy=False) for name, program in programs.items()]
    return dict(zip(GRAPHS, zip(programs.values(), run_on_ghost(jobs), strict=True), strict=True))


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_are_captured_into_private_pools(name: str) -> None:
    operations, real = graph_runs()[name]
    assert "failed" not in real
    text, total_bytes = SETTINGS[name]
    replica = replicate(operations, real, total_bytes=total_bytes, settings=text)
    assert len(real["pools"]) > 5
    assert compare_events(real["events"], replica.allocator) is None
    # torch keeps blocks that wait for the end of a capture in a hash map, whose order changes the splits meanwhile
    differences = compare_statistics(real["statistics"], replica.allocator)
    assert [name for name in differences if not name.startswith("inactive_split")] == []
    assert compare_segments(real["segments"], replica.allocator) is None


def test_programs_cover_all_cases() -> None:
    """Out of memory, retries, garbage collection, waiting blocks and private pools all occur in the programs."""
    streams = {name: real for (name, _), (_, real) in real_runs("streams", 1).items()}
    actions = {name: [event[0] for event in real["events"]] for name, real in streams.items()}
    assert streams["tight"]["out_of_memory"]
    assert len(streams["rejection of all"]["out_of_memory"]) > actions["rejection of all"].count("oom")
    assert actions["tight"].count("segment_free") > actions["default"].count("segment_free")
    assert actions["garbage collection"].count("segment_free") > actions["default"].count("segment_free")
    assert actions["expandable tight"].count("segment_unmap") > actions["expandable"].count("segment_unmap")
    assert actions["split"].count("segment_alloc") > actions["default"].count("segment_alloc")
    late = [real for _, real in real_runs("late events", 1).values()]
    assert any(waits(real["events"]) > 10 for real in late)
    pools = [real for _, real in real_runs("private pools", 1).values()]
    assert all(real["statistics"]["reserved_bytes_by_private_pools.0_1.all.peak"] > 0 for real in pools)


def waits(events: list[list[Any]]) -> int:
    """Return the number of frees that were not completed at once."""
    return sum(first[0] == "free_requested" and second[0] != "free_completed" for first, second in pairwise(events))


@pytest.mark.parametrize("gpu", ["t4", "h100-80gb"])
def test_replay_of_a_training_step_equals_it(gpu: str, worker: Worker) -> None:
    """The replayed trace of a real step has the same events in the same order, with the same marks."""
    asked = request("smollm2-135m", offline=True, seq_len=512, micro_batch=2, precision="fp32")
    (trace,) = predict.estimate(Case(*asked, parse_cluster(gpu)), worker=worker).traces
    recorded = list(trace.events())
    total, taken = trace.device["total_bytes"], trace.device["context_bytes"]
    result = replay(
        recorded,
        AllocatorSettings.parse(trace.allocator_settings),
        total,
        trace.versions["torch"],
        taken_bytes=taken,
        recorded_limit_bytes=total - taken,
    )
    assert [_without_address(event) for event in result.events] == [_without_address(event) for event in recorded]
    assert result.peak_allocated_bytes == trace.peaks["allocated_bytes"]
    assert result.peak_reserved_bytes == trace.peaks["reserved_bytes"]


def _without_address(event: Event) -> Event:
    return event._replace(address=0)


def test_settings_change_while_the_program_runs() -> None:
    program: list[Operation] = [
        ["alloc", 30 * MIB, 0],
        ["settings", "expandable_segments:True"],
        ["alloc", 3 * MIB, 0],
        ["alloc", 300, 0],
        ["free", 0],
        ["free", 1],
        ["settings", "expandable_segments:False"],
        ["alloc", 3 * MIB, 0],
        ["alloc", 25 * MIB, 0],
        ["alloc", 500, 0],
        ["empty"],
    ]
    (real,) = run_on_ghost([job(program, "", 8 * GIB, lazy=False)])
    replica = replicate(program, real, total_bytes=8 * GIB)
    assert compare_events(real["events"], replica.allocator) is None
    assert compare_statistics(real["statistics"], replica.allocator) == {}


OPTIONS = [
    *("max_split_size_mb:20", "max_split_size_mb:19", "max_split_size_mb:0", "max_split_size_mb:abc"),
    *("max_split_size_mb", "max_split_size_mb:", "nonsense:1", ",max_split_size_mb:128"),
    *("expandable_segments:True", "expandable_segments:true", "expandable_segments:1"),
    *("garbage_collection_threshold:0", "garbage_collection_threshold:0.5", "garbage_collection_threshold:1"),
    *("max_non_split_rounding_mb:20", "max_non_split_rounding_mb:19"),
    *("large_segment_size_mb:10", "large_segment_size_mb:11", "large_segment_size_mb:33"),
    *("max_split_size_mb:64,large_segment_size_mb:128", "large_segment_size_mb:32,max_split_size_mb:64"),
    *("per_process_memory_fraction:0", "per_process_memory_fraction:1", "per_process_memory_fraction:1.5"),
    *("roundup_power2_divisions:3", "roundup_power2_divisions:0", "roundup_power2_divisions:64"),
    *("roundup_power2_divisions:[]", "roundup_power2_divisions:[300:2]", "roundup_power2_divisions:[0:2]"),
    *("roundup_power2_divisions:[256:3]", "roundup_power2_divisions:[>=:4]", "roundup_power2_divisions:[>:4]"),
    *("roundup_power2_divisions:[512:2,256:4]", "roundup_power2_divisions:[256:2,>:4,512:8]"),
    *("roundup_power2_divisions:[131072:2]", "roundup_power2_divisions:[4:0,8:4]"),
    *(" max_split_size_mb : 128 , expandable_segments:True", "max_split_size_mb:128,", "backend:native"),
    *("throw_on_cudamalloc_oom:True", "release_lock_on_cudamalloc:True", "pinned_num_register_threads:4"),
]
SIZES = [
    513,
    5000,
    1100000,
    MIB + 1,
    3 * MIB + 5,
    5 * MIB + 7,
    9 * MIB + 1,
    70 * MIB + 3,
    300 * MIB + 1,
    700 * MIB + 1,
]


@functools.cache
def real_options() -> dict[str, dict[str, Any]]:
    sizes: list[Operation] = []
    for number, size in enumerate(SIZES):
        sizes += [["alloc", size, 0], ["free", number], ["empty"]]
    jobs = [job(sizes, text, 8 * GIB, lazy=False) for text in OPTIONS]
    return dict(zip(OPTIONS, run_on_ghost(jobs), strict=True))


@pytest.mark.parametrize("text", OPTIONS)
def test_options_are_parsed_like_torch(text: str) -> None:
    """Options are refused if torch refuses them; otherwise blocks and segments have torch's sizes."""
    real = real_options()[text]
    if "failed" in real:
        with pytest.raises(UsageError):
            AllocatorSettings.parse(text)
        return
    settings = AllocatorSettings.parse(text)
    blocks = real["statistics"]["allocated_bytes.all.allocated"]
    if not settings.expandable_segments and settings.per_process_memory_fraction == 1.0:
        assert sum(expected_block(settings, size) for size in SIZES) == blocks
        segments = [event[2] for event in real["events"] if event[0] == "segment_alloc"]
        assert [settings.segment_size(settings.round_size(size)) for size in SIZES] == segments


def expected_block(settings: AllocatorSettings, size: int) -> int:
    """Return the size of a block on a new segment; it keeps a rest that cannot be split off."""
    rounded = settings.round_size(size)
    rest = settings.segment_size(rounded) - rounded
    if rounded <= MIB:
        return rounded
    splits = settings.max_split_bytes is None or rounded < settings.max_split_bytes
    return rounded if splits and rest > MIB else rounded + rest
