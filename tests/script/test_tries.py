"""Tests of the settings that are tried on a script that does not fit."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import estimates
from tonnage.advice.changes import Change as Options
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.estimates.estimate import Estimate
from tonnage.estimates.from_traces import Run
from tonnage.job import Job
from tonnage.model import ModelRef
from tonnage.plans import Plan
from tonnage.script import tries
from tonnage.script.facts import Facts
from tonnage.script.planning import Asked, Tried
from tonnage.script.setting_changes import Change, Setting
from tonnage.units import GIB

CARD = 15 * GIB
a_change = Change(
    technique="optimizer",
    settings=(Setting(name="optim", before="y", after="x", where="flag", flag="--optim"),),
    why="",
    saves_bytes=None,
    costs_seconds=None,
)


def run_of(peak_bytes: int, *, fits: bool = True) -> Estimate:
    found = estimates.fitting() if fits else estimates.full_card()
    return replace(found, fits=fits, peak=replace(found.peak, process_bytes=peak_bytes))


@pytest.fixture
def try_settings(monkeypatch: pytest.MonkeyPatch) -> Any:
    def try_all(*runs: Estimate, whole_bytes: int) -> list[Tried]:
        def try_changes(*_: Any) -> Tried:
            nothing: Any = {"command": ("python", "train.py"), "environment": {}, "settings": {}, "arguments": {}}
            return Tried(estimate=next(pending), **nothing, in_code=(), not_taken=())

        def list_attempts(asked: Asked, *_: Any) -> Iterator[tries._Attempt]:
            yield from (tries._Attempt(asked, (a_change,)),) * len(runs)

        pending = iter(runs)
        monkeypatch.setattr(tries, "try_changes", try_changes)
        monkeypatch.setattr(tries, "_list_attempts", list_attempts)
        monkeypatch.setattr(tries.Facts, "of", lambda trace: None)
        asked = Asked(command=["python", "train.py"], cluster=parse_cluster("t4"), stated={})
        whole: Any = Run(estimate=run_of(whole_bytes), traces=(None,))  # type: ignore[arg-type]
        return [one.tried for one in tries._try_settings(asked, whole, lambda text: None, 60.0)]

    return try_all


def test_a_run_that_ended_out_of_memory_has_no_peak_to_show(try_settings: Any) -> None:
    out_of_memory, fitting = run_of(13 * GIB, fits=False), run_of(12 * GIB)
    assert try_settings(out_of_memory, whole_bytes=CARD + GIB) == []
    (shown,) = try_settings(out_of_memory, fitting, whole_bytes=CARD + GIB)
    assert shown.estimate == fitting


def test_the_first_run_that_fits_is_the_last(try_settings: Any) -> None:
    assert len(try_settings(run_of(12 * GIB), run_of(11 * GIB), whole_bytes=CARD + GIB)) == 1


def test_settings_that_gain_nothing_are_not_shown(try_settings: Any) -> None:
    assert try_settings(run_of(12 * GIB), whole_bytes=12 * GIB) == []


@pytest.mark.parametrize(("flags", "is_settable"), [("", False), ("--bs", False), ("--bs --accum", True)])
def test_a_loop_without_flags_for_its_batch_keeps_it(flags: str, is_settable: bool) -> None:
    """Its batch size is written where it makes its data loader, which no setting reaches."""
    flag = {"action": "store", "nargs": None, "default": 1}
    notes = {
        "options": {name: {"dest": name.strip("-"), **flag} for name in flags.split()},
        "accelerator": {"gradient_accumulation_steps": 1, "mixed_precision": "no"},
        "batch": {"sequences": 1, "tokens": 128},
    }
    model = ModelRef(name="llama-3.2-1b", kind="catalog")
    case = Case(Job(model=model, micro_batch=4, seq_len=128), Plan(engine="accelerate"), parse_cluster("t4"))
    asked = Asked(command=["python", "train.py"], cluster=case.cluster, stated={})
    halved = Options(options={"micro_batch": 2, "grad_accum": 2})
    assert tries._is_settable(halved, case, Facts(recorded=notes), asked) is is_settable
    assert tries._is_settable(halved, case, Facts(recorded={"trainer": ["transformers.trainer.Trainer"]}), asked)


def test_where_nothing_fits_the_nearest_and_a_card_that_holds_it_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(command=["python", "train.py"], cluster=parse_cluster("t4"), stated={})
    roomy = replace(asked, cluster=tries.roomy(asked.cluster))
    larger = replace(asked, cluster=parse_cluster("l4"))
    answers = iter((run_of(17 * GIB), run_of(20 * GIB)))
    nothing: Any = {"command": ("python", "train.py"), "environment": {}, "arguments": {}, "in_code": ()}

    def try_changes(_: Asked, facts: Any, changes: Any, progress: Any) -> Tried:
        return Tried(estimate=next(answers), **nothing, settings={"optim": "x"} if changes else {}, not_taken=())

    attempts = [tries._Attempt(roomy, (a_change,)), tries._Attempt(larger, ())]
    monkeypatch.setattr(tries, "try_changes", try_changes)
    monkeypatch.setattr(tries, "_list_attempts", lambda *_: iter(attempts))
    monkeypatch.setattr(tries.Facts, "of", lambda trace: None)
    whole: Any = Run(estimate=run_of(20 * GIB), traces=(None,))  # type: ignore[arg-type]
    shown = [tries._as_advice(one, asked, whole.estimate) for one in tries._try_settings(asked, whole, print, 0.0)]
    assert [(one.fits, one.change, one.gain_bytes) for one in shown] == [
        (False, {"optim": "x"}, 3 * GIB),
        (True, {"gpu": "l4"}, 0),
    ]
    assert shown[1].command == "tonnage dry-run --gpu l4 -- python train.py"


def test_a_loop_without_flags_is_run_on_a_card_that_holds_it() -> None:
    """Only if the card is what is short."""
    asked = Asked(command=["python", "train.py"], cluster=parse_cluster("2xt4"), stated={})
    for needed, cards in ((20 * GIB, ["NVIDIA L4"]), (CARD - 4 * GIB, [])):
        whole = run_of(needed)
        whole = replace(whole, peak=replace(whole.peak, by_category={"parameter": needed}))
        attempts = tries._list_attempts(asked, Facts(), whole, print)
        larger = [one.asked.cluster for one in attempts if not one.changes]
        assert [(one.device.name, one.gpus) for one in larger] == [(card, 2) for card in cards]
