"""Imports of the warm worker, and its errors for steps that failed."""

import errno
import sys
from dataclasses import asdict
from typing import Any

import pytest

from tonnage.ghost.environment import PATH
from tonnage.job import Job
from tonnage.model import ModelRef
from tonnage.plans import Plan
from tonnage.step import modeling_modules


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [*sys.path, *PATH.split(":")])
    from tonnage.workers import server as module

    return module


@pytest.fixture
def one_line(server: Any) -> Any:
    from tonnage.workers import failures

    return lambda error: str(failures.explain(error))


def seeing() -> dict[str, Any]:
    config = {"model_type": "gemma3", "vision_config": {"model_type": "siglip_vision_model"}, "text_config": {}}
    job = Job(model=ModelRef(name="mine", kind="config", config=config), seq_len=64)
    return {"job": asdict(job), "plan": asdict(Plan())}


def test_modules_of_nested_networks_are_imported_once_for_all_forks(server: Any) -> None:
    server._import_libraries(seeing())
    assert "transformers.models.gemma3.modeling_gemma3" in sys.modules
    assert "transformers.models.siglip.modeling_siglip" in sys.modules


def test_import_errors_are_left_to_the_fork(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(server.preload, "try_import", lambda name: asked.append(name))
    server._import_libraries(seeing())
    assert modeling_modules.NAMES in asked
    assert not any("modeling" in name for name in asked)


def test_the_cause_is_named_if_the_error_does_not(one_line: Any) -> None:
    error = RuntimeError("failed to run forward")
    error.__cause__ = AttributeError("no such\nthing")
    told = "RuntimeError: failed to run forward; because of AttributeError: no such thing"
    assert one_line(error) == f"The step failed: {told}"


def test_an_old_transformers_is_named(one_line: Any) -> None:
    told = one_line(ImportError("cannot import name 'x' from 'transformers' (/some/where.py)"))
    assert "cannot import name 'x' from 'transformers')" in told
    assert told.endswith("; upgrade it.")


def test_a_full_disk_is_named(one_line: Any) -> None:
    assert "of /some/where;" in one_line(OSError(errno.ENOSPC, "No space left on device", "/some/where"))
