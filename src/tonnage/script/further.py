"""Further loops, evaluation, generation and saving that a process did after its first loop had made its steps."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any, Final

from tonnage.estimates.estimate import Estimate, PhasePeak
from tonnage.recorder.tonnage_recorder.loops import LEAST_LEFT_BYTES
from tonnage.trace.trace import Trace
from tonnage.units import MIB, format_size, pluralise

_SHOWN: Final = {
    "evaluation": "evaluate",
    **{name: name for name in ("generate", "save", "merge", "reference")},
}
"""Phases that a report shows although they came after the steps, by their names in a trace."""

_UNEQUAL: Final = 1.001
"""Most that what steps over batches of one size hold differs by."""

_ALIKE: Final = 1.5
"""Ratio of what two steps leave up to which a third one is taken to do so, too."""

_LEAST_BYTES: Final = MIB
"""Bytes allocated behind the steps that are not worth a second run: the allocator's smallest segment is 2 MiB."""


def describe(first: Trace, rest: Trace) -> dict[str, Any]:
    """Return the loops and phases of `rest`, which begins with all of `first`, and their peaks in bytes.

    A step whose operations were counted is left out: torch adds gradients out of place in it.  What the allocator
    kept of it is not known apart, so that a later phase is given what was reserved before.  `needs_more` is True if
    more was needed behind that step than before it, or if memory ran out: a run without counting then says how much.
    `is_cut` is False if each loop ended by itself, and `is_evaluation_cut` if each evaluation did.  `held_bytes` are
    the least and the most on the card before backward in the first steps, and `left_bytes` what each of them left on
    the card.  `keeping` are evaluations that were ended although each of their batches leaves something there.
    """
    from tonnage.estimates.timeline import timeline  # imports numpy, which views do without

    walked = timeline(rest)
    allocated, reserved = walked.allocated_by_mark, walked.reserved_by_mark
    known, end = len(first.marks), len(rest.marks)
    counted = _find_counted_marks(rest)

    def peaks(marks: Iterable[int], most_bytes: int | None = None) -> dict[str, int]:
        seen = [mark for mark in marks if mark not in counted]
        reserved_bytes = int(max((reserved[mark] for mark in seen), default=0))
        return {
            "allocated_bytes": int(max((allocated[mark] for mark in seen), default=0)),
            "reserved_bytes": reserved_bytes if most_bytes is None else min(reserved_bytes, most_bytes),
        }

    before = peaks(range(known))
    most_bytes = before["reserved_bytes"] if counted else None
    phases: dict[str, list[int]] = {}
    for place in range(known, end):
        phases.setdefault(rest.marks[place].phase, []).append(place)
    loops = [{name: row[name] for name in ("place", "first_step")} for row in rest.script.get("loops", [])]
    starts = [_first_mark(rest, loop["first_step"]) for loop in loops] + [end]
    described = [
        {**loop, "steps": _count_steps(rest, start, stop), **peaks(range(start, stop), most_bytes)}
        for loop, (start, stop) in zip(loops, pairwise(starts), strict=True)
    ]
    return {
        "loops": described if len(described) > 1 else [],
        "is_cut": rest.script.get("is_cut", True),
        "is_evaluation_cut": rest.script.get("is_evaluation_cut", False),
        "held_bytes": _held_bytes(first),
        "left_bytes": _left_bytes(first),
        "keeping": rest.script.get("keeping", []),
        "phases": {_SHOWN[name]: peaks(places, most_bytes) for name, places in phases.items() if name in _SHOWN},
        "needs_more": bool(counted)
        and _needs_more(rest, before, peaks(range(counted.stop, end)), int(reserved[: counted.stop].max(initial=0))),
    }


def _held_bytes(first: Trace) -> list[int]:
    """Return the least and the most bytes on the card before backward, from the last loop's second step on."""
    held = list(_last_loop(first).get("held", {}).values())[1:]
    return [min(held), max(held)] if held else []


def _last_loop(first: Trace) -> Mapping[str, Any]:
    rows: list[Mapping[str, Any]] = [{}, *first.script.get("loops", [])]
    return rows[-1]


def _left_bytes(first: Trace) -> int:
    """Return the bytes that each of the last loop's steps left on the card, 0 if they did not leave equally many."""
    left = list(_last_loop(first).get("left", {}).values())
    if len(left) < 3:
        return 0
    before, last = left[-2] - left[-3], left[-1] - left[-2]
    is_steady = min(before, last) >= LEAST_LEFT_BYTES and max(before, last) <= _ALIKE * min(before, last)
    return int(last) if is_steady else 0


def _needs_more(rest: Trace, before: Mapping[str, int], behind: Mapping[str, int], reached_bytes: int) -> bool:
    """Return True if more was needed behind the counted step, at which `reached_bytes` were reserved, than before."""
    is_short = rest.outcome.get("kind") == "oom" or bool(rest.script.get("shortage"))
    is_larger = behind["allocated_bytes"] > before["allocated_bytes"] + _LEAST_BYTES
    return is_short or is_larger or behind["reserved_bytes"] > reached_bytes


def _find_counted_marks(rest: Trace) -> range:
    """Return the marks of the step whose operations were counted."""
    marks = rest.script.get("counted_marks") or [0, 0]
    return range(marks[0], marks[1] if len(marks) > 1 else len(rest.marks))


def _first_mark(trace: Trace, step: int) -> int:
    """Return the first mark of a step, from 1."""
    return next((place for place, mark in enumerate(trace.marks) if mark.step + 1 >= step), len(trace.marks))


def _count_steps(trace: Trace, start: int, end: int) -> int:
    """Return the number of optimizer steps between two marks."""
    before, after = (trace.marks[place].step if place < len(trace.marks) else trace.steps for place in (start, end))
    return after - before


def notes(trace: Trace, unwound: Sequence[str], steps: int | None) -> list[str]:
    """Return a note for each loop of a process with several, on loops that had to be unwound, and on later steps.

    `steps` is the number of steps that were wanted of each loop, None for all.
    """
    behind = trace.script.get("further") or {}
    loops, is_cut = behind.get("loops", []), behind.get("is_cut", True)
    found = []
    for facts, alike in groupby(enumerate(loops, 1), key=lambda row: {**row[1], "first_step": 0}):
        first, *rest = [number for number, _ in alike]
        which = f"Loops {first} to {rest[-1]}" if rest else f"Loop {first}"
        found.append(
            f"{which} of {len(loops)} (at {facts['place']}), {pluralise(facts['steps'], 'optimizer step')}"
            f"{' each' if rest else ''}: at most {format_size(facts['allocated_bytes'])} allocated, "
            f"{format_size(facts['reserved_bytes'])} reserved."
        )
    if unwound:
        found.append(
            f"The loop at {', '.join(unwound)} has no end that could be reached after its steps: it was unwound, "
            "and what the program does behind it was not run."
        )
    elif steps is None or not is_cut:
        return found
    elif loops:
        batches = f", each evaluation behind one after {steps} batches" if behind.get("is_evaluation_cut") else ""
        found.append(
            f"Each loop was ended after {steps} optimizer steps, or a few more{batches}; --steps all runs all."
        )
    elif (rows := trace.script.get("loops")) and trace.script.get("complete") and steps > 1:
        batches = f" and {steps} batches of each evaluation behind it" if behind.get("is_evaluation_cut") else ""
        found.append(
            f"Only the first {steps} optimizer steps of the loop at {rows[0]['place']}{batches} were run; "
            "--steps all runs all."
        )
    found += [_note_growth(behind), *map(_note_kept, behind.get("keeping", []))]
    return [note for note in found if note]


def _note_growth(behind: Mapping[str, Any]) -> str:
    """Return the note about steps that need more and more, or unequally much; empty if there are none."""
    low_bytes, high_bytes = behind.get("held_bytes") or (0, 0)
    left_bytes = behind.get("left_bytes", 0)
    if left_bytes and high_bytes - low_bytes <= _ALIKE * left_bytes:
        return (
            f"Each step left {format_size(left_bytes)} more on the card than the one before, in 1,000 steps "
            f"{format_size(1000 * left_bytes)}: are losses or outputs kept with their graphs?"
        )
    if high_bytes <= low_bytes * _UNEQUAL:
        return ""
    return (
        f"These steps differ: from the second on {format_size(low_bytes)} to {format_size(high_bytes)} were on the "
        "card before backward, as with batches of several lengths. Longer ones than these need more, and each new "
        "length may reserve more."
    )


def _note_kept(kept: Mapping[str, Any]) -> str:
    """Return the note about an evaluation that was ended although each batch left something on the card."""
    more = kept["more"]
    return (
        f"The evaluation at {kept['place']} was ended after {pluralise(kept['batches'], 'batch')}, of which each "
        f"left {format_size(kept['left_bytes'])} on the card; {pluralise(more, 'more batch')} would leave "
        f"{format_size(more * kept['left_bytes'])}."
    )


def with_later_phases(estimate: Estimate, trace: Trace) -> Estimate:
    """Return the estimate with the phases behind the steps: those that are new, and more of those that are known."""
    peaks = (trace.script.get("further") or {}).get("phases", {})
    later = {name: PhasePeak(name=name, **peak) for name, peak in peaks.items()}
    known = tuple(_larger(phase, later.pop(phase.name, phase)) for phase in estimate.phases)
    return replace(estimate, phases=(*known, *later.values()))


def _larger(phase: PhasePeak, later: PhasePeak) -> PhasePeak:
    """Return a phase with the larger of two peaks."""
    return replace(
        phase,
        allocated_bytes=max(phase.allocated_bytes, later.allocated_bytes),
        reserved_bytes=max(phase.reserved_bytes, later.reserved_bytes),
    )
