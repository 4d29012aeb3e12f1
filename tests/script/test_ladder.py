"""Tests of the settings that are tried on a script without a plan."""

from typing import Any

import pytest
from notes import facts

import estimates
from tonnage.script.facts import Facts
from tonnage.script.ladder import list_rungs, may_suffice
from tonnage.units import GIB

STORE = {"action": "store", "nargs": None}
FLAGS: dict[str, Any] = {
    "--batch-size": {"dest": "batch_size", "default": 8, **STORE},
    "--accum": {"dest": "accum", "default": 1, **STORE},
    "--ckpt": {"dest": "grad_ckpt", "action": "storetrue", "nargs": 0, "default": False},
}


def loop(*flags: str, command: tuple[str, ...] = (), **seen: Any) -> list[list[str]]:
    """Return the rungs of a loop of its own with these flags, as their settings' words."""
    notes = facts().recorded
    recorded = {
        **{"network": {**notes["network"], "checkpointed": False}, "options": {name: FLAGS[name] for name in flags}},
        **{"rows": 8, "passes_a_step": 1, **seen},
    }
    rungs = list_rungs(Facts(recorded=recorded), ("python", "loop.py", *command), fits=False)
    return [[str(setting) for change in rung for setting in change.settings] for rung in rungs][1:]


def test_a_loop_is_tried_with_each_of_its_flags_and_then_with_two() -> None:
    batches = [[f"--batch-size: 8 -> {rows}", f"--accum: 1 -> {passes}"] for rows, passes in ((4, 2), (2, 4), (1, 8))]
    checkpointing = ["--ckpt: False -> True"]
    assert loop(*FLAGS) == [checkpointing, *batches, *([*checkpointing, *batch] for batch in batches)]


def test_without_a_flag_for_accumulation_a_step_has_fewer_rows() -> None:
    assert loop("--batch-size") == [["--batch-size: 8 -> 4"], ["--batch-size: 8 -> 2"], ["--batch-size: 8 -> 1"]]


@pytest.mark.parametrize(
    ("flags", "seen", "rungs"),
    [
        ((), {}, 0),
        (("--batch-size",), {"rows": 32}, 0),  # the flag says 8: it is another size
        (("--batch-size",), {"rows": 7}, 0),
        (("--accum",), {}, 0),
        (("--ckpt",), {}, 1),
    ],
)
def test_a_flag_must_say_what_was_seen(flags: tuple[str, ...], seen: dict[str, Any], rungs: int) -> None:
    assert len(loop(*flags, **seen)) == rungs


def test_a_flag_of_the_command_says_more_than_its_default() -> None:
    assert loop("--batch-size", command=("--batch-size", "2"), rows=2) == [["--batch-size: 2 -> 1"]]
    assert loop("--batch-size", command=("--batch-size", "2")) == []


def test_a_rung_that_cannot_suffice_is_known() -> None:
    found = estimates.fitting().peak
    held = {"parameter": 2 * GIB, "activation": 8 * GIB, "workspace": 4 * GIB, "cached": 3 * GIB, "runtime": GIB}
    whole = type(found)(**{**vars(found), "by_category": held})
    notes = facts(settings={"per_device_train_batch_size": 4, "optim": "adamw_torch_fused"})
    free, checkpointing, half, quarter = list_rungs(notes, (), fits=False)
    least = [(free, 15), (checkpointing, 7), (half, 5), (quarter, 4)]
    for rung, gib in least:
        assert may_suffice(rung, whole, gib * GIB)
        assert not may_suffice(rung, whole, gib * GIB - 1)
