"""What a command has started ends with it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tonnage.ghost import termination

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


def runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


CHILD = "sh -c 'echo $$ >> told; sleep 60; true'"


@pytest.mark.parametrize("way", [CHILD, f"setsid {CHILD}", f"env -i setsid {CHILD}", f"(setsid {CHILD} &)"])
def test_no_process_is_left(tmp_path: Path, way: str) -> None:
    """Also one in a session of its own, with another environment, or whose parent has ended."""
    told, run = tmp_path / "told", f"tonnage-test-{os.getpid()}"
    command = ["sh", "-c", f"{way} & sleep 0.2; echo ready >> told; sleep 60"]
    process = subprocess.Popen(command, env={**os.environ, "GHOST_SHM": run}, cwd=tmp_path, start_new_session=True)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and (not told.exists() or "ready" not in told.read_text()):
        time.sleep(0.02)
    started = [int(word) for word in told.read_text().split() if word.isdigit()]
    assert started
    assert all(map(runs, started))
    termination.end(process, run)
    assert not any(map(runs, [process.pid, *started]))
