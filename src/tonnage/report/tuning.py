"""The page of `tonnage tune` for a terminal: the trials in their order, their speed as bars, and the best plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tonnage.planner.describe import describe
from tonnage.units import format_gib

if TYPE_CHECKING:
    from tonnage.tuning.decisions import Trial, Tuned
    from tonnage.tuning.outcome import Outcome

_BAR: Final = 24
_ENDINGS: Final = {"out_of_memory": "out of memory", "failed": "failed"}


def render(tuned: Tuned, *, unicode: bool = True) -> str:
    """Return the page."""
    best = tuned.best
    most = best.outcome.speed if best is not None else 1.0
    lines = [_verdict(best), ""]
    lines += [f"The script: {tuned.seen}", ""] if tuned.seen else []
    lines.append("Trials, each in processes of its own")
    for number, trial in enumerate(tuned.trials, 1):
        mark = "*" if trial is best else " "
        what = "" if trial.candidate is None else f": {describe(trial.candidate)}"
        lines.append(f"{mark}{number:2}  {trial.why}{what}")
        lines.append(f"     {_result(trial.outcome, most, trial.predicted_seconds, unicode=unicode)}")
        if trial.unpredicted:
            lines.append(f"     no prediction: {trial.unpredicted}")
        lines += [f"     {sentence}" for sentence in trial.not_taken]
    return "\n".join(lines) + "\n"


def _verdict(best: Trial | None) -> str:
    if best is None:
        return "NOTHING HELD  no trial finished."
    outcome = best.outcome
    memory = f", {format_gib(outcome.reserved_bytes)} reserved" if outcome.reserved_bytes else ""
    lines = [f"FASTEST  {_speed(outcome)}{memory}"]
    lines += [] if best.candidate is None else [describe(best.candidate, whole=True)]
    if best.changed is not None:
        lines.append(best.changed.line)
        lines += [f"in the code: {code}" for code in best.changed.in_code]
    return "\n         ".join(lines)


def _speed(outcome: Outcome) -> str:
    tokens = "" if outcome.tokens_per_second is None else f"{outcome.tokens_per_second:,.0f} tokens/s, "
    return f"{tokens}{outcome.step_seconds:.3g} s a step"


def _result(outcome: Outcome, most: float, predicted: float | None, *, unicode: bool) -> str:
    if not outcome.holds:
        return f"{_ENDINGS[outcome.ended]} at {outcome.moment}: {outcome.message}"
    cells = round(_BAR * outcome.speed / most)
    bar = ("█" if unicode else "#") * cells + ("·" if unicode else ".") * (_BAR - cells)
    words = [f"{bar} {_speed(outcome)}"]
    if outcome.spread:
        words[-1] += f" (+-{100 * outcome.spread:.0f} %)"
    if predicted is not None:
        words.append(f"predicted {predicted:.3g} s")
    if outcome.reserved_bytes and outcome.capacity_bytes:
        words.append(f"{format_gib(outcome.reserved_bytes)} reserved, {100 * outcome.fullness:.0f} % of the card")
    return ", ".join(words)
