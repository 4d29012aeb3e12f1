"""The program as a user runs it, on a ghost GPU: estimate, report, dry-run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lines import is_one_line

from commands import TONNAGE
from tonnage.allocator import snapshot
from tonnage.errors import GhostUnavailable
from tonnage.estimates import archive

pytestmark = pytest.mark.ghost

PROGRAMS = Path(__file__).parents[1] / "programs"
ARGUMENTS = ["estimate", "smollm2-135m", "--gpu", "t4", "--precision", "fp16-mixed", "--seq-len", "256"]


@pytest.fixture(scope="module")
def run():
    """Runs tonnage in a process of its own; skips where no ghost can run."""
    from tonnage.ghost.environment import environment

    try:
        environment()
    except GhostUnavailable as error:
        pytest.skip(f"no ghost GPU here: {error}")
    quiet = {**os.environ, "HF_HUB_OFFLINE": "1"}

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [*TONNAGE, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=quiet, timeout=300)

    return run


@pytest.fixture(scope="module")
def estimated(run, tmp_path_factory):
    """A small model that fits, with every file."""
    folder = tmp_path_factory.mktemp("estimate")
    files = {name: folder / name for name in ("save", "snapshot", "html")}
    ended = run(*ARGUMENTS, "--json", *(part for name, path in files.items() for part in (f"--{name}", str(path))))
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout), files


def test_categories_sum_to_the_process(estimated):
    peak = estimated[0]["peak"]
    assert sum(peak["by_category"].values()) == peak["process_bytes"]
    assert peak["low_bytes"] <= peak["process_bytes"] <= peak["high_bytes"]
    assert peak["allocated_bytes"] <= peak["reserved_bytes"] <= peak["process_bytes"]


def test_parameters_are_all_there(estimated):
    # fp16-mixed keeps the weights in four bytes each; blocks are rounded up, and some keep slack of up to 1 MiB.
    document = estimated[0]
    weights = 4 * document["model"]["parameters"]
    assert weights <= document["peak"]["by_category"]["parameter"] <= 1.02 * weights


def test_phases_lead_up_to_the_peak(estimated):
    document = estimated[0]
    assert {"load", "forward", "backward", "optimizer"} <= {phase["name"] for phase in document["phases"]}
    for name in ("allocated_bytes", "reserved_bytes"):
        assert max(phase[name] for phase in document["phases"]) == document["peak"][name]


def test_report_shows_what_was_estimated(estimated, run):
    document, files = estimated
    again = run("report", str(files["save"]), "--json")
    assert (again.returncode, json.loads(again.stdout)) == (0, document)
    assert run("report", str(files["save"])).stdout.startswith("FITS")


def test_saved_trace_ends_with_the_allocators_own_peaks(estimated):
    document, files = estimated
    (trace,) = archive.load_traces(files["save"])
    assert trace.peaks["allocated_bytes"] == document["peak"]["allocated_bytes"]
    assert trace.peaks["reserved_bytes"] == document["peak"]["reserved_bytes"]


def test_snapshot_reads_back(estimated):
    (memory,) = snapshot.read(estimated[1]["snapshot"]).devices
    assert memory.segments
    assert any(event.action == "alloc" for event in memory.events)


def test_page_has_its_pictures(estimated):
    assert estimated[1]["html"].read_text(encoding="utf-8").count("<svg") == 2


def test_a_script_that_runs_out_of_memory(run):
    ended = run("dry-run", "--gpu", "t4", "--json", "--", sys.executable, str(PROGRAMS / "too_big.py"), "forward")
    document = json.loads(ended.stdout)
    assert (ended.returncode, document["fits"]) == (1, False)
    assert document["oom"]["phase"] == "forward"
    assert document["oom"]["message"].startswith("CUDA out of memory. Tried to allocate")
    assert any("too_big.py" in frame for frame in document["oom"]["stack"])


def test_a_script_that_fails(run):
    command = (sys.executable, "-c", "raise SystemExit(7)")
    ended = run("dry-run", "--gpu", "t4", "--", *command)
    assert (ended.returncode, ended.stdout) == (5, "")
    *progress, error = ended.stderr.splitlines(keepends=True)
    assert progress in ([], [f"running {' '.join(command)} on 1 ghost t4\n"]), "said where it takes two seconds"
    assert is_one_line(error)
    assert "exit code 7" in error


SLEEPER = """
import os, sys, time, torch
torch.zeros(1, device="cuda")
with open(sys.argv[1] + ".part", "w") as file:
    file.write(str(os.getpid()))
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(600)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_command_ends_with_tonnage(number, code, run, tmp_path):
    started = tmp_path / "pid"
    command = [*TONNAGE, "dry-run", "--gpu", "t4", "--", sys.executable, "-c", SLEEPER, str(started)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while not started.exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        process.send_signal(number)
        out, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert (process.returncode, out) == (code, "")
    assert not Path(f"/proc/{started.read_text()}").exists()


def test_a_model_that_does_not_exist(run):
    ended = run("estimate", "no-such-model", "--gpu", "t4", "--offline")
    assert (ended.returncode, ended.stdout) == (3, "")
    assert is_one_line(ended.stderr)
