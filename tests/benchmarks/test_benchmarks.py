"""The benchmarks that write pages ask for things that exist."""

import importlib
import inspect
import itertools
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tonnage.catalog.devices import parse_cluster
from tonnage.catalog.models import find_model
from tonnage.trainers.cases import request

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def ladders(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("ladders")
    for name in ("ladders", "asking"):
        sys.modules.pop(name, None)


def test_every_rung_is_said_in_options_that_there_are(ladders: Any) -> None:
    for common, rungs in (
        (ladders.TORCHTUNE, ladders.TORCHTUNE_RUNGS),
        (ladders.ANSWER_AI, ladders.ANSWER_AI_RUNGS),
    ):
        for rung in rungs:
            if rung.options is not None:
                wanted = {**common, **rung.options}
                parse_cluster(wanted.pop("gpu"))
                request(wanted.pop("model"), offline=True, **wanted)


def test_torchtunes_modules_can_take_every_rung(ladders: Any) -> None:
    rows = ladders.torchtune_rows()
    assert {name: len(those) for name, those in rows.items()} == {
        "torchtune": 10,
        "normed": 8,
        "eight_bit": 3,
    }
    named = set(re.findall(r"(?<!{){(\w+)}", ladders.TEXT.read_text(encoding="utf-8")))
    assert named == {"torchtune", "eight_bit", "answer_ai"}  # "normed" is a column
    for row in (row for those in rows.values() for row in those):
        script = importlib.import_module(f"benchmarks.accuracy.scripts.{row.script}")
        inspect.signature(script.measure).bind(**row.arguments)
        assert row.arguments.get("packed", True) == (row.name != "baseline")


def test_the_published_ladder_is_whole(ladders: Any) -> None:
    published = [rung.published_gib for rung in ladders.TORCHTUNE_RUNGS]
    assert published == [25.5, 60.0, 51.0, 42.9, 24.9, 23.1, 21.8, 17.6, 8.5, 4.6]


def test_changes_in_percent_say_what_was_before_it_was_rounded(ladders: Any) -> None:
    # 60.0 leaves 59.95 to 60.05 and so 59.95 / 2.4 = 24.979 to 25.021 for the first one, 25.0 no less
    assert ladders.refined([25.0, 60.0], [140.0]) == pytest.approx([25.0, 60.0])
    # 25.0 leaves 24.95 to 25.05, 60.1 only 60.05 / 2.4 = 25.0208 and more: in the middle 25.0354
    assert ladders.refined([25.0, 60.1], [140.0]) == pytest.approx([25.0354, 60.085], abs=1e-4)


def test_a_rung_that_was_not_run_says_why(ladders: Any) -> None:
    row = ladders.torchtune_rows()["torchtune"][1]
    assert ladders.beside(row, {"error": "no such torch"})[3] == "not run: no such torch"
    assert ladders.beside(row, {"active": 2 * row.measured["active"], "reserved": 200.0})[3:] == (
        "+100.00 %",
        "200.00",
    )


def test_budgets_are_asked_of_models_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    budget = importlib.import_module("budget")
    for model, options in budget.MODELS:
        request(model, offline=True, **options)
    named = set(re.findall(r"(?<!{){(\w+)}", budget.TEXT.read_text(encoding="utf-8")))
    assert named == {"ours", "sent", "torchs", "whole", "monotonic"}
    for name in ("budget", "budget_network", "asking"):
        sys.modules.pop(name, None)


def test_a_step_that_the_scaler_skipped_is_told_from_one_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    exactness = importlib.import_module("exactness")
    half, full = ("llama", "full", "adamw", "none", "fp16-mixed"), ("llama", "full", "adamw", "none", "fp32")
    assert exactness.kind(full, [0] * 7) == "equal"
    assert exactness.kind(half, [0, 0, 0, 512, 512, 512, 0]) == "step skipped", "the second step was made"
    assert exactness.kind(full, [0, 0, 0, 512, 512, 512, 512]) == "other"
    assert exactness.kind(half, [0, -192, 0, 0, -192, 0, 0]) == "other"
    all_of_them = exactness.cases(0)
    assert len(set(all_of_them)) == len(all_of_them) > 15 * 4 * 4 * 6
    assert exactness.cases(0)[:5] == all_of_them[:5] != exactness.cases(1)[:5]


@pytest.fixture
def league(monkeypatch: pytest.MonkeyPatch) -> Any:
    for folder in ("league", "gpu"):
        monkeypatch.syspath_prepend(str(BENCHMARKS / folder))
    yield importlib.import_module("rows")
    for name in ("rows", "compare", "recorded"):
        sys.modules.pop(name, None)


def test_the_league_asks_for_recorded_steps_that_most_tools_have_words_for(league: Any) -> None:
    rows = league.recorded()
    ways = itertools.product(("full", "lora"), ("bf16-true", "bf16-mixed"), ("none", "full"))
    assert {(row["method"], row["precision"], row["checkpointing"]) for row in rows} == set(ways)
    for row in rows:
        known = find_model(row["model"])
        assert known is not None, row["model"]
        assert known.config()["model_type"] in league.DESCRIBED
        weights = known.parameters * 2 / 2**30
        assert row["allocated_gib"] > weights, "at the least its weights are on the card, in two bytes"
        assert row["record"]["plan"]["optimizer"] == "adamw"
