"""Scripts that misbehave, and a ghost that leaves nothing behind."""

import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from commands import TONNAGE
from tonnage.catalog.devices import parse_cluster
from tonnage.errors import TrialFailed, UsageError
from tonnage.ghost import environment as ghost_environment
from tonnage.script import dry_run as dry_run_module
from tonnage.script import ending
from tonnage.script.process_results import ProcessResults, collect_results
from tonnage.trace.trace import Trace

pytestmark = pytest.mark.ghost

UNUSUAL = str(Path(__file__).parents[1] / "programs" / "unusual.py")


CATCHES = """
try:
    import no_such_package.inner
except ImportError:
    pass
"""


def failed(answer: Any) -> str:
    """The one line that says why."""
    assert isinstance(answer.error, TrialFailed), answer.output[-2000:]
    assert answer.error.exit_code == 5
    assert "\n" not in str(answer.error)
    assert len(str(answer.error)) < 800
    return str(answer.error)


def completed(answer: Any) -> Any:
    """The Estimate of a run that went well."""
    assert answer.error is None, f"{answer.error}\n{answer.output[-2000:]}"
    assert answer.run.estimate.fits
    return answer.run.estimate


def test_a_script_that_crashes(dry_run: Any) -> None:
    message = failed(dry_run("unusual.py", "crashes"))
    assert "ValueError: the tokenizer has no pad token" in message
    assert f"(at {os.path.relpath(UNUSUAL)}:" in message, (
        "as seen from where the command was given, not where it went"
    )


def test_a_script_that_crashes_early_without_having_read_a_value_is_run_once(dry_run: Any) -> None:
    answer = dry_run("unusual.py", "crashes-early")
    message = failed(answer)
    assert "ValueError: the column has no text" in message
    assert "value that only a real GPU computes" not in message
    assert answer.output.count("begins") == 1


def test_a_script_that_hangs_says_how_far_it_came(torch_build: Any, tmp_path: Path) -> None:
    variables = ghost_environment.environment(torch=torch_build, watch_into=tmp_path, steps=20)
    with (
        dry_run_module._open_stop_pipe(tmp_path) as ask,
        subprocess.Popen(
            [sys.executable, UNUSUAL, "hangs"], env=variables, stdout=subprocess.PIPE, text=True
        ) as hanging,
    ):
        assert hanging.stdout is not None
        try:
            assert any(line == "hangs\n" for line in hanging.stdout)
            ask()
            dry_run_module._wait_for_traces(tmp_path, 300.0)
        finally:
            hanging.kill()
    results = collect_results(tmp_path)
    assert [(trace.steps, trace.outcome["kind"]) for trace in results.traces] == [(4, "stopped")]
    (note,) = ending.judge(["python"], results, None, 20, 30.0)
    assert "stopped after 30 s, when 4 of 20 optimizer steps were done" in note
    assert "unusual.py:" in note, "where it hung"


def test_a_library_that_wants_a_function_which_nobody_has_is_named() -> None:
    message = "/site/libext.so: undefined symbol: cudaFrobnicateTheWarp"
    outcome = {"kind": "failed", "error": "OSError", "message": message, "stack": ["train.py:4 <module>"]}
    trace = Trace(source="ghost", versions={"cuda": "13.0"}, device={}, steps=0, outcome=outcome)
    said = ending.explain_failure(trace)
    assert "no cudaFrobnicateTheWarp: was this library built for another CUDA than torch's, which is 13.0?" in said


@pytest.fixture(scope="session")
def unbound(tmp_path_factory: Any) -> str:
    """A library that calls a function which nobody has."""
    folder = tmp_path_factory.mktemp("unbound")
    (folder / "ext.c").write_text("int cudaFrobnicateTheWarp(void); int go(void) { return cudaFrobnicateTheWarp(); }")
    library = folder / "libext.so"
    made = ["cc", "-shared", "-fPIC", "-Wl,-z,lazy", "-o", str(library), str(folder / "ext.c")]
    subprocess.run(made, check=True)
    return str(library)


def test_a_function_that_is_missed_when_it_is_called_is_named(dry_run: Any, unbound: str) -> None:
    message = failed(dry_run("unbound.py", unbound))
    assert f"{unbound}: undefined symbol: cudaFrobnicateTheWarp (at " in message
    assert "unbound.py:" in message
    assert "was this library built for another CUDA than torch's, which is" in message


@pytest.mark.parametrize(
    ("ended", "message", "unbound"),
    [
        (127, "", True),
        (1, "train.py FAILED  Root Cause (first observed failure): [0]: rank : 0 exitcode  : 127 (pid: 5)", True),
        (1, "Command '['python', 'train.py']' returned non-zero exit status 127.", True),
        (1, "Command '['python', 'train.py']' returned non-zero exit status 1.", False),
        (None, "", False),
    ],
)
def test_what_the_loader_has_ended_is_known_by_its_exit_code(ended: int | None, message: str, unbound: bool) -> None:
    failed = ({"message": message, "error": "ChildFailedError", "stack": []},) if message else ()
    results = ProcessResults(traces=(), others=(), cut_off=(), names={}, failed=failed)
    assert (
        dry_run_module._lacks_function(dry_run_module.Attempt(command=["x"], ended=ended, results=results, cards=()))
        is unbound
    )


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "import nowhere",
            "The command failed: ModuleNotFoundError: No module named 'nowhere' (at <string>:1 <module>).",
        ),
        (
            "import torch; raise ValueError('no data')",
            "The command failed: ValueError: no data (at <string>:1 <module>).",
        ),
        ("x = = 1", "The command failed: SyntaxError: invalid syntax (<string>, line 1)."),
        ("import sys; sys.exit('no data')", "exit code 1 before it used the GPU. Its own message is above."),
        (f"{CATCHES}import sys; sys.exit(1)", "is above. It asked for no_such_package, which is not installed"),
        (f"{CATCHES}import torch", "ended without using a GPU. It asked for no_such_package, which is not installed"),
    ],
)
def test_what_fails_before_it_uses_the_gpu(torch_build: Any, code: str, said: str) -> None:
    with pytest.raises(TrialFailed, match=re.escape(said)):
        dry_run_module.run([sys.executable, "-c", code], parse_cluster("t4"))


@pytest.mark.parametrize(
    "command", [["bash", "-c", f"{sys.executable} -I -c 1"], ["env", "-i", sys.executable, "-c", "1"]]
)
def test_a_python_that_does_not_find_the_ghost(torch_build: Any, command: list[str]) -> None:
    with pytest.raises(TrialFailed, match=r"exit code 0\. No Python that it started found the ghost: .*env -i"):
        dry_run_module.run(command, parse_cluster("t4"))


def test_another_allocator_than_pytorchs_is_not_followed(dry_run: Any) -> None:
    asynchronous = (("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync"),)
    message = failed(dry_run("unusual.py", "exits", variables=asynchronous))
    assert message.startswith("The command allocates with cudaMallocAsync. A dry-run follows PyTorch's caching alloc")
    with pytest.raises(UsageError, match="PYTORCH_NO_CUDA_MEMORY_CACHING is set"):
        dry_run_module.run([sys.executable], parse_cluster("t4"), variables={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


def test_a_script_that_hangs_early_has_no_answer(torch_build: Any) -> None:
    results = ProcessResults(
        traces=(Trace(source="ghost", versions={}, device={}, steps=1),), others=(), cut_off=(), names={}
    )
    with pytest.raises(TrialFailed, match=r"when 1 of 3 optimizer steps were done .* --timeout"):
        ending.judge(["python"], results, None, 3, 30.0)
    with pytest.raises(TrialFailed, match="had not used the GPU until then"):
        ending.judge(["python"], ProcessResults(traces=(), others=(), cut_off=(), names={}), None, 3, 30.0)


def test_a_script_that_is_killed_says_how_far_it_came(dry_run: Any) -> None:
    message = failed(dry_run("unusual.py", "is-killed", steps=20))
    assert "SIGKILL" in message
    assert "rank 0 after 2 optimizer steps, with at most" in message


def test_a_script_that_never_uses_the_gpu(dry_run: Any) -> None:
    assert "ended without using a GPU" in failed(dry_run("unusual.py", "no-gpu"))


def test_a_script_of_the_shell_that_sets_pythonpath(dry_run: Any) -> None:
    assert completed(dry_run("unusual.py", "has-a-path")).peak.allocated_bytes > 0


def test_what_failed_in_a_worker_is_told_without_the_stack_there(dry_run: Any) -> None:
    message = failed(dry_run("unusual.py", "worker-fails"))
    assert (
        "Caught FileNotFoundError in DataLoader worker process 0. FileNotFoundError: row0.wav is not there" in message
    )


def test_a_program_that_trains_on_the_host_beside_a_gpu(dry_run: Any) -> None:
    assert "allocated no GPU memory through PyTorch" in failed(dry_run("unusual.py", "on-the-host"))


def test_a_script_that_only_evaluates(dry_run: Any) -> None:
    answer = dry_run("unusual.py", "never-steps")
    estimate = completed(answer)
    assert answer.run.traces[0].steps == 0
    assert estimate.peak.allocated_bytes > 4 * 1024 * 1024
    assert any("No optimizer step was seen" in note for note in estimate.notes)


def test_a_script_that_spawns_processes(dry_run: Any) -> None:
    answer = dry_run("unusual.py", "spawns")
    completed(answer)
    assert answer.run.traces[0].steps == 2


def test_ranks_that_a_script_spawns_itself_run_out_of_memory(dry_run: Any) -> None:
    """Multiprocessing catches what a process raises, and the process group is gone when the traces are written."""
    answer = dry_run("unusual.py", "ranks", "too-big", gpu="2xt4", steps=20)
    assert answer.error is None, f"{answer.error}\n{answer.output[-2000:]}"
    assert sorted((said["rank"], said["total"]) for said in answer.printed) == [(0, 3.0), (1, 3.0)], (
        "they really meet"
    )
    estimate = answer.run.estimate
    assert (estimate.rank, estimate.fits, estimate.oom.phase) == (1, False, "other")
    assert "1024.00 GiB" in estimate.oom.message
    assert [trace.device["index"] for trace in answer.run.traces] == [trace.rank for trace in answer.run.traces]


def test_a_process_that_a_script_forks_is_seen(dry_run: Any) -> None:
    assert completed(dry_run("unusual.py", "forks", steps=20)).peak.allocated_bytes > 0


def test_another_process_on_the_same_card_is_named(dry_run: Any) -> None:
    answer = dry_run("unusual.py", "subprocess", steps=20)
    (note,) = [note for note in completed(answer).notes if note.startswith("GPU 0 was also used by")]
    assert note.startswith("GPU 0 was also used by unusual.py: 3 optimizer steps, at most ")
    assert answer.run.traces[0].steps == 3


def test_two_processes_on_one_card_have_its_memory_between_them(dry_run: Any) -> None:
    answer = dry_run("unusual.py", "beside-a-server", gpu="t4", steps=20)
    assert answer.error is None, f"{answer.error}\n{answer.output[-2000:]}"
    estimate = answer.run.estimate
    killed, stayed = (said["server"] for said in answer.printed)
    context = parse_cluster("t4").device.context_bytes
    capacity = estimate.cluster["capacity_bytes"]
    assert answer.printed[0]["free"] == capacity - 2 * context - 8 * 2**30
    assert not estimate.fits
    assert "Tried to allocate 9.00 GiB" in estimate.oom.message
    assert f"Process {stayed} has 8.14 GiB memory in use" in estimate.oom.message
    assert f"Process {killed} " not in estimate.oom.message, "what was killed holds nothing"
    (card,) = estimate.cards
    trainer, *servers = sorted(card["processes"], key=lambda each: -each["peak_bytes"])
    assert trainer["peak_bytes"] == trainer["held_bytes"] == card["peak_bytes"] > 9 * 2**30 + context
    assert [each["peak_bytes"] for each in servers] == [8 * 2**30 + context] * 2
    assert {each["process"] for each in servers} == {killed, stayed}
    assert {(each["rank"], each["name"]) for each in card["processes"]} == {(0, "unusual.py")}
    (note,) = [note for note in estimate.notes if "GPU 0 was used by 3 processes" in note]
    assert "together they held at most 9.1" in note
    assert "had all peaks come at once, 25." in note


def test_one_process_on_two_cards_is_reported_for_the_fuller(dry_run: Any) -> None:
    answer = dry_run("unusual.py", "two-cards", gpu="2xt4", steps=20)
    estimate = completed(answer)
    assert answer.run.traces[0].device["index"] == 1
    assert estimate.peak.by_category["parameter"] == 4 * (2048 * 2048 + 2048)
    assert any("The process also used GPU 0" in note for note in estimate.notes)


def test_a_script_that_measures_itself_is_still_seen_whole(dry_run: Any) -> None:
    answer = dry_run("unusual.py", "measures", steps=20)
    estimate = completed(answer)
    assert answer.run.traces[0].peaks["allocated_bytes"] == estimate.peak.allocated_bytes > 2**26
    assert not any("differs from torch's counter" in line for line in estimate.coverage.modelled)


def test_the_hosts_memory_is_the_scripts_and_not_its_traces(dry_run: Any) -> None:
    answer = dry_run("unusual.py", "often", steps=20)
    assert answer.run.traces[0].event_count > 200_000
    (said,) = answer.printed
    assert abs(completed(answer).host.peak_bytes - said["resident_bytes"]) < 16 << 20


def test_a_script_with_data_loader_workers(dry_run: Any) -> None:
    answer = dry_run("unusual.py", "workers", steps=10)
    assert completed(answer).host.pinned_bytes > 0
    assert answer.run.traces[0].steps == 4


@pytest.mark.parametrize("how", ["exits", "exits-hard"])
def test_a_script_that_leaves_early(dry_run: Any, how: str) -> None:
    answer = dry_run("unusual.py", how)
    completed(answer)
    assert answer.run.traces[0].steps == 2


def test_a_script_that_says_it_failed(dry_run: Any) -> None:
    assert "exit code 7 after 2 optimizer steps" in failed(dry_run("unusual.py", "exits-badly"))


def test_a_script_that_needs_a_computed_value(dry_run: Any) -> None:
    message = failed(dry_run("unusual.py", "index"))
    assert "ValueError: 0 is not in list" in message
    assert "only a real GPU computes" in message


def test_a_script_that_ends_when_its_loss_is_small(dry_run: Any) -> None:
    """Losses read as positive, so that it goes on; the branch is told with its line."""
    answer = dry_run("unusual.py", "converges")
    estimate = completed(answer)
    assert answer.run.traces[0].steps == 3
    (branch,) = [text for text in estimate.coverage.assumed if "unusual.py:" in text]
    assert "1.5 < 0.001 is false, from a computed number" in branch


def test_a_size_that_is_computed_from_known_numbers_is_known(dry_run: Any) -> None:
    answer = dry_run("unusual.py", "counts")
    completed(answer)
    assert answer.printed == ({"most": 3}, {"most": 3})
    assert answer.run.traces[0].steps == 2


def test_rows_that_known_masks_choose_together_are_counted(dry_run: Any) -> None:
    """A computed mask selects every element."""
    answer = dry_run("unusual.py", "masks")
    completed(answer)
    assert answer.printed == ({"chosen": 8 * 8, "computed": 8 * 32 * 4},) * 2


def test_a_script_that_clears_its_environment(dry_run: Any) -> None:
    completed(dry_run("unusual.py", "clears-its-environment"))


def test_a_script_that_has_torchscript_compile_what_was_replaced(dry_run: Any) -> None:
    estimate = completed(dry_run("unusual.py", "scripts"))
    assert estimate.model["parameters"] == 64 * 65


def test_a_script_that_dies(dry_run: Any) -> None:
    assert "SIGABRT" in failed(dry_run("unusual.py", "dies"))


def test_a_script_that_talks_a_lot(dry_run: Any) -> None:
    answer = dry_run("unusual.py", "talks")
    completed(answer)
    assert answer.output.count("very talkative") == 200_000


@pytest.mark.parametrize("what", ["leaves-a-child", "leaves-a-service"])
def test_a_process_left_behind_is_ended(dry_run: Any, what: str) -> None:
    answer = dry_run("unusual.py", what)
    completed(answer)
    (said,) = answer.printed
    ended(said["left"])


def test_a_run_ends_with_tonnage_even_where_that_is_killed(torch_build: Any, tmp_path: Path) -> None:
    own = str(shutil.copy(UNUSUAL, tmp_path))  # whose path no other process on this machine has in its command line
    command = [*TONNAGE, "dry-run", "--gpu", "t4", "--steps", "20", "--", sys.executable, own, "hangs"]
    tonnage = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert tonnage.stderr is not None
    assert any(line == "hangs\n" for line in tonnage.stderr)
    tonnage.kill()
    tonnage.wait()
    tonnage.stderr.close()
    ended(own)


def ended(text: str) -> None:
    """A process that was killed ends when it can."""
    deadline = time.monotonic() + 300
    while running(text) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(text)


def running(text: str) -> list[str]:
    """Command lines of processes that contain `text`."""
    found = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            line = Path(path).read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in line:
            found.append(line)
    return found


def test_nothing_is_left_behind(torch_build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable in this process, no temporary folder, no shared memory, no process."""
    before = dict(os.environ)
    own, temporary = tmp_path / "unusual.py", tmp_path / "temporary"
    shutil.copy(UNUSUAL, own)
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    of_run: list[str] = []  # other processes on this machine have shared memory of their own

    def noted(**options: Any) -> dict[str, str]:
        variables = ghost_environment.environment(**options)
        of_run.append(variables["GHOST_SHM"])
        return variables

    monkeypatch.setattr(dry_run_module, "environment", noted)
    dry_run_module.run([sys.executable, str(own), "exits"], parse_cluster("t4"))
    assert dict(os.environ) == before
    assert list(temporary.iterdir()) == []
    assert [name for name in os.listdir("/dev/shm") if of_run[0] in name] == []
    assert "libghost" not in Path("/proc/self/maps").read_text()
    assert running(str(own)) == []
    child = "import os; print('LD_PRELOAD' in os.environ, 'GHOST_DEVICES' in os.environ)"
    said = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["False", "False"] or "LD_PRELOAD" in before


def test_the_users_own_environment_reaches_the_script(torch_build: Any, tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(
        "import os, torch\n"
        "torch.nn.Linear(4, 4).cuda()\n"
        f"open({str(tmp_path / 'seen')!r}, 'w').write(os.environ['MINE'] + ' ' + str(torch.cuda.device_count()))\n"
    )
    variables = {**os.environ, "MINE": "yes", "CUDA_VISIBLE_DEVICES": ""}
    dry_run_module.run([sys.executable, str(script)], parse_cluster("4xt4"), variables=variables)
    assert (tmp_path / "seen").read_text() == "yes 4"


def test_absurd_requests() -> None:
    cluster = parse_cluster("2xt4")
    with pytest.raises(UsageError, match="No command"):
        dry_run_module.run([], cluster)
    with pytest.raises(UsageError, match="at least 1"):
        dry_run_module.run([sys.executable, UNUSUAL, "exits"], cluster, steps=0)
    with pytest.raises(UsageError, match="not found"):
        dry_run_module.run(["no-such-program"], cluster)


def test_a_rank_that_does_not_exist(torch_build: Any) -> None:
    with pytest.raises(UsageError, match="Rank 2 does not exist: the cluster has ranks 0 to 1"):
        dry_run_module.run([sys.executable, UNUSUAL, "exits"], parse_cluster("2xt4"), rank=2)
    with pytest.raises(UsageError, match="has no script"):
        dry_run_module.run(
            [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "2"], parse_cluster("2xt4"), rank=0
        )


def test_a_rank_that_outlives_the_process_that_started_it(dry_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        dry_run_module, "LATER_SECONDS", 120.0
    )  # two steps take longer than ten seconds on a busy machine
    answer = dry_run("unusual.py", "leaves-a-rank", gpu="2xt4", steps=20)
    completed(answer)
    assert [(trace.rank, trace.steps) for trace in answer.run.traces] == [(0, 1), (1, 3)]


def test_an_error_without_a_message_is_named_once() -> None:
    bare = {"error": "AssertionError", "message": "AssertionError", "stack": ["train.py:3 main"]}
    assert ending.describe_failure(bare) == "The command failed: AssertionError (at train.py:3 main)."
    assert ": ValueError: none (at" in ending.describe_failure({**bare, "error": "ValueError", "message": "none"})


def test_gpus_that_a_script_chooses_beyond_those_that_there_are() -> None:
    none = {"error": "RuntimeError", "message": "No CUDA GPUs are available", "stack": ["train.py:3 main"]}
    assert "does the script set CUDA_VISIBLE_DEVICES to others?" in ending.describe_failure(none)


def test_a_dry_run_on_a_cpu_is_refused() -> None:
    with pytest.raises(UsageError, match="cpu is none; name one with --gpu"):
        dry_run_module.run(["python", "train.py"], parse_cluster("cpu"))


def test_an_error_is_placed_in_the_program_and_where_it_came_up() -> None:
    own, library = "train.py:12 main", "/v/lib/python3.11/enum.py:784 __getattr__"
    assert ending.locate_failure([own, library]) == f"{own}, in {library}"
    assert ending.locate_failure([own]) == own
    assert ending.locate_failure([library]) == library


def test_steps_of_an_optimizer_in_backward(dry_run: Any) -> None:
    assert dry_run("unusual.py", "in-backward", steps=20).run.traces[0].steps == 3


def test_what_is_offloaded_takes_no_memory_of_the_host(dry_run: Any) -> None:
    (said,) = dry_run("host_memory.py").printed
    assert said["grown_bytes"] < 64 << 20, "of 1.9 GiB of zeros"
    assert said["halved"] == [0.0, 0.0, [7.0, 8.0, 2.0, 3.0], [3, 7]]
    assert said["large"] == [1, 0, True]
    assert said["by_hand"] == [7, 7]
    assert (said["norm"], said["cleared"]) == (0.0, 0.0)
    assert said["overflown"] == [0.0, 1.0]
    assert said["unscaled"] == 0.75
    assert said["pinned"]
    assert said["kept"]
    assert said["same"]
    assert said["number"] == 3.0
    assert said["real_norm"] == 3 * 256
    assert said["strided"] == sum(range(1, 1 << 17, 2))


def test_a_process_that_ends_while_it_is_looked_at_lives_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_text(path: Path, *_: Any) -> str:
        raise ProcessLookupError  # what /proc answers then

    monkeypatch.setattr(Path, "read_text", read_text)
    assert not dry_run_module._is_alive("1")


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (35, "signal 35")])
def test_signals_are_called_by_their_names_where_they_have_one(number: int, name: str) -> None:
    assert ending.name_signal(number) == name


def test_what_a_killed_process_held_is_said_up_to_its_last_step() -> None:
    told = {"rank": 1, "steps": 2, "peaks": {"reserved_bytes": 2**30}, "host_bytes": 2**29}
    assert ending.describe_cut_off([told]) == (
        "Ended without a trace: rank 1 after 2 optimizer steps, with at most 1.00 GiB reserved on the GPU and "
        "512.0 MiB resident on the host until the last one."
    )
    assert (
        ending.describe_cut_off([{**told, "steps": 0}])
        == "Ended without a trace: rank 1 before its first optimizer step."
    )


def test_a_network_whose_layers_are_called_one_by_one_is_counted_whole(dry_run: Any) -> None:
    estimate = dry_run("unusual.py", "in-parts").run.estimate
    assert estimate.model["class"] == "ModuleDict"
    assert estimate.model["parameters"] == 4 * (512 * 512 + 512) + 512 * 2000 + 2000
