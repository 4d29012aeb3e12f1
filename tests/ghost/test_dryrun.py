"""Scripts that misbehave, and a ghost that leaves nothing behind."""

import glob
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tonnage import dryrun
from tonnage.device import parse_cluster
from tonnage.errors import GhostUnavailable, TrialFailed, UsageError

pytestmark = pytest.mark.ghost

UNUSUAL = str(Path(__file__).parents[1] / "programs" / "unusual.py")


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
    assert "unusual.py:" in message


def test_a_script_that_hangs(dry_run: Any) -> None:
    message = failed(dry_run("unusual.py", "hangs", timeout_seconds=15.0))
    assert "stopped" in message
    assert "--timeout" in message


def test_a_script_that_never_uses_the_gpu(dry_run: Any) -> None:
    assert "ended without using a GPU" in failed(dry_run("unusual.py", "no-gpu"))


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


def test_a_script_that_dies(dry_run: Any) -> None:
    assert "SIGABRT" in failed(dry_run("unusual.py", "dies"))


def test_a_script_that_talks_a_lot(dry_run: Any) -> None:
    answer = dry_run("unusual.py", "talks")
    completed(answer)
    assert answer.output.count("very talkative") == 200_000


def test_a_process_left_behind_is_ended(dry_run: Any) -> None:
    completed(dry_run("unusual.py", "leaves-a-child"))
    assert not running("time.sleep(3600)")


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
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shared = set(os.listdir("/dev/shm"))
    dryrun.run([sys.executable, UNUSUAL, "exits"], parse_cluster("t4"))
    assert dict(os.environ) == before
    assert list(tmp_path.iterdir()) == []
    assert set(os.listdir("/dev/shm")) <= shared
    assert "libghost" not in Path("/proc/self/maps").read_text()
    assert running(UNUSUAL) == []
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
    dryrun.run([sys.executable, str(script)], parse_cluster("4xt4"), variables=variables)
    assert (tmp_path / "seen").read_text() == "yes 4"


def test_absurd_requests() -> None:
    cluster = parse_cluster("2xt4")
    with pytest.raises(UsageError, match="No command"):
        dryrun.run([], cluster)
    with pytest.raises(UsageError, match="at least 1"):
        dryrun.run([sys.executable, UNUSUAL, "exits"], cluster, steps=0)
    with pytest.raises(GhostUnavailable, match="not found"):
        dryrun.run(["no-such-program"], cluster)


def test_a_rank_that_does_not_exist(torch_build: Any) -> None:
    with pytest.raises(UsageError, match="Rank 2 does not exist: the cluster has ranks 0 to 1"):
        dryrun.run([sys.executable, UNUSUAL, "exits"], parse_cluster("2xt4"), rank=2)
    with pytest.raises(UsageError, match="No script"):
        dryrun.run(
            [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "2"], parse_cluster("2xt4"), rank=0
        )
