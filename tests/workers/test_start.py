"""A worker ends with the process that asked for it, whatever it is doing."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tonnage
from tonnage.ghost.wheel import Torch

ASKS = """
import sys, time
from tonnage.workers.worker import Worker
worker = Worker(wait=sys.argv[1] == "ready")
print(worker._process.pid, flush=True)
time.sleep(600)
"""


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(params=["importing", "ready"])
def asker(request: pytest.FixtureRequest, torch_build: Torch) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(Path(tonnage.__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", ASKS, request.param], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process
        process.kill()


def test_a_worker_ends_when_its_asker_is_killed(asker: subprocess.Popen[str]) -> None:
    assert asker.stdout is not None
    worker = int(asker.stdout.readline())
    until = time.monotonic() + 30  # else it is killed before it has asked the kernel
    while asker.args[-1] == "importing" and time.monotonic() < until:  # type: ignore[index]
        if "libtorch" in Path(f"/proc/{worker}/maps").read_text():
            break
        time.sleep(0.05)
    assert is_running(worker)
    asker.send_signal(signal.SIGKILL)
    asker.wait()
    until = time.monotonic() + 60
    while is_running(worker) and time.monotonic() < until:
        time.sleep(0.01)
    assert not is_running(worker)
