"""The GPU recorder's own machinery: which cases, processes, files and comparisons; no GPU and no ghost needed."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scripts find each other because Python puts a script's folder first; so does this."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


# --- the matrix


def test_every_case_is_there_once_and_says_what_it_is() -> None:
    from matrix import matrix

    cases = matrix()
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    assert 200 <= len(names) <= 260
    assert names[0] == "llama-3.2-1b/full/bf16-mixed/adamw/ckpt-none/seq2048/mb2"
    assert cases[0].traced
    limited = next(case for case in cases if case.limit_bytes is not None)
    assert limited.name.endswith("/limit78.69GiB")
    assert limited.limit_bytes == int(78.69 * 2**30)


UNMEASURED = {
    "optimizer": {"adamw-4bit", "adamw-fp8-ao"},  # compiled a shape at a time, as adamw-8bit-ao is
    "loss": {"torch"},  # of torch 2.13 and newer
    "shard": {"hsdp"},  # of several machines
    "engine": {"torchtitan", "axolotl"},  # wants a newer torch; is hf-trainer with other settings
}
"""Values of options that no case has."""

WITH_NUMBERS = {"checkpointing": {"every-N": "every-2", "budget=SIZE": "budget=4GiB"}}


@pytest.mark.parametrize(
    "option", ["precision", "optimizer", "attention", "loss", "allocator", "shard", "checkpointing"]
)
def test_every_value_of_an_option_is_measured(option: str) -> None:
    from matrix import matrix

    from tonnage.techniques import choices

    measured = {getattr(case.plan, option) for case in matrix()}
    wanted = {WITH_NUMBERS.get(option, {}).get(value, value) for value in choices(option)}
    assert wanted - measured == UNMEASURED.get(option, set())


def test_every_trainer_is_measured() -> None:
    from matrix import matrix

    from tonnage.trainers import names

    cases = matrix()
    assert set(names()) - {case.plan.engine for case in cases} == UNMEASURED["engine"]
    assert {case.by_trainer for case in cases if case.plan.engine == "tonnage"} == {False}
    assert {case.by_trainer for case in cases if case.plan.engine != "tonnage"} == {True}


def test_a_step_is_timed_where_all_are_alike() -> None:
    from case import case

    assert case("smollm2-135m", packing=4).timed
    assert not case("smollm2-135m", lengths=("512", "1024")).timed
    assert not case("smollm2-135m", save_checkpoint="full").timed


def test_a_case_says_which_package_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    import case as cases

    monkeypatch.setattr(cases, "find_spec", lambda name: None if name == "bitsandbytes" else name)
    assert cases.case("smollm2-135m").lacking() is None
    assert cases.case("smollm2-135m", optimizer="adamw-8bit").lacking() == "the package bitsandbytes is not installed"
    assert cases.case("smollm2-135m", engine="megatron").libraries[0] == "megatron.core.models.gpt"


def test_a_network_is_in_the_matrix_in_the_catalog_or_the_first_layers_of_one() -> None:
    from models import model

    assert model("t5-base").config["d_model"] == 768
    assert model("gpt-oss-20b").config["num_hidden_layers"] == 24
    cut = model("gpt-oss-20b-3-layers").config
    assert cut["num_hidden_layers"] == len(cut["layer_types"]) == 3


def test_cases_are_chosen_by_pattern_across_slashes() -> None:
    from case import chosen
    from matrix import matrix

    found = chosen(matrix(), "gpt2*eager")
    assert [case.name for case in found] == ["gpt2-medium/full/bf16-true/adamw/ckpt-none/seq1024/mb8/attn-eager"]


def test_an_unknown_model_names_those_there_are() -> None:
    from models import model

    with pytest.raises(KeyError, match=r"llama-3\.2-1b"):
        model("llama-9")


# --- phases


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What the card says of memory at a mark: `value` of everything, whatever was asked."""
    torch = pytest.importorskip("torch")
    said = {"value": 0}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: defaultdict(lambda: said["value"]))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (100 - said["value"], 100))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return said


def test_peaks_are_those_of_the_phase_that_ended(peaks: dict[str, int]) -> None:
    from measure import Phases

    phases = Phases()
    for phase, at_its_end in (("forward", 7), ("backward", 9), ("forward", 3), ("optimizer", 5)):
        phases.mark(phase)
        assert phases.running == phase
        peaks["value"] = at_its_end
    phases.mark(None)
    taken = phases.take()
    assert {name: each["allocated_bytes"] for name, each in taken.items()} == {
        "forward": 7,
        "backward": 9,
        "optimizer": 5,
    }
    assert taken["backward"]["cuda_used_bytes"] == 9
    assert phases.take() == {}


def test_what_happens_besides_steps_is_one_phase(peaks: dict[str, int]) -> None:
    from measure import Phases

    phases = Phases()
    phases.mark("optimizer")
    peaks["value"] = 4
    phases.set_event("generate")
    peaks["value"] = 2
    phases.mark("forward")
    phases.set_event("")
    phases.mark("forward")
    peaks["value"] = 3
    phases.mark(None)
    assert {name: each["reserved_bytes"] for name, each in phases.take().items()} == {
        "optimizer": 4,
        "generate": 2,
        "forward": 3,
    }


def test_steps_of_a_trainer_are_told_by_backward_and_its_optimizer(
    peaks: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    import measure
    import torch

    monkeypatch.setattr(measure.driver, "observe", dict)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: Mock())
    run_backward = torch.autograd._engine_run_backward
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    watched = measure.TrainerSteps(measure.Phases(), "real", traced=False)
    with watched:
        weight.grad = torch.zeros(4)
        optimizer.step()  # states ahead of time
        for _ in range(measure.MEMORY_STEPS + 2):
            for _ in range(2):
                torch.utils.checkpoint.checkpoint(torch.sin, weight, use_reentrant=True).sum().backward()
            optimizer.step()
    assert len(watched.taken) == measure.MEMORY_STEPS
    assert len(watched.marks) == 2
    assert all(set(step["phases"]) == {"step", "backward", "optimizer"} for step in watched.taken)
    assert torch.autograd._engine_run_backward is run_backward


# --- processes


def run(parts: Any, seconds: float = 30) -> dict[str, Any]:
    import isolated

    return isolated.run(parts, timeout_seconds=seconds)


def test_parts_are_put_together() -> None:
    assert run(lambda: iter([{"a": 1, "b": 1}, {"b": 2}])) == {"a": 1, "b": 2}


def test_work_happens_in_another_process() -> None:
    assert run(lambda: iter([{"process": os.getpid()}]))["process"] != os.getpid()


def test_an_exception_keeps_what_came_before() -> None:
    def parts() -> Iterator[dict[str, Any]]:
        yield {"a": 1}
        raise ValueError("no second part")

    answer = run(parts)
    assert answer["a"] == 1
    assert answer["error"] == "ValueError: no second part"
    assert "in parts" in answer["traceback"]


def test_a_crash_is_an_error_of_that_work_alone() -> None:
    def parts() -> Iterator[dict[str, Any]]:
        yield {"a": 1}
        os.kill(os.getpid(), 9)

    assert run(parts) == {"a": 1, "error": "the process ended without an answer: SIGKILL"}


def test_work_that_hangs_is_stopped() -> None:
    def parts() -> Iterator[dict[str, Any]]:
        yield {"process": os.getpid()}
        time.sleep(600)

    answer = run(parts, seconds=3)  # of which its first part needs some on a busy machine
    assert answer["error"] == "stopped after 3 s"
    with pytest.raises(ProcessLookupError):
        os.kill(answer["process"], 0)


def test_an_answer_larger_than_a_pipe_arrives_whole() -> None:
    assert len(run(lambda: iter([{"text": "x" * 5_000_000}]))["text"]) == 5_000_000


# --- files


def test_a_half_written_line_is_cut_off_and_its_case_done_again(tmp_path: Path) -> None:
    import record

    out = tmp_path / "records.jsonl"
    whole = json.dumps({"case": "a"}) + "\n" + json.dumps({"fact": "device"}) + "\n"
    out.write_text(whole + '{"case": "b", "st')
    assert record._done(out) == {"a", "device"}
    assert out.read_text() == whole


def test_events_go_to_a_file_beside_the_records(tmp_path: Path) -> None:
    import record

    out = tmp_path / "records.jsonl"
    record._append(out, {"case": "a", "trace": "packed", "load": {}})
    assert json.loads(out.read_text()) == {"case": "a", "load": {}}
    assert json.loads((tmp_path / "records.events.jsonl").read_text()) == {"case": "a", "trace": "packed"}


# --- the allocator's events


def event(action: str, address: int, size_bytes: int, stream: int = 0) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size_bytes, "stream": stream}


def test_addresses_become_segments_and_offsets() -> None:
    import events

    columns = events.columns(
        [
            event("segment_alloc", 1000, 200),
            event("alloc", 1000, 50),
            event("segment_alloc", 5000, 100, stream=7),
            event("alloc", 5020, 30, stream=7),
            event("alloc", 1100, 50),
            event("free_completed", 1000, 50),
        ]
    )
    assert columns["segment"] == [0, 0, 1, 1, 0, 0]
    assert columns["offset"] == [0, 0, 0, 20, 100, 0]
    assert columns["stream"] == [0, 0, 1, 1, 0, 0]


def test_pages_mapped_next_to_each_other_are_one_segment() -> None:
    import events

    columns = events.columns([event("segment_map", 0, 20), event("segment_map", 20, 20), event("alloc", 10, 25)])
    assert columns["segment"] == [0, 0, 0]
    assert columns["offset"] == [0, 20, 10]


def test_two_segments_side_by_side_stay_two() -> None:
    import events

    columns = events.columns([event("segment_alloc", 0, 20), event("segment_alloc", 20, 20), event("alloc", 20, 5)])
    assert columns["segment"] == [0, 1, 1]


def test_sizes_are_requests_and_frees() -> None:
    import events

    seen = [event("segment_alloc", 0, 100), event("alloc", 0, 7), event("free_requested", 0, 7)]
    assert events.sizes([*seen, event("free_completed", 0, 7)]) == [7, -7]


def test_packed_columns_come_back() -> None:
    import packed

    assert packed.unpack(packed.pack({"bytes": [1, 2, 3]})) == {"bytes": [1, 2, 3]}


def test_exported_names_of_a_library() -> None:
    from exports import exported_symbols

    path = next(p for p in Path("/proc/self/maps").read_text().split() if "libc.so.6" in p or "libc-2" in p)
    names = exported_symbols(Path(path))
    assert {"malloc", "free", "printf"} <= set(names)
    assert "ghost_set" not in names
    assert ctypes.CDLL(None).malloc is not None


def test_a_file_that_is_no_library_exports_nothing(tmp_path: Path) -> None:
    from exports import exported_symbols

    (tmp_path / "text").write_text("no library")
    assert exported_symbols(tmp_path / "text") == []


# --- the comparison


def phase(allocated: int, reserved: int, used: int | None) -> dict[str, Any]:
    return {"allocated_bytes": allocated, "reserved_bytes": reserved, "cuda_used_bytes": used}


def record_of(name: str, *phases: dict[str, Any], **more: Any) -> dict[str, Any]:
    versions = {"torch": "2.11.0+cu130", "gpu": "NVIDIA H200", "total_bytes": 1000, "capability": "9.0"}
    steps = [{"phases": {"forward": one}} for one in phases[1:]]
    return {"case": name, "load": {"phases": {"load": phases[0]}}, "steps": steps, "versions": versions, **more}


def written(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_peaks_are_the_highest_of_all_phases(tmp_path: Path) -> None:
    import compare

    found = compare.peaks(record_of("a", phase(5, 10, 30), phase(9, 20, 41), phase(7, 20, 40)))
    assert (found.allocated_bytes, found.reserved_bytes, found.process_bytes) == (9, 20, 41)
    assert found.outside_bytes == 21


def test_a_step_that_ran_out_of_memory_counts_as_far_as_it_came() -> None:
    import compare

    found = compare.peaks(record_of("a", phase(5, 10, None), unfinished={"backward": phase(50, 60, None)}))
    assert (found.allocated_bytes, found.reserved_bytes, found.process_bytes) == (50, 60, None)


def test_the_report_says_how_far_apart_they_are(tmp_path: Path) -> None:
    import compare
    import events
    import packed

    ours = packed.pack(events.columns([event("segment_alloc", 0, 100), event("alloc", 0, 7), event("alloc", 50, 9)]))
    theirs = packed.pack(
        events.columns([event("segment_alloc", 0, 100), event("alloc", 0, 7), event("alloc", 64, 9)])
    )
    real = written(
        tmp_path / "real.jsonl",
        record_of("a", phase(200, 400, 500), phase(100, 400, 500), phase(200, 400, 500)),
        record_of("b", phase(100, 100, 200), oom={"phase": "backward"}),
        {"fact": "op mm", "first": [8]},
        {"fact": "op sum", "first": [8, 64, -64]},
        {"fact": "op sort", "failed": "RuntimeError: not here"},
    )
    ghost = written(
        tmp_path / "ghost.jsonl",
        record_of("a", phase(201, 380, None), phase(100, 380, None), phase(201, 380, None)),
        record_of("b", phase(100, 100, None)),
        {"fact": "op mm", "first": [8]},
        {"fact": "op sum", "first": [8]},
        {"fact": "op sort", "first": []},
    )
    written(tmp_path / "real.events.jsonl", {"case": "a", "trace": ours})
    written(tmp_path / "ghost.events.jsonl", {"case": "a", "trace": theirs})
    text = "\n".join(compare._report(compare.read(real), compare.read(ghost)))
    assert "| a | 0.000 | 0.000 | +0.50 | 0.000 | 0.000 | -5.00 | 0.000 |  |" in text
    assert "real backward, ghost fits" in text
    assert "2 cases; the same verdict in 1; of the 1 that fit on both:" in text
    assert "median 0.500 %" in text
    assert "2 peaks of phases of steps: 1 to the byte, 1 within 0.2 %" in text
    assert "| a | 3 | 3 | 2 | 100.00% | alloc 9 B stream 0 segment 0+50 / alloc 9 B stream 0 segment 0+64 |" in text
    assert "1 of 2 operations ask for the same sizes" in text
    assert "| sum | +8 +64 -64 | +8 |" in text
    assert "- op sort, real: RuntimeError: not here" in text


def test_an_answer_is_set_beside_the_record_of_the_same() -> None:
    """60 GiB of process said, in 59 to 61; measured 61.5 by nvidia-smi, whatever the device had in use."""
    import answers

    from estimates import fitting

    gib = 2**30
    record = record_of("a", phase(0, 0, 0), phase(58 * gib, 59 * gib, 90 * gib), timing={"median_seconds": 2.0})
    record["steps"][0]["nvml_process_bytes"] = int(61.5 * gib)
    said = fitting()
    said = replace(
        said,
        peak=replace(said.peak, allocated_bytes=29 * gib, reserved_bytes=59 * gib, process_bytes=60 * gib,
                     low_bytes=59 * gib, high_bytes=61 * gib),
        time={"step_seconds": 1.5, "low_seconds": 1.0, "high_seconds": 2.0},
    )  # fmt: skip
    found = answers.answer(record, said)
    assert (found.allocated_percent, found.reserved_percent) == (-50.0, 0.0)
    assert found.process_percent == pytest.approx(100 * (60 / 61.5 - 1))
    assert not found.within
    assert (found.seconds, found.seconds_percent, found.in_time) == (2.0, -25.0, True)
    text = "\n".join(answers._report([found]))
    assert "| a | -50.00 | +0.00 | -2.44 | no | 2.0000 | -25.0 | yes |" in text
    assert "- in their interval: process 0 of 1, seconds 1" in text


def test_an_answer_without_seconds_is_none(tmp_path: Path) -> None:
    import answers

    from estimates import fitting

    record = record_of("a", phase(0, 0, 0), phase(gib := 2**30, gib, gib))
    record["steps"][0]["nvml_process_bytes"] = None
    found = answers.answer(record, fitting())
    assert (found.seconds, found.seconds_percent, found.in_time) == (None, None, False)
    assert found.process_percent == pytest.approx(100 * (fitting().peak.process_bytes / gib - 1))


def test_a_later_success_replaces_an_earlier_failure(tmp_path: Path) -> None:
    import compare

    path = written(
        tmp_path / "real.jsonl", {"case": "a", "error": "RuntimeError: once"}, record_of("a", phase(1, 1, 1))
    )
    recording = compare.read(path)
    assert list(recording.cases) == ["a"]
    assert recording.failures == {}


def test_a_card_whose_facts_were_not_recorded_is_the_catalogs(tmp_path: Path) -> None:
    import compare

    path = written(tmp_path / "real.jsonl", record_of("a", phase(1, 1, 1)))
    settings = compare.ghost_settings(compare.read(path))
    assert (settings["l2_bytes"], settings["total_bytes"]) == ("62914560", 1000)
    assert "context_bytes" not in settings


def test_the_recorded_card_becomes_the_ghosts(tmp_path: Path) -> None:
    import compare

    properties = {"multi_processor_count": 132, "L2_cache_size": 62914560}
    path = written(
        tmp_path / "real.jsonl", record_of("a", phase(1, 1, 1)), {"fact": "device", "properties": properties}
    )
    settings = compare.ghost_settings(compare.read(path))
    assert settings == {
        "name": "NVIDIA H200",
        "total_bytes": 1000,
        "capability": "9.0",
        "sms": 132,
        "l2_bytes": 62914560,
    }
