"""Settings to try on a script that no plan can be made for, one after the other until it fits.

They change memory and time only, not the mathematics of training.  Each rung contains those before it: expandable
segments and the fused optimizer, then checkpointing, then half the batch with twice the accumulation, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tonnage.script.facts import Facts, checkpointing_word
from tonnage.script.setting_changes import WHY, Change, Setting, make_expandable_setting, make_setting


def list_rungs(facts: Facts, command: Sequence[str], *, fits: bool) -> Iterator[tuple[Change, ...]]:
    """Yield the changes to try together, more each time; for a script that fits, only those that cost nothing."""
    rung = tuple(_list_free_changes(facts, command))
    if rung:
        yield rung
    if fits or not facts.trainer or not facts.settings:
        return
    word = checkpointing_word(facts)
    if not facts.settings.get(word):
        rung = (*rung, _make_change("checkpointing", make_setting(word, True, facts, command)))
        yield rung
    batch, accumulation = (facts.settings[name] for name in _BATCH)
    while batch > 1 and batch % 2 == 0:
        batch, accumulation = batch // 2, accumulation * 2
        values = zip(_BATCH, (batch, accumulation), strict=True)
        settings = (make_setting(name, value, facts, command) for name, value in values)
        yield (*rung, _make_change("batch", *settings))


_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
"""Settings whose product is the number of sequences of a step on each GPU."""


def _list_free_changes(facts: Facts, command: Sequence[str]) -> Iterator[Change]:
    """Yield the changes that cost no time."""
    if not facts.is_expandable:
        yield _make_change("allocator", make_expandable_setting(facts))
    if facts.trainer and facts.settings.get("optim") == "adamw_torch":
        yield _make_change("optimizer", make_setting("optim", "adamw_torch_fused", facts, command))


def _make_change(technique: str, *settings: Setting) -> Change:
    """Return a change whose savings and costs are not known yet."""
    return Change(technique=technique, settings=settings, why=WHY[technique], saves_bytes=None, costs_seconds=None)
