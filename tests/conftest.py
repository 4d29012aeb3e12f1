"""Makes the modules beside this file (such as `estimates`) importable from every test; no Trace comes from before."""

import gc
import os
import platform
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, settings

from tonnage.errors import GhostUnavailable
from tonnage.estimates import cache, history
from tonnage.ghost import environment as ghost_environment
from tonnage.ghost import wheel
from tonnage.ghost.wheel import Torch
from tonnage.workers.worker import Worker

HERE: Final = Path(__file__).parent

settings.register_profile(
    "tonnage",
    deadline=None,  # how long an example takes is the machine's affair
    derandomize=True,  # a run says the same as the one before it
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("tonnage")

# What a shell starts in the background ignores interrupts, and so would the processes of tests.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Who looks for garbage in a test need not look through all that was imported: a twentieth of the time."""
    gc.collect()
    gc.freeze()


SLOW: Final = ("torch_build", "worker", "dry_run")
"""Fixtures of tests that run a ghost; `pytest -m "not slow"` leaves them out, for daily work."""

SLOW_FILES: Final = (
    *("techniques/", "meta/", "shallow/", "benchmarks/", "ghost/", "workers/"),
    *("allocator/test_allocator_against_torch", "planner/test_nearest", "planner/test_bounds", "planner/test_search"),
    *("trainers/test_exports", "trainers/test_image_rows", "trainers/test_reread", "trainers/test_runs"),
    *("tuning/test_script_tuning", "step/test_model", "step/test_step", "step/test_hub_kernels"),
    *("cli/test_cli_end_to_end",),
)
"""Files of tests without a ghost that take long together."""


LONG: Final = (
    "tests/tuning/test_script_tuning.py::test_a_card_that_runs_out_gets_smaller_batches",
    "tests/tuning/test_script_tuning.py::test_memory_may_run_out_later",
    "tests/tuning/test_tuning_trials.py::test_memory_that_runs_out_late_on_the_last_rank_is_the_verdict[save",
    "tests/tuning/test_tuning_trials.py::test_memory_that_runs_out_late_on_the_last_rank_is_the_verdict[backward",
    "tests/ghost/test_inference_engines.py::test_a_front_end_that_breaks_is_a_failure_of_the_command",
    "tests/benchmarks/test_train_benchmark.py::test_contestants_run_on_a_ghost",
    "tests/serving/test_checking.py::test_a_folder_that_lacks_tensors_is_incomplete",
    "tests/benchmarks/test_kills.py::test_a_run_that_is_killed_loses_nothing",
    "tests/script/test_preferences.py::test_a_reference_needs_its_weights_once_more_or_not_at_all[precomputed",
)
"""Tests of 7 to 34 s whose neighbours ask nearly the same; TONNAGE_TEST_LONG=1 runs them too."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that daily work can do without, and skip those that take long for little."""
    runs_long = bool(os.environ.get("TONNAGE_TEST_LONG"))
    for item in items:
        if item.nodeid.startswith(LONG) and not runs_long:
            item.add_marker(pytest.mark.skip(reason="takes long; TONNAGE_TEST_LONG=1 runs it"))
        needs_ghost = not set(SLOW).isdisjoint(getattr(item, "fixturenames", ()))
        if needs_ghost or (
            item.path.is_relative_to(HERE) and str(item.path.relative_to(HERE)).startswith(SLOW_FILES)
        ):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def _own_shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What this process estimates is run, not remembered from an earlier session."""
    folder = tmp_path_factory.mktemp("shelf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "folder", lambda: folder)
        patch.setattr(history, "file", lambda: folder / "history.sqlite")
        yield


@pytest.fixture(scope="session")
def torch_build() -> Torch:
    """The CUDA build of torch; skips where a ghost cannot run, and only there."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip("a ghost needs Linux on x86-64")
    try:
        found = wheel.find(sys.executable)
    except GhostUnavailable as reason:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(reason))
    ghost_environment.libraries(found.cuda_major)  # raises with the command that builds them
    return found


@pytest.fixture(scope="session")
def worker(torch_build: Torch) -> Iterator[Worker]:
    """One warm worker for all estimates of this process of pytest's; it costs five seconds to start one."""
    with Worker() as warm:
        yield warm
