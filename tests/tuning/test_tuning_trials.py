"""Trials as real processes: on the CPU, on ghost cards that run out of memory, and their file."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from networks import tiny_job
from tonnage.catalog.devices import parse_cluster
from tonnage.errors import UnreadableFile, UnwritableFile, UsageError
from tonnage.ghost import environment as ghost_environment
from tonnage.planner.solution import Candidate
from tonnage.plans import Plan
from tonnage.tuning.outcome import Outcome
from tonnage.tuning.trials import RECORDS, Records, Trials


def trials(folder: Path, gpu: str = "cpu", **variables: str) -> Trials:
    return Trials(parse_cluster(gpu), folder, steps=5, timeout_seconds=120.0, variables={**os.environ, **variables})


def test_a_trial_measures_and_is_remembered(tmp_path: Path) -> None:
    candidate = Candidate(job=replace(tiny_job("llama"), grad_accum=2), plan=Plan(precision="fp32"))
    outcome = trials(tmp_path).run(candidate)
    assert outcome.ended == "finished", outcome
    assert outcome.step_seconds is not None
    tokens = candidate.job.tokens_per_micro_batch * 2
    assert outcome.tokens_per_second == pytest.approx(tokens / outcome.step_seconds)
    assert [path.name for path in tmp_path.iterdir()] == [RECORDS]
    again = trials(tmp_path, PATH="/nowhere")
    assert again.run(candidate) == outcome  # no process is started
    with (tmp_path / RECORDS).open("a") as file:
        file.write('{"trial": {')  # a kill in the middle of a line
    assert trials(tmp_path).known(candidate) == outcome


def test_a_record_behind_a_line_that_was_cut_is_kept(tmp_path: Path) -> None:
    for cut in ('{"trial": {', '{"trial": {"n": 0}, "outcome": {"ended": "finished", "moment": "save"}}'):
        (tmp_path / RECORDS).write_text(cut)
        for number in (1, 2):
            Records(tmp_path).add({"n": number}, {"outcome": {"ended": "finished", "moment": "save"}})
        found = Records(tmp_path)
        assert [found.find({"n": number}) is not None for number in range(3)] == [cut.endswith("}}"), True, True]


def test_a_tuning_that_is_killed_in_its_first_trial_can_go_on(tmp_path: Path) -> None:
    """What the trial saved is deleted, its processes end with it, and the trials of a living tuning stay."""
    script = "import os, time; open(os.environ['OWN'] + '/pid', 'w').write(str(os.getpid())); time.sleep(600)"
    code = (
        "import os, sys; from pathlib import Path; from tonnage.tuning import trials\n"
        "with trials.own_folder(Path(sys.argv[1])) as own:\n"
        f"    command = [sys.executable, '-c', {script!r}]\n"
        "    trials.run_processes(command, {**os.environ, 'OWN': str(own)}, own, ranks=1, timeout_seconds=600)\n"
    )
    tuning = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    try:
        wait_for(lambda: any(file.read_text() for file in tmp_path.glob("*/pid")))
        [pid] = (int(file.read_text()) for file in tmp_path.glob("*/pid"))
        Records(tmp_path)
        assert len(list(tmp_path.iterdir())) == 1
    finally:
        tuning.kill()
        tuning.wait()
    wait_for(lambda: not is_alive(pid))
    Records(tmp_path)
    assert list(tmp_path.iterdir()) == []


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_trial_that_fails_says_why(tmp_path: Path) -> None:
    candidate = Candidate(job=tiny_job("llama"), plan=Plan(precision="fp32", loss="liger"))
    outcome = trials(tmp_path).run(candidate)
    assert outcome.ended == "failed"
    assert outcome.message


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(UsageError, match="is in use, and not by trials"):
        trials(tmp_path)
    with pytest.raises(UnwritableFile, match="cannot be created"):
        trials(tmp_path / "metrics.jsonl")


def test_a_damaged_file_is_said(tmp_path: Path) -> None:
    (tmp_path / RECORDS).write_text('nothing\n{"trial": {}, "outcome": {"ended": "finished", "moment": "save"}}\n')
    with pytest.raises(UnreadableFile, match=r"trials.jsonl:1 is no trial"):
        trials(tmp_path)


@pytest.mark.ghost
@pytest.mark.parametrize(
    ("gpu", "micro_batch", "moment"), [("a100-40gb", 1, "save"), ("a100-40gb", 4096, "step 1")], ids=["fits", "oom"]
)
def test_a_ghost_card_runs_out_and_the_trial_survives(
    gpu: str, micro_batch: int, moment: str, tmp_path: Path, torch_build: object
) -> None:
    candidate = Candidate(job=tiny_job("llama", micro_batch=micro_batch, seq_len=512), plan=Plan())
    total = 2**31
    variables = ghost_environment.environment(inherit=os.environ, total_bytes=total)
    outcome = Trials(parse_cluster(gpu), tmp_path, steps=5, timeout_seconds=120.0, variables=variables).run(candidate)
    assert outcome.moment == moment, outcome
    assert outcome.ended == ("finished" if micro_batch == 1 else "out_of_memory")
    assert outcome.capacity_bytes == total


SHORTAGES = [
    ("backward", 1, "step 3"),
    ("backward", 2, "step 3"),
    ("evaluation", 2, "evaluation"),
    ("save", 2, "save"),
]


@pytest.mark.ghost
@pytest.mark.parametrize(("moment", "ranks", "named"), SHORTAGES, ids=[f"{one[0]}-{one[1]}" for one in SHORTAGES])
def test_memory_that_runs_out_late_on_the_last_rank_is_the_verdict(
    moment: str, ranks: int, named: str, tmp_path: Path, torch_build: object
) -> None:
    watched = tmp_path / "watched"  # so that ranks exchange what they say of their errors
    watched.mkdir()
    variables = ghost_environment.environment(
        inherit=os.environ, total_bytes=2**31, devices=ranks, watch_into=watched, steps=1000
    )
    first = str(Path(__file__).parents[1] / "programs" / "shortage")
    variables["PYTHONPATH"] = os.pathsep.join([first, variables["PYTHONPATH"]])
    variables["SHORTAGE"] = json.dumps({"rank": ranks - 1, "moment": moment})
    candidate = Candidate(job=tiny_job("llama"), plan=Plan(shard="ddp" if ranks > 1 else "none"))
    cluster = parse_cluster(f"{ranks}xa100-40gb")
    run = Trials(cluster, tmp_path / "tuned", steps=5, timeout_seconds=300.0, variables=variables)
    outcome = run.run(candidate)
    assert (outcome.ended, outcome.moment) == ("out_of_memory", named), outcome
    assert "OutOfMemoryError" in outcome.message
    assert outcome.capacity_bytes == 2**31
    assert [path.name for path in (tmp_path / "tuned").iterdir()] == [RECORDS]  # a save cut short is gone


@pytest.mark.ghost
def test_an_evaluation_may_be_larger_than_a_step(tmp_path: Path, torch_build: object) -> None:
    job = replace(tiny_job("llama", seq_len=512), eval_batch=4096)
    variables = ghost_environment.environment(inherit=os.environ, total_bytes=2**31)
    run = Trials(parse_cluster("a100-40gb"), tmp_path, steps=5, timeout_seconds=120.0, variables=variables)
    outcome = run.run(Candidate(job=job, plan=Plan()))
    assert (outcome.ended, outcome.moment) == ("out_of_memory", "evaluation"), outcome


def test_outcomes_survive_json() -> None:
    outcome = Outcome(ended="finished", moment="save", step_seconds=0.5)
    assert Outcome.from_json({**json.loads(json.dumps(outcome.to_json())), "later": 1}) == outcome
