"""How long measured steps took, beside what the time model says of them.

    python -m benchmarks.time                 errors of rows whose network, then whose cluster, was left out
    python -m benchmarks.time --calibrate     print the tables of catalog/times.toml
    python -m benchmarks.time --regret        how much of the best measured throughput our picks reach
    python -m benchmarks.time --kept          errors with the catalog as it is, nothing calibrated
    python -m benchmarks.time --blind         only sources that no code was calibrated on: first answers, and now
    python -m benchmarks.time --played FILE   recorded steps whose operations are counted on a ghost (minutes a file)

`--rows FILE` reads other rows than measurements/published/throughput (JSON lines, also compressed, with the fields of
those files); with `--kept` and `--regret --kept` a file of rows never seen is judged with what is in the catalog.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from benchmarks.time import blind, coverage, kinds, played, regret
from benchmarks.time.calibration import CALIBRATIONS, calibrated, known, leaving_out, toml, with_interval
from benchmarks.time.fit import errors, summary
from benchmarks.time.rows import PUBLISHED, UNSEEN, Row, load, own, own_stacks

from tonnage.timing.replay import Pace
from tonnage.timing.software import Software

PUBLISHED_ERRORS = {
    "vTrain, one machine": "vTrain 8.4 % (mean)",
    "vTrain, several machines": "vTrain 14.7 % (mean)",
}
"""What others reached on the same rows."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=PUBLISHED, help="a file or folder of rows")
    parser.add_argument("--source", help="only sources whose name contains this")
    parser.add_argument("--calibrate", action="store_true", help="print the software tables of times.toml")
    parser.add_argument("--regret", action="store_true", help="the picks on the ultrascale grid")
    parser.add_argument("--kinds", action="store_true", help="with --regret: alternatives as plans have")
    parser.add_argument("--kernels", action="store_true", help="kernels of our own steps beside the cards' tables")
    parser.add_argument("--blind", action="store_true", help="only sources that no code was calibrated on")
    parser.add_argument("--kept", action="store_true", help="calibrate nothing: take the catalog's constants")
    parser.add_argument("--played", type=Path, help="a recording; with --calibrate: print the pace of times.toml")
    options = parser.parse_args()
    if options.played:
        _played(options.played, options.calibrate)
        return 0
    if options.kernels:
        _kernels()
        return 0
    if options.blind:
        _blind()
        _coverage({"blind": coverage.blindly()})
        return 0
    rows, left = load(options.rows)
    if options.rows == PUBLISHED:
        ours, ours_left = own()
        rows += ours
        left["own H200"] = ours_left
    if options.source:
        rows = [row for row in rows if options.source.lower() in row.source.lower()]
    if options.calibrate:
        _calibrate(rows)
    elif options.regret:
        grid = [row for row in rows if row.software == "nanotron"]
        _regret(grid, _other_sizes(grid) if options.rows != PUBLISHED else [], options.kept, options.kinds)
    else:
        judged = _report(rows, options.kept)
        _unseen()
        _blind()
        _coverage({"network left out": judged, "blind": coverage.blindly()})
        _other_kinds()
        _left_out(left)
    return 0


def _played(path: Path, calibrate: bool) -> None:
    steps, left = [], []
    for one in played.seen(path):
        if isinstance(one, str):
            left.append(one)
        else:
            steps.append(one)
    pace = played.calibrated(steps) if calibrate else Pace.usual()
    print("\n".join(played.toml(pace) if calibrate else played.table(steps, pace)))
    found = [step.error(pace) for step in steps]
    told = summary(found)
    within = sum(pace.low_factor <= 1 / (1 + error) <= pace.high_factor for error in found)
    print(
        f"\n{told['rows']} steps: median {100 * told['median']:.1f} %, 90th percentile {100 * told['p90']:.1f} %, "
        f"bias {100 * told['bias']:+.1f} %; {within} within {pace.low_factor} to {pace.high_factor}"
    )
    print("\n".join(["", "left out:", *left]))


def _names(rows: Iterable[Row]) -> list[str]:
    present = {row.software for row in rows}
    return [name for name in CALIBRATIONS if name in present]


def _calibrate(rows: Sequence[Row]) -> None:
    for name in _names(rows):
        out = [error for row, error in leaving_out(name, rows, _model) if CALIBRATIONS[name].takes(row)]
        if not out:
            continue
        print(toml(with_interval(calibrated(name, rows), out)), end="\n\n", flush=True)


def _model(row: Row) -> str:
    return row.model


def _cluster(row: Row) -> str:
    return row.cluster_name


def _report(rows: Sequence[Row], kept: bool) -> list[coverage.Judged]:
    judged: list[coverage.Judged] = []
    elsewhere: list[tuple[Row, float]] = []
    title = "the catalog's constants" if kept else "network left out"
    print(f"| source | rows | median % ({title}) | p90 % | bias % | cluster left out: median % | p90 % | published |")
    print("|---|---:|---:|---:|---:|---:|---:|---|")
    for name in _names(rows):
        mine = [row for row in rows if row.software == name and row.ran]
        if kept:
            by_model = list(zip(mine, errors(mine, known(name)), strict=True))
            by_cluster: list[tuple[Row, float]] = []
        else:
            by_model = leaving_out(name, rows, _model)
            several = len({row.cluster_name for row in mine}) > 1
            by_cluster = leaving_out(name, rows, _cluster) if several else []
        _lines(by_model, by_cluster)
        judged += [(row, error, known(name)) for row, error in by_model]
        elsewhere += by_cluster
    _line("all", [error for _, error, _ in judged], [error for _, error in elsewhere])
    return judged


def _lines(by_model: Sequence[tuple[Row, float]], by_cluster: Sequence[tuple[Row, float]]) -> None:
    for group, pairs in _groups(by_model).items():
        _line(group, [error for _, error in pairs], [error for row, error in by_cluster if _group(row) == group])


def _line(group: str, by_model: Sequence[float], by_cluster: Sequence[float]) -> None:
    first, second = summary(by_model), summary(by_cluster)
    cells = [f"{100 * first[name]:.1f}" for name in ("median", "p90")] + [f"{100 * first['bias']:+.1f}"]
    cells += [f"{100 * second[name]:.1f}" if second["rows"] else "-" for name in ("median", "p90")]
    print(f"| {group} | {first['rows']} | {' | '.join(cells)} | {PUBLISHED_ERRORS.get(group, '')} |", flush=True)


def _group(row: Row) -> str:
    if row.software == "megatron" and row.shape.experts:
        return f"{row.source}, {row.cluster_name}"
    if row.cluster_name in ("GB200", "GB300"):
        return f"{row.source}, {row.cluster_name} (calibrated only its card's products)"
    if row.software == "eager" and row.cluster_name == "a100":
        return f"{row.source}, A100 (not calibrated)"
    if row.software == "nanotron":
        return f"{row.source}, {'MFU above 15 %' if row.raw.get('mfu', 0) > 15 else 'slower layouts'}"
    return row.source


def _groups(pairs: Iterable[tuple[Row, float]]) -> dict[str, list[tuple[Row, float]]]:
    found: dict[str, list[tuple[Row, float]]] = defaultdict(list)
    for row, error in pairs:
        found[_group(row)].append((row, error))
    return dict(found)


def _unseen() -> None:
    """Our own steps on a card that no code was calibrated on."""
    rows, _ = own(UNSEEN)
    found = errors(rows, known("eager"))
    inside = coverage.shares([(row, error, known("eager")) for row, error in zip(rows, found, strict=True)])
    one = summary(found)
    print("\n| own steps on a card never calibrated on | rows | median % | p90 % | bias % | within the interval % |")
    print("|---|---:|---:|---:|---:|---:|")
    within = 100 * sum(share.inside * share.rows for share in inside) / one["rows"]
    cells = f"{100 * one['median']:.1f} | {100 * one['p90']:.1f} | {100 * one['bias']:+.1f} | {within:.0f}"
    print(f"| {rows[0].source} | {one['rows']} | {cells} |")


def _kernels() -> None:
    """Measured over the cards' tables, kind by kind."""
    print("| card | step | products | attention | between kernels % |")
    print("|---|---|---:|---:|---:|")
    for one in kinds.kinds():
        print(f"| {one.card} | {one.case} | {one.products:.2f} | {one.attention:.2f} | {100 * one.idle:.1f} |")


def _blind() -> None:
    """Sources that no code was calibrated on."""
    print("\n| source | rows | first answer: median % | p90 % | bias % | today: median % | p90 % | bias % |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row, first, today in blind.answers(blind.load()):
        found[row.source].append((first, today))
    everything = [pair for pairs in found.values() for pair in pairs]
    for source, pairs in (*found.items(), ("all", everything)):
        both = [summary(one) for one in zip(*pairs, strict=True)]
        cells = [f"{100 * one['median']:.1f} | {100 * one['p90']:.1f} | {100 * one['bias']:+.1f}" for one in both]
        print(f"| {source} | {len(pairs)} | {' | '.join(cells)} |")


def _coverage(found: dict[str, list[coverage.Judged]]) -> None:
    """How often steps were within the interval, which is to hold 8 of 10."""
    print("\n| steps within their interval | kind | place | rows | % |\n|---|---|---|---:|---:|")
    for title, judged in found.items():
        for share in coverage.shares(judged):
            print(f"| {title} | {share.kind} | {share.place} | {share.rows} | {100 * share.inside:.0f} |")


def _other_kinds() -> None:
    print("\n| own H200, other kinds (not calibrated) | predicted / measured |\n|---|---:|")
    for case, error in own_stacks():
        print(f"| {case} | {1 + error:.2f} |")


def _left_out(left: dict[str, dict[str, int]]) -> None:
    print("\n| source | rows not used | why |\n|---|---:|---|")
    for source, reasons in left.items():
        for reason, count in sorted(reasons.items(), key=lambda item: -item[1]):
            print(f"| {source} | {count} | {reason} |")


def _other_sizes(rows: Sequence[Row]) -> list[Row]:
    """The published grid's rows of networks that are not among these."""
    judged = {row.model for row in rows}
    return [row for row in load()[0] if row.software == "nanotron" and row.model not in judged]


def _regret(rows: Sequence[Row], others: Sequence[Row], kept: bool, kinds: bool) -> None:
    """The cells of the rows; what is left out of calibration is the cell's network, `others` are in it."""
    known_rows = [*rows, *others]

    @cache
    def without(model: str) -> Software:
        return (
            known("nanotron") if kept else calibrated("nanotron", [row for row in known_rows if row.model != model])
        )

    for oracle in (False, True):
        cells = regret.table(rows, without, others, oracle, kinds)
        print(f"\n{'Only layouts that ran' if oracle else 'Our own account of memory'}:\n")
        print("| model | GPUs | first pick | best of 3 | best of 5 | crashed of 5 |\n|---|---:|---:|---:|---:|---:|")
        for cell in cells:
            model, gpus = cell.name
            print(f"| {model} | {gpus} | {cell.first:.2f} | {cell.three:.2f} | {cell.five:.2f} | {cell.crashed} |")
        print(f"| mean | | {' | '.join(f'{value:.3f}' for value in regret.means(cells))} | |", flush=True)
    print(f"\nRefused of those that ran: {100 * regret.refused(rows, without(rows[0].model)):.1f} %")


if __name__ == "__main__":
    sys.exit(main())
