"""Inference engines in a dry-run: a small one of our own with vLLM's names, and transformers' own two.

vLLM itself is run by `test_vllm.py`, where it is installed.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tonnage.catalog.devices import parse_cluster
from tonnage.catalog.overheads import graph_bytes
from tonnage.errors import TrialFailed
from tonnage.estimates.estimate import Estimate
from tonnage.estimates.timeline import timeline
from tonnage.report.engine_words import describe_load
from tonnage.report.terminal import render
from tonnage.script.dry_run import REQUESTS, STEP_SECONDS
from tonnage.script.planning import Asked
from tonnage.script.tries import answers
from tonnage.serving.facts import outside_torch
from tonnage.serving.lengths import parse_lengths

MIB = 1 << 20
PROGRAMS = Path(__file__).parents[1] / "programs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model without weights and without a tokenizer."""
    made = tmp_path_factory.mktemp("model")
    (made / "config.json").write_text("{}")
    return str(made)


def test_a_server_ends_the_run_when_it_is_ready(dry_run: Any, folder: str) -> None:
    answer = dry_run("engine.py", folder, "1024", "0.5", "serve", gpu="t4")
    arguments, core = answer.printed
    assert arguments == {"load_format": "dummy", "skips": True}
    estimate = answer.run.estimate
    assert estimate.fits
    assert estimate.serving == {
        "engine": "vllm 9.9",
        "starts": True,
        "error": None,
        "weights_bytes": 32 * MIB,
        "activation_bytes": estimate.serving["activation_bytes"],
        "graphs_bytes": 0,
        "outside_torch_bytes": estimate.peak.by_category["runtime"],
        "kv_cache_bytes": core["blocks"] * 16 * MIB,
        "kv_cache_tokens": core["blocks"] * 16,
        "block_tokens": 16,
        "blocks": core["blocks"],
        "concurrency": round(core["blocks"] * 16 / 1024, 2),
        "max_len": 1024,
        "low_tokens": estimate.serving["low_tokens"],
        "high_tokens": estimate.serving["high_tokens"],
        **dict.fromkeys(("compile_cache", "compile_seconds", "compile_peak_bytes", "compiled_here")),
    }
    assert 32 * MIB <= estimate.serving["activation_bytes"] < 64 * MIB
    assert estimate.peak.by_category["kv_cache"] == core["blocks"] * 16 * MIB
    assert estimate.peak.by_category["graphs"] == graph_bytes(parse_cluster("t4").device) > 0
    assert sum(estimate.peak.by_category.values()) == estimate.peak.process_bytes
    assert {"pretrained weights were not read: shapes and dtypes come from the configuration"} < set(
        estimate.coverage.assumed
    )
    assert "The engine was ready for requests, and was ended." in estimate.notes


def test_memory_outside_torch_grows_as_on_a_card_before_the_cache_is_sized(dry_run: Any, folder: str) -> None:
    answer = dry_run("engine.py", folder, "1024", "0.5", "serve", gpu="t4")
    serving, device = answer.run.estimate.serving, parse_cluster("t4").device
    growth = outside_torch((9, 9), device, tp=1, pp=1)
    assert serving["outside_torch_bytes"] == device.context_bytes + growth.bytes
    left = device.capacity_bytes // 2 - serving["outside_torch_bytes"] - serving["activation_bytes"]
    held = serving["weights_bytes"] + serving["kv_cache_bytes"]
    assert left - 32 * MIB < held <= left, "less a block of 16 MiB, and cuBLAS's workspace"
    assert serving["low_tokens"] < serving["kv_cache_tokens"] < serving["high_tokens"]
    assert any("growth outside torch" in text for text in answer.run.estimate.coverage.modelled)


def test_an_engine_in_a_process_that_trains_is_counted_with_it(dry_run: Any, folder: str) -> None:
    answer = dry_run("colocated.py", folder, "0.3", gpu="t4")
    (core,) = answer.printed
    estimate, device = answer.run.estimate, parse_cluster("t4").device
    held = estimate.peak.by_category
    assert (estimate.serving, estimate.fits) == (None, True)
    assert held["parameter"] == (32 + 16) * MIB, "of the engine in 16 bits, and of what is trained in 32"
    assert held["kv_cache"] == core["blocks"] * 16 * MIB
    assert held["graphs"] == graph_bytes(device)
    assert held["runtime"] == device.context_bytes + outside_torch((9, 9), device, tp=1, pp=1).bytes
    assert sum(held.values()) == estimate.peak.process_bytes
    assert any(text.startswith("vllm 9.9 runs in the processes that train") for text in estimate.notes)


def test_what_would_make_an_engine_start_was_run(torch_build: Any, folder: str) -> None:
    command = [sys.executable, str(PROGRAMS / "engine.py"), folder, "4096", "0.05", "serve"]
    asked = Asked(command=command, cluster=parse_cluster("t4"), stated={}, timeout_seconds=120.0, torch_version=None)
    first, with_advice = answers(asked, steps=3, rank=None)
    assert not first.estimate.fits
    change = with_advice.estimate.advice[0]
    longest = int(re.findall(r"length is (\d+)", first.estimate.serving["error"])[0])
    assert (change.change, change.fits, change.kv_cache_tokens) == ({"max_model_len": longest}, True, longest)
    assert change.command.endswith(f"serve  # with max_model_len={longest} in the code")


def test_an_engine_serves_requests_by_its_own_scheduler(dry_run: Any, folder: str) -> None:
    lengths = parse_lengths("p50=100,p95=400,output=60")
    answer = dry_run("engine.py", folder, "512", "0.2", "serve", gpu="t4", requests=lengths)
    serving = answer.run.estimate.serving
    load, blocks = serving["load"], serving["blocks"]
    assert (load["requests"], load["finished"]) == (REQUESTS, REQUESTS)
    assert load["preemptions"] > 0, "requests grow while others wait"
    assert 0.9 < load["kv_cache_usage"] <= 1
    assert load["running_mean"] < load["running_most"] <= blocks
    mean_blocks = lengths.mean_prompt / 16
    assert load["running_most"] > blocks / mean_blocks / 2
    assert f"{REQUESTS:,} of {REQUESTS:,} requests finished" in describe_load(load)


def test_requests_at_a_rate_wait_for_their_turn(dry_run: Any, folder: str) -> None:
    lengths = parse_lengths("p50=100,output=20,rate=40")
    answer = dry_run("engine.py", folder, "512", "0.2", "serve", gpu="t4", requests=lengths)
    load = answer.run.estimate.serving["load"]
    assert load["finished"] == REQUESTS
    assert load["running_mean"] == pytest.approx(40 * STEP_SECONDS * 20, rel=0.2), "Little's law"


def test_a_script_that_ends_by_itself_leaves_its_cores_trace_though_the_core_is_killed(
    dry_run: Any, folder: str
) -> None:
    answer = dry_run("engine.py", folder, "1024", "0.5", "end", gpu="t4")
    assert answer.run.estimate.serving["kv_cache_tokens"] == answer.printed[-1]["blocks"] * 16


@pytest.mark.parametrize(("in_windows", "rows"), [((), 10_000), (("7999",), 18_000)])
def test_the_pools_of_a_scheduler_are_the_cache(dry_run: Any, in_windows: tuple[str, ...], rows: int) -> None:
    estimate = dry_run("scheduler.py", "9999", *in_windows, gpu="t4").run.estimate
    size = 2 * 4 * rows * 8 * 128 * 2
    assert estimate.serving["engine"] == "sglang 9.9"
    assert {name: estimate.serving[name] for name in ("kv_cache_tokens", "block_tokens", "blocks", "max_len")} == {
        "kv_cache_tokens": 9999,
        "block_tokens": 1,
        "blocks": 9999,
        "max_len": 4096,
    }
    assert estimate.serving["kv_cache_bytes"] == size
    assert (estimate.serving["weights_bytes"], estimate.serving["graphs_bytes"]) == (2560 * MIB, 1792 * MIB)
    assert estimate.serving["concurrency"] == pytest.approx(9999 / 4096)
    assert size <= estimate.peak.by_category["kv_cache"] < size + 16 * 2 * MIB


def test_an_engine_without_room_does_not_start_in_its_own_words(dry_run: Any, folder: str) -> None:
    estimate = dry_run("engine.py", folder, "4096", "0.05", "serve", gpu="t4").run.estimate
    assert (estimate.fits, estimate.serving["starts"]) == (False, False)
    assert estimate.serving["error"].startswith("4096 tokens do not fit; the estimated maximum model length is ")
    assert estimate.serving["kv_cache_tokens"] is None
    assert estimate.serving["weights_bytes"] == 32 * MIB


def test_an_engine_that_refuses_its_arguments_is_an_answer(torch_build: Any, folder: str) -> None:
    command = [sys.executable, str(PROGRAMS / "engine.py"), folder, "8192", "0.5", "serve"]
    asked = Asked(command=command, cluster=parse_cluster("t4"), stated={}, timeout_seconds=120.0, torch_version=None)
    [run] = answers(asked, steps=3, rank=None)
    estimate = run.estimate
    assert estimate.serving["error"] == "max_model_len (8192) is greater than the model's (4096)."
    assert (estimate.fits, estimate.serving["starts"], estimate.peak.process_bytes) == (False, False, 0)
    assert Estimate.from_json(json.loads(json.dumps(estimate.to_json()))) == estimate
    assert render(estimate).startswith("DOES NOT START")


def test_an_engine_that_never_gets_ready_is_quoted(dry_run: Any, folder: str) -> None:
    error = dry_run("engine.py", folder, "1024", "0.5", "never", gpu="t4", timeout_seconds=10.0).error
    assert isinstance(error, TrialFailed)
    assert "vllm 9.9 was not ready after 10 s; its last words: Waiting for Godot." in str(error)


def test_an_engine_that_started_counts_although_the_script_does_not_end(dry_run: Any, folder: str) -> None:
    answer = dry_run("engine.py", folder, "1024", "0.5", "hang", gpu="t4", timeout_seconds=20.0)
    assert answer.run.estimate.serving["starts"]
    assert any("the engine had started" in note for note in answer.run.estimate.notes)


def test_a_front_end_that_breaks_is_a_failure_of_the_command(dry_run: Any, folder: str) -> None:
    error = dry_run("engine.py", folder, "1024", "0.5", "break", gpu="t4").error
    assert isinstance(error, TrialFailed)
    assert "The front end broke." in str(error)


def test_nothing_of_an_ended_engine_is_left(dry_run: Any, folder: str) -> None:
    dry_run("engine.py", folder, "1024", "0.5", "serve", gpu="t4")
    own = str(PROGRAMS / "engine.py")
    assert [pid for pid in filter(str.isdigit, os.listdir("/proc")) if own in _arguments(pid)] == []


def _arguments(process: str) -> str:
    try:
        return Path("/proc", process, "cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_alone_ends_by_itself_and_shows_its_cache(dry_run: Any, cache: str) -> None:
    run = dry_run("completing.py", cache).run
    held = run.estimate.serving["kv_cache_bytes"]
    length = run.estimate.serving["max_len"]
    assert run.estimate.serving["engine"].startswith("transformers ")
    assert length == 20 + 12 - 1, "what the last word is computed from"
    assert held == 2 * 3 * 2 * 64 * 2 * 3 * length
    assert (run.estimate.serving["concurrency"], run.estimate.serving["kv_cache_tokens"]) == (3.0, 3 * length)
    walked = timeline(run.traces[0])
    caches = [life for life in walked.lives if life.category == "kv_cache"]
    last = max(life.born for life in caches)
    alive = sum(life.size_bytes for life in caches if life.died > last)
    assert alive >= held, "each layer's keys and values, rounded up to blocks of 512 bytes"
    assert alive <= held + 12 * 512 + (2 * 3 * 64 * 2 * 3 * length if cache == "dynamic" else 0)


def _on_the_cpu(blocks: int) -> list[dict[str, Any]]:
    """Return what continuous batching prints on the CPU, without a ghost."""
    command = [sys.executable, str(PROGRAMS / "continuous.py"), "cpu", str(blocks), "0.05"]
    ran = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]


def test_continuous_batching_on_the_ghost_has_the_cache_that_it_has_on_the_cpu(dry_run: Any) -> None:
    answer = dry_run("continuous.py", "cuda", "50", "0.5", gpu="t4")
    cache, lengths = answer.printed
    assert [cache, lengths] == _on_the_cpu(50)
    serving = answer.run.estimate.serving
    assert (serving["blocks"], serving["kv_cache_bytes"]) == (cache["blocks"], cache["bytes"])
    assert (serving["block_tokens"], serving["kv_cache_tokens"]) == (32, 32 * cache["blocks"])
    assert answer.run.estimate.peak.by_category["kv_cache"] >= cache["bytes"]


def test_continuous_batching_fills_the_card_as_the_engine_does(dry_run: Any) -> None:
    answer = dry_run("continuous.py", "cuda", "0", "0.5", gpu="t4")
    serving = answer.run.estimate.serving
    assert (serving["blocks"], serving["kv_cache_bytes"]) == (answer.printed[0]["blocks"], answer.printed[0]["bytes"])


def test_continuous_batching_without_room_does_not_start(dry_run: Any) -> None:
    estimate = dry_run("continuous.py", "cuda", "100000000", "0.5", gpu="t4").run.estimate
    assert not estimate.serving["starts"]
    assert "is more than available memory" in estimate.serving["error"]
