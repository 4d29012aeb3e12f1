"""Settings to try on a script that no plan can be made for, one after the other until it fits.

They change memory and time only, not the mathematics of training, unless a loop has no flag for accumulation.  Each
rung for a Trainer contains those before it: expandable segments and the fused optimizer, then checkpointing, then
half the batch with twice the accumulation, and so on.  A loop of its own is tried with the flags that it has for
these, each alone and then two together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from tonnage.estimates.estimate import Peak
from tonnage.script.facts import Facts, checkpointing_word
from tonnage.script.setting_changes import BATCH, WHY, Change, Setting, make_expandable_setting, make_setting

Rung = tuple[Change, ...]

_ENDS: Final = {"checkpointing": ("activation",), "optimizer": ("workspace",)}
"""Categories of memory that a change may leave nothing of."""

_OF_BATCH: Final = ("activation", "workspace")
"""Categories that may be as large as the micro-batch."""


def list_rungs(facts: Facts, command: Sequence[str], *, fits: bool) -> Iterator[Rung]:
    """Yield the changes to try together, more each time; for a script that fits, only those that cost nothing."""
    free = tuple(_list_free_changes(facts, command))
    if free:
        yield free
    if fits or not facts.settings:
        return
    checkpointing, batches = tuple(_list_checkpointing(facts, command)), tuple(_list_batches(facts, command))
    if facts.trainer:
        rung = (*free, *checkpointing)
        yield from [rung] if checkpointing else []
        yield from ((*rung, batch) for batch in batches)
    else:
        own = [change for change in (*checkpointing, *batches) if all(one.where == "flag" for one in change.settings)]
        yield from ((change,) for change in own)
        yield from ((first, second) for first in checkpointing for second in batches if {first, second} <= set(own))


def may_suffice(rung: Rung, whole: Peak, capacity_bytes: int) -> bool:
    """Return False if a script that needs `whole` cannot fit with a rung, even if that saves all that it could."""
    held: dict[str, float] = {**whole.by_category, "cached": 0}
    for change in rung:
        held |= dict.fromkeys(_ENDS.get(change.technique, ()), 0)
        left = next((one.after / one.before for one in change.settings if one.name == BATCH[0]), 1)
        held |= {name: held.get(name, 0) * left for name in _OF_BATCH}
    return sum(held.values()) <= capacity_bytes


def _list_checkpointing(facts: Facts, command: Sequence[str]) -> Iterator[Change]:
    word = checkpointing_word(facts)
    if not facts.settings.get(word):
        yield _make_change("checkpointing", make_setting(word, True, facts, command))


def _list_batches(facts: Facts, command: Sequence[str]) -> Iterator[Change]:
    """Yield half the batch, a quarter, ..., with as much more accumulation if there is a setting for it."""
    batch, accumulation = (facts.settings.get(name) or 0 for name in BATCH)
    while batch > 1 and batch % 2 == 0:
        batch, accumulation = batch // 2, accumulation * 2
        values = zip(BATCH, (batch, accumulation), strict=True)
        rows, passes = (make_setting(name, value, facts, command) for name, value in values)
        if accumulation and (facts.trainer or passes.where == "flag"):
            yield _make_change("batch", rows, passes)
        else:
            yield _make_change("rows", rows)


def _list_free_changes(facts: Facts, command: Sequence[str]) -> Iterator[Change]:
    """Yield the changes that cost no time."""
    if not facts.is_expandable:
        yield _make_change("allocator", make_expandable_setting(facts))
    if facts.trainer and facts.settings.get("optim") == "adamw_torch":
        yield _make_change("optimizer", make_setting("optim", "adamw_torch_fused", facts, command))


def _make_change(technique: str, *settings: Setting) -> Change:
    """Return a change whose savings and costs are not known yet."""
    return Change(technique=technique, settings=settings, why=WHY[technique], saves_bytes=None, costs_seconds=None)
