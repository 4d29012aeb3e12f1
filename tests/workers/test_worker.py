"""The warm worker: it outlives a job that crashes, says so when it dies, and leaves nothing behind."""

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tonnage.catalog.configurations import resolve
from tonnage.catalog.devices import parse_cluster
from tonnage.errors import CannotEstimate, GhostUnavailable, UnreadableModel
from tonnage.ghost.wheel import Torch
from tonnage.job import Job
from tonnage.model import ModelRef
from tonnage.plans import Plan
from tonnage.trace.trace import Trace
from tonnage.workers.worker import Worker

CARD = parse_cluster("t4")
SMALL = Job(model=resolve("smollm2-135m", offline=True), seq_len=64)
TINY = replace(SMALL, model=replace(SMALL.model, config={**SMALL.model.config, "num_hidden_layers": 1}))


@pytest.fixture
def own_worker(torch_build: Torch) -> Iterator[Worker]:
    """A worker that the test may ruin."""
    with Worker() as fresh:
        yield fresh


def calling(factory: str) -> Job:
    """A job whose model is made by this function."""
    return Job(model=ModelRef(name=factory, kind="factory", factory=factory))


def run(worker: Worker, job: Job = TINY) -> Trace:
    return worker.run(job, Plan(precision="fp32"), CARD)


def process_of(worker: Worker) -> psutil.Process:
    return psutil.Process(worker._process.pid)


@pytest.mark.parametrize(
    ("factory", "number"), [("faulthandler:_sigsegv", signal.SIGSEGV), ("os:abort", signal.SIGABRT)]
)
def test_a_job_that_crashes_its_process_fails_alone(worker: Worker, factory: str, number: signal.Signals) -> None:
    before = run(worker)
    with pytest.raises(CannotEstimate, match=rf"died \(signal {number.value}\)"):
        run(worker, calling(factory))
    assert run(worker).peaks == before.peaks


def test_a_job_that_ends_its_process_fails_alone(worker: Worker) -> None:
    with pytest.raises(CannotEstimate):
        run(worker, calling("sys:exit"))
    assert run(worker).outcome == {"kind": "completed"}


def test_a_worker_that_died_says_so_and_is_closed(own_worker: Worker) -> None:
    os.kill(own_worker._process.pid, signal.SIGKILL)
    own_worker._process.wait()
    with pytest.raises(CannotEstimate, match="ended early"):
        run(own_worker)
    with pytest.raises(CannotEstimate, match="closed"):
        run(own_worker)


def test_a_worker_that_dies_during_a_job_says_so(own_worker: Worker) -> None:
    process = process_of(own_worker)
    slow = replace(SMALL, grad_accum=1000)
    killer = threading.Thread(target=_kill_when_at_work, args=(process,))
    killer.start()
    with pytest.raises(CannotEstimate, match="ended early"):
        run(own_worker, slow)
    killer.join()


def _kill_when_at_work(process: psutil.Process) -> None:
    while not process.children():
        time.sleep(0.01)
    process.kill()


def test_an_interrupted_job_leaves_no_process(own_worker: Worker) -> None:
    process = process_of(own_worker)
    at_work: list[psutil.Process] = []

    def interrupt() -> None:
        while not at_work:
            time.sleep(0.01)
            at_work.extend(process.children())
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    watcher = threading.Thread(target=interrupt)
    watcher.start()
    with pytest.raises(KeyboardInterrupt):
        run(own_worker, replace(SMALL, grad_accum=1000))
    watcher.join()
    assert not process.is_running()
    _, alive = psutil.wait_procs(at_work, timeout=120)
    assert not alive


def test_nothing_is_left_of_a_job_whose_asker_was_killed(torch_build: Torch, tmp_path: Path) -> None:
    asking = (
        "from dataclasses import replace; import test_worker as t; from tonnage.workers.worker import Worker\n"
        "t.run(Worker(), replace(t.SMALL, grad_accum=100_000))"
    )
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*sys.path[:1], *map(str, Path(__file__).parents[:2]), *sys.path[1:]]),
        "TMPDIR": str(tmp_path),
    }
    asker = psutil.Popen([sys.executable, "-c", asking], env=variables)
    deadline = time.monotonic() + 300
    while len(below := asker.children(recursive=True)) < 2 and asker.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(below) == 2, "the worker and its child"
    asker.kill()
    _, alive = psutil.wait_procs([asker, *below], timeout=300)
    assert not alive
    assert not list(tmp_path.glob("tonnage-*"))


def test_a_worker_that_is_starting_ends_at_once(torch_build: Torch) -> None:
    worker = Worker(wait=False)
    process = process_of(worker)
    worker.kill()
    assert not process.is_running()
    with pytest.raises(CannotEstimate, match="ended early"):
        run(worker)
    assert worker.closed


def test_files_of_the_users_folder_stand_in_for_no_library_and_may_hold_the_model(
    torch_build: Torch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("torch", "transformers", "typing", "tonnage"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not the library of that name')")
    (tmp_path / "parts.py").write_text("import torch\nlayer = torch.nn.Linear(64, 64)\n")
    (tmp_path / "net.py").write_text("import os, parts\ndef kill(): os.abort()\n")
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # of another allocator a ghost hears nothing
    with Worker() as worker:
        assert run(worker).peaks["allocated_bytes"] > 2**28
        with pytest.raises(CannotEstimate, match="died"):
            run(worker, calling("net:kill"))


def test_a_card_that_torch_has_no_kernels_for_is_told_as_that(worker: Worker) -> None:
    with pytest.raises(GhostUnavailable, match=r"has no kernels for this card, only for .*sm_\d+.*--torch 2.10.0"):
        worker.run(TINY, Plan(precision="fp32"), parse_cluster("v100-16gb"))


def test_a_network_that_cannot_be_built_is_told_as_that(worker: Worker) -> None:
    unknown = replace(TINY, model=replace(TINY.model, config={**TINY.model.config, "model_type": "no-such-type"}))
    with pytest.raises(UnreadableModel, match="no trainable class for model_type 'no-such-type'"):
        run(worker, unknown)


def test_closing_twice_is_closing(torch_build: Torch) -> None:
    mine = psutil.Process()
    gc.collect()  # else what an earlier test has left open is closed meanwhile
    descriptors = mine.num_fds()
    worker = Worker()
    folder = worker._folder
    run(worker)
    worker.close()
    worker.close()
    assert not folder.exists()
    assert mine.num_fds() == descriptors


def test_many_jobs_leave_nothing_behind(worker: Worker) -> None:
    process = process_of(worker)
    first = run(worker)
    gc.collect()  # else what an earlier test has left open is closed meanwhile
    descriptors = psutil.Process().num_fds(), process.num_fds()
    resident = process.memory_info().rss
    files = set(worker._folder.iterdir())  # the last Trace; `requests` too, where a test before had any
    for _ in range(100):
        assert run(worker).peaks == first.peaks
    _, alive = psutil.wait_procs(process.children(), timeout=120)  # the last one may be giving its memory back
    assert not alive
    assert (psutil.Process().num_fds(), process.num_fds()) == descriptors
    assert process.memory_info().rss < resident + 2**22
    assert set(worker._folder.iterdir()) == files
    assert {path.name for path in files} <= {"lock", "stderr", "requests", "trace", "worked"}


def test_two_workers_at_once_give_the_same_answers(worker: Worker, own_worker: Worker) -> None:
    found: dict[int, list[int]] = {0: [], 1: []}

    def several(number: int, its: Worker) -> None:
        found[number] = [run(its, replace(TINY, seq_len=64 * n)).peaks["allocated_bytes"] for n in range(1, 6)]

    threads = [threading.Thread(target=several, args=pair) for pair in enumerate((worker, own_worker))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]
    assert len(set(found[0])) == 5
