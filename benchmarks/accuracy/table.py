"""The errors of predictions, by source, and the table that shows them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from benchmarks.accuracy.rows import METRICS, Row
from benchmarks.accuracy.runner import Predicted

PERCENT: Final = 100.0
WORST: Final = 3
"""Rows a source that the list of the worst names."""
TOO_LOW_PERCENT: Final = 5.0
"""An under-prediction by more than this may mean an out-of-memory that was not foretold."""

AIMS: Final[dict[bool, dict[str, tuple[float, ...]]]] = {
    True: {"allocated": (0.1, 0.5), "reserved": (1.0, 7.0), "process": (3.0,)},
    False: {"allocated": (1.0, 3.0), "reserved": (3.0, 8.0)},
}
"""Percents aimed at, median and p95 by metric: where script and configuration are public, and of other rows."""

Answer = tuple[Row, Predicted]


@dataclass(frozen=True, kw_only=True)
class Errors:
    """How far the predictions of one metric are from the measured values of some rows."""

    percents: tuple[float, ...]
    """Signed; positive: predicted too high."""

    @property
    def median(self) -> float:
        """Of the absolute errors."""
        return median(abs(percent) for percent in self.percents)

    @property
    def p95(self) -> float:
        """The absolute error that 95 of 100 rows do not exceed (nearest rank)."""
        ordered = sorted(abs(percent) for percent in self.percents)
        return ordered[-(-len(ordered) * 95 // 100) - 1]

    @property
    def worst(self) -> float:
        """The largest absolute error."""
        return max(abs(percent) for percent in self.percents)

    @property
    def bias(self) -> float:
        """The median of the signed errors."""
        return median(self.percents)


def percent(row: Row, predicted: Predicted, metric: str) -> float:
    """How far a prediction is from what was measured; positive: too high."""
    return PERCENT * (predicted[metric] / row.measured[metric] - 1)


def errors(answers: Sequence[Answer], metric: str) -> Errors | None:
    """Of the rows that have both; None where none has.  Rows that calibrate a constant do not count."""
    found = tuple(
        percent(row, predicted, metric)
        for row, predicted in answers
        if not row.calibrates and metric in row.measured and metric in predicted
    )
    return Errors(percents=found) if found else None


def markdown(answers: Sequence[Answer]) -> str:
    """What was aimed at, the table by source, the worst rows, and what could not be run."""
    return "\n".join(
        [*_aims(answers), "", *_table(answers), "", *_worst(answers), *_beside(answers), *_failed(answers)]
    )


def _aims(answers: Sequence[Answer]) -> Iterator[str]:
    yield "| rows | metric | rows | median % | aimed at | p95 % | aimed at | more than 5 % too low |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    configured = [answer for answer in answers if answer[0].configured]
    complete = [answer for answer in configured if answer[0].complete]
    assumed = [answer for answer in answers if not answer[0].configured]
    for rows, part, aims in (
        ("script and configuration are public", configured, AIMS[True]),
        ("and so are all versions", complete, AIMS[True]),
        ("something of the configuration was assumed", assumed, AIMS[False]),
        ("all", answers, AIMS[True]),
    ):
        for metric in METRICS:
            if found := errors(part, metric):
                aimed = [f"{value:g}" for value in aims.get(metric, ())]
                middle, most = (*aimed, "", "")[:2]
                yield (
                    f"| {rows} | {metric} | {len(found.percents)} | {found.median:.3f} | {middle} "
                    f"| {found.p95:.3f} | {most} | {_low(found)} |"
                )


def _low(found: Errors) -> int:
    return sum(value < -TOO_LOW_PERCENT for value in found.percents)


def _sources(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    found: dict[str, list[Answer]] = {}
    for row, predicted in answers:
        found.setdefault(row.source, []).append((row, predicted))
    return found


def _table(answers: Sequence[Answer]) -> Iterator[str]:
    yield "| source | metric | rows | median % | p95 % | worst % | bias % | more than 5 % too low |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    for source, part in _sources(answers).items():
        for metric in METRICS:
            if found := errors(part, metric):
                yield (
                    f"| {source} | {metric} | {len(found.percents)} | {found.median:.3f} | {found.p95:.3f} "
                    f"| {found.worst:.3f} | {found.bias:+.3f} | {_low(found)} |"
                )


def _beside(answers: Sequence[Answer]) -> Iterator[str]:
    """Other tools' published predictions, where rows have them, and ours of the same rows."""
    asked = sorted(
        {(row.source, tool, metric) for row, _ in answers for tool in row.rivals for metric in row.rivals[tool]}
    )
    if not asked:
        return
    yield ""
    yield "| source | metric | rows | tool | median % | worst % | bias % | tonnage, median % | worst % | bias % |"
    yield "|---|---|---:|---|---:|---:|---:|---:|---:|---:|"
    for source, tool, metric in asked:
        part = [
            answer for answer in answers if answer[0].source == source and metric in answer[0].rivals.get(tool, {})
        ]
        ours, theirs = errors(part, metric), errors([(row, row.rivals[tool]) for row, _ in part], metric)
        if ours and theirs:
            shown = (f"{each.median:.3f} | {each.worst:.3f} | {each.bias:+.3f}" for each in (theirs, ours))
            yield f"| {source} | {metric} | {len(part)} | {tool} | {' | '.join(shown)} |"


def _worst(answers: Sequence[Answer]) -> Iterator[str]:
    yield "| source | worst rows | metric | measured GiB | predicted GiB | % |"
    yield "|---|---|---|---:|---:|---:|"
    for source, part in _sources(answers).items():
        far = sorted(
            ((percent(row, predicted, metric), metric, row, predicted) for row, predicted, metric in _both(part)),
            key=lambda item: -abs(item[0]),
        )
        for value, metric, row, predicted in far[:WORST]:
            yield (
                f"| {source} | {row.name} | {metric} | {row.measured[metric]:.4f} | {predicted[metric]:.4f} "
                f"| {value:+.2f} |"
            )


def _both(answers: Sequence[Answer]) -> Iterator[tuple[Row, Predicted, str]]:
    for row, predicted in answers:
        for metric in row.measured:
            if metric in predicted:
                yield row, predicted, metric


def _failed(answers: Sequence[Answer]) -> Iterator[str]:
    for row, predicted in answers:
        if "error" in predicted:
            yield f"\nNot run: {row.source}, {row.name}: {predicted['error']}"
