"""Settings to try on a Trainer's script that no plan can be made for: what changes nothing but memory and time.

Each rung has all those before it; the script itself is the judge.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tonnage.script.changes import WHY, Change, Setting, expandable, setting
from tonnage.script.facts import Facts, checkpointing_word


def rungs(facts: Facts, command: Sequence[str], *, fits: bool) -> Iterator[tuple[Change, ...]]:
    """Changes to try together, more each time; of a script that fits, those that cost nothing."""
    found = tuple(_free(facts, command))
    if found:
        yield found
    if fits or not facts.trainer or not facts.settings:
        return
    word = checkpointing_word(facts)
    if not facts.settings.get(word):
        found = (*found, _change("checkpointing", setting(word, True, facts, command)))
        yield found
    rows, times = (facts.settings[name] for name in _BATCH)
    while rows > 1 and rows % 2 == 0:
        rows, times = rows // 2, times * 2
        both = (setting(name, value, facts, command) for name, value in zip(_BATCH, (rows, times), strict=True))
        yield (*found, _change("batch", *both))


_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")


def _free(facts: Facts, command: Sequence[str]) -> Iterator[Change]:
    if not facts.is_expandable:
        yield _change("allocator", expandable(facts))
    if facts.trainer and facts.settings.get("optim") == "adamw_torch":
        yield _change("optimizer", setting("optim", "adamw_torch_fused", facts, command))


def _change(technique: str, *settings: Setting) -> Change:
    return Change(technique=technique, settings=settings, why=WHY[technique], saves_bytes=None, costs_seconds=None)
