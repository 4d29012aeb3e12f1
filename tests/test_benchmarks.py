"""The benchmarks that write pages ask for things that exist."""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tonnage.api import request
from tonnage.device import parse_cluster

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def ladders(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("ladders")
    for name in ("ladders", "asking"):
        sys.modules.pop(name, None)


def test_every_rung_is_said_in_options_or_left_out_with_a_reason(ladders: Any) -> None:
    for common, rungs in (
        (ladders.TORCHTUNE, ladders.TORCHTUNE_RUNGS),
        (ladders.ANSWER_AI, ladders.ANSWER_AI_RUNGS),
    ):
        for rung in rungs:
            assert (rung.options is None) == bool(rung.why_not)
            if rung.options is not None:
                wanted = {**common, **rung.options}
                parse_cluster(wanted.pop("gpu"))
                request(wanted.pop("model"), offline=True, **wanted)


def test_the_published_ladder_is_whole(ladders: Any) -> None:
    published = [rung.published_gib for rung in ladders.TORCHTUNE_RUNGS]
    assert published[:8] == [25.5, 60.0, 51.0, 42.9, 24.9, 23.1, 21.8, 17.6]


def test_budgets_are_asked_of_models_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    budget = importlib.import_module("budget")
    for model, options in budget.MODELS:
        request(model, offline=True, **options)
    named = set(re.findall(r"(?<!{){(\w+)}", budget.TEXT.read_text(encoding="utf-8")))
    assert named == {"ours", "sent", "torchs", "whole", "monotonic"}
    for name in ("budget", "budget_network", "asking"):
        sys.modules.pop(name, None)
