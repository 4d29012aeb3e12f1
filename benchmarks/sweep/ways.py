"""Ways to ask a case once more, and what is wrong with their answers."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.sweep.cases import Case
from benchmarks.sweep.exporting import delivered, dropped, exported

from tonnage.case import Case as TrainingCase
from tonnage.catalog.conventions import conventions_of
from tonnage.catalog.devices import parse_cluster, spell_cluster
from tonnage.errors import CannotEstimate, TonnageError, UsageError
from tonnage.estimates import archive, predict, sources
from tonnage.estimates.estimate import CATEGORIES, Estimate
from tonnage.estimates.from_traces import Run
from tonnage.options import options, replace_checked, spell_option
from tonnage.planner import plan_file
from tonnage.planner.solution import Candidate, Choice
from tonnage.plans import Plan
from tonnage.shallow.depths import choose_assembly_depths
from tonnage.trainers import ENGINES
from tonnage.trainers.cases import request
from tonnage.units import MIB
from tonnage.workers.worker import Worker

FIGURES = ("fits", "rank", "peak", "phases", "steps", "host", "model", "time", "ranks")
"""What an estimate says, without how it was found."""

OPEN = ("activation", "workspace", "communication")
"""Categories between which blocks go over where ranks exchange: which of several at one address is not known."""

KEEPING = ("qwen2_5_vl", "qwen3_vl")
"""Networks that keep a tensor from one forward to the next (`rope_deltas`), of which a repeated step has one more."""

IMITATED = 0.02
"""How far the portable source may be from the ghost."""

RESIDENT = 0.25
"""How far the operating system's count of resident memory may be from another process's."""

_COUNTED_RESIDENT = re.compile(
    r"(ranks\[\d+\]\.)?host\.((peak|low|high)_bytes|machine_bytes|(by_category\.)?process)"
)
"""Figures of the host that have the process's resident memory in them."""

OF_TRAINERS = ("invariants", "kept", "exported", "dropped", "own", "delivered", "trainers")
"""Ways that ask something of a trainer's run."""

ENOUGH_BYTES = 2**38
BELOW_ZERO = "qlora"
"""On cards below 1.2 GiB transformers' loader asks for less than nothing."""


@dataclass
class Asking:
    """A warm worker, and how often it was asked for what."""

    worker: Worker = field(default_factory=Worker)
    asked: Counter[str] = field(default_factory=Counter)

    def run(self, one: Case, **said: Any) -> Run:
        """Three steps, made one by one.  Raises UsageError and CannotEstimate."""
        if self.worker.closed:
            self.worker = Worker()
        wanted = {"steps": predict.STEPS, "fresh": True, "worker": self.worker, **said}
        return predict.estimate(TrainingCase(one.job, one.plan, one.cluster), **wanted)


def figures(found: Estimate) -> dict[str, Any]:
    """FIGURES of an estimate."""
    document = found.to_json()
    return {name: document[name] for name in FIGURES}


def differences(a: Any, b: Any, where: str = "") -> Iterator[str]:
    """A line for each place where two documents differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        for name in dict.fromkeys((*a, *b)):
            yield from differences(a.get(name), b.get(name), f"{where}.{name}" if where else name)
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        for place, (one, two) in enumerate(zip(a, b, strict=True)):
            yield from differences(one, two, f"{where}[{place}]")
    elif a != b and not (_COUNTED_RESIDENT.fullmatch(where) and abs(a - b) < RESIDENT * a):
        yield f"{where} {a} {b}"


def unlike(a: Estimate, b: Estimate) -> list[str]:
    """Where two estimates differ, but for what is open."""
    found = list(differences(figures(a), figures(b)))
    if a.cluster["gpus"] > 1 and all(line.startswith(_open()) for line in found):
        sums = [sum(each.peak.by_category[name] for name in OPEN) for each in (a, b)]
        return [] if sums[0] == sums[1] else found
    return found


def _open() -> tuple[str, ...]:
    return tuple(f"peak.by_category.{name} " for name in OPEN)


def invariants(_: Asking, one: Case, whole: Run) -> list[str]:
    """What must hold of any answer: sums, orders, torch's own counters, positive seconds."""
    found, peak, torchs = whole.estimate, whole.estimate.peak, whole.traces[0].peaks
    seconds = found.time.get("step_seconds")
    held = {
        "categories sum to the process": sum(peak.by_category.values()) == peak.process_bytes,
        "no category is below zero": tuple(peak.by_category) == CATEGORIES and min(peak.by_category.values()) >= 0,
        "allocated <= reserved <= process": peak.allocated_bytes <= peak.reserved_bytes <= peak.process_bytes,
        "low <= process <= high": peak.low_bytes <= peak.process_bytes <= peak.high_bytes,
        "what fits needs no more than there is": not found.fits
        or peak.process_bytes <= one.cluster.device.capacity_bytes,
        "what does not fit says why": (found.oom is None) == found.fits,
        "the peak is in a phase": peak.phase in {phase.name for phase in found.phases},
        "the time is positive, or said to be unknown": (seconds is not None and 0 < seconds < 1e4)
        or any("step" in line or "time" in line for line in found.coverage.modelled),
        "less is used than there are": not found.time.get("mfu") or 0 < found.time["mfu"] < 1,
    }
    for name in ("allocated_bytes", "reserved_bytes"):
        most = getattr(peak, name)
        held[f"torch counts the same {name}"] = torchs[name] == most
        for what in ("phases", "steps", "curve"):
            held[f"{what} have the most {name}"] = max(getattr(one, name) for one in getattr(found, what)) == most
    return [what for what, holds in held.items() if not holds]


def repeated(asking: Asking, one: Case, whole: Run) -> list[str] | None:
    """The first step's requests once more in place of the later ones."""
    made, more = predict.usual_steps(TrainingCase(one.job, one.plan, one.cluster))
    if not more or one.job.model.name in KEEPING:
        return None
    return unlike(whole.estimate, asking.run(one, steps=made, repeated=more).estimate)


def continued(asking: Asking, one: Case, whole: Run) -> list[str] | None:
    """The step of a deep network from networks of a few layers."""
    made, more = predict.usual_steps(TrainingCase(one.job, one.plan, one.cluster))
    if not more or choose_assembly_depths(one.job, one.plan) is None:
        return None
    found = asking.run(one, steps=made, repeated=more, few_layers=True)
    if not found.traces[0].layers:
        asking.asked["not continued, and run whole"] += 1
        return None
    return unlike(whole.estimate, found.estimate)


def meta(asking: Asking, one: Case, whole: Run) -> list[str] | None:
    """The portable source."""
    first = whole if one.cluster.gpus == 1 else asking.run(one, rank=0)
    try:
        found = asking.run(one, source="meta", rank=0, worker=None).estimate
    except UsageError as error:
        asking.asked["refused by meta"] += 1
        return None if str(error).startswith("source=meta") else [str(error)]
    problems = [] if first.estimate.fits == found.fits else ["fits"]
    for name, slack in (("allocated_bytes", 0), ("reserved_bytes", 2 * MIB)):
        a, b = getattr(first.estimate.peak, name), getattr(found.peak, name)
        if abs(b - a) > max(IMITATED * a, slack):
            problems.append(f"{name} {a} {b}: {100 * (b - a) / a:+.1f} %")
    return problems


def fresh(asking: Asking, one: Case, whole: Run) -> list[str]:
    """A ghost process of its own, where the other has done other jobs before."""
    with Worker() as worker:
        found = asking.run(one, worker=worker)
    problems = list(differences(whole.estimate.to_json(), found.estimate.to_json()))
    return problems if _events(whole) == _events(found) else [*problems, "events"]


def _events(found: Run) -> list[Counter[tuple[int, ...]]]:
    """Of each rank what was asked under which mark: what autocast's cache gives back is in the order of a hash."""
    columns = (trace.event_columns for trace in found.traces)
    return [Counter(zip(*(each[name] for name in ("action", "size", "mark")), strict=True)) for each in columns]


def card(asking: Asking, one: Case, whole: Run) -> list[str] | None:
    """A card much larger, one as large as the peak, one a little smaller, and one much smaller."""
    if not whole.estimate.fits or one.job.method == BELOW_ZERO:
        return None
    peak, problems, fitted = whole.estimate.peak, [], True
    for capacity in (ENOUGH_BYTES, peak.process_bytes, peak.process_bytes - 4 * MIB, peak.allocated_bytes):
        cluster = replace(one.cluster, device=one.cluster.device.with_capacity(capacity))
        found = asking.run(replace(one, cluster=cluster)).estimate
        if capacity >= peak.process_bytes:
            problems += [f"{capacity}: {line}" for line in unlike(whole.estimate, found)]
        if found.fits and not (fitted and found.peak.process_bytes <= capacity):
            problems.append(f"{capacity}: fits")
        fitted = found.fits
    return problems


def more(asking: Asking, one: Case, whole: Run) -> list[str] | None:
    """A larger micro-batch, and a longer sequence: neither needs less."""
    if not whole.estimate.fits or one.job.lengths or one.plan.checkpointing.startswith("budget"):
        return None
    problems = []
    for name in ("micro_batch", "seq_len"):
        job = replace(one.job, **{name: 2 * getattr(one.job, name)})
        with contextlib.suppress(UsageError):
            found = asking.run(replace(one, job=job)).estimate.peak
            if found.allocated_bytes < whole.estimate.peak.allocated_bytes:
                problems.append(f"{name} doubled: {whole.estimate.peak.allocated_bytes} {found.allocated_bytes}")
    return problems


def kept(_: Asking, one: Case, whole: Run) -> list[str]:
    """Saved and loaded again; a plan.toml written and read again."""
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "run.tonnage"
        archive.save(path, whole.estimate, whole.traces)
        problems = list(differences(whole.estimate.to_json(), archive.load_estimate(path).to_json(), "saved"))
        traces = {trace.rank: trace for trace in archive.load_traces(path)}
        if any(traces[trace.rank].event_columns != trace.event_columns for trace in whole.traces):
            problems.append("saved traces")
        if Estimate.from_json(whole.estimate.to_json()) != whole.estimate:
            problems.append("JSON")
        return problems + _read_again(one, whole, Path(home))


def _read_again(one: Case, whole: Run, home: Path) -> list[str]:
    config, file = home / "config.json", home / "plan.toml"
    config.write_text(json.dumps(one.job.model.config))
    choice = Choice(name="drawn", candidate=Candidate(job=one.job, plan=one.plan), estimate=whole.estimate)
    gpu, memory = spell_cluster(one.cluster)
    file.write_text(plan_file.text(choice, gpu=gpu, gpu_memory_bytes=memory, model=str(config)))
    read = plan_file.read(file)
    job, plan = request(read.model, offline=True, **read.options)
    problems = list(differences(asdict(one.plan), asdict(plan), "plan"))
    problems += differences(asdict(replace(one.job, model=job.model)), asdict(job), "job")
    if parse_cluster(read.gpu, gpu_memory_bytes=read.gpu_memory_bytes) != one.cluster:
        problems.append("cluster")
    return problems


def own(asking: Asking, one: Case, whole: Run) -> list[str] | None:
    """Of a trainer's run: tonnage's own loop under the same plan, as closely as docs/reference/engines.md lets
    expect."""
    slack = _slack(one)
    if slack is None:
        return None
    usual: dict[str, Any] = {"optimizer": "adamw-fused"} if one.plan.optimizer == "adamw" else {}
    if conventions_of(one.plan.engine).clips and one.plan.clip_grad_norm is None:
        usual["clip_grad_norm"] = 1.0
    try:
        found = asking.run(replace(one, plan=replace(one.plan, engine="tonnage", **usual))).estimate
    except TonnageError:
        return None
    a, b = whole.estimate.peak.allocated_bytes, found.peak.allocated_bytes
    return [f"allocated {a}, own loop {b}"] if abs(a - b) > slack * b + MIB // 8 else []


def _slack(one: Case) -> float | None:
    """How far the loops may be apart; None where they do other things (DeepSpeed, TRL's loss)."""
    if one.plan.engine not in ("hf-trainer", "accelerate", "axolotl"):
        return None
    apart = one.plan.engine == "axolotl" or one.plan.activation_offload != "none" or one.cluster.gpus > 1
    return 0.15 if apart else 0.015


def command(asking: Asking, one: Case, whole: Run) -> list[str]:
    """The command line in place of Python; then the same line, damaged."""
    with tempfile.TemporaryDirectory() as home, contextlib.chdir(home):
        Path("config.json").write_text(json.dumps(one.job.model.config))
        line = ["estimate", "config.json", "--gpu", str(one.cluster), *_spelled(one), "--json", "--steps", "3"]
        code, out, err = commanded(asking, [*line, "--save", "run.tonnage"])
        if code != (0 if whole.estimate.fits else 1):
            return [f"exit code {code}: {err[-300:]}"]
        document, wanted = json.loads(out), json.loads(json.dumps(figures(whole.estimate)))
        wanted["model"] |= {name: document["model"][name] for name in ("name", "source")}
        problems = list(differences(wanted, {name: document[name] for name in wanted}))
        again = commanded(asking, ["report", "run.tonnage", "--json"])
        if again[0] != code or json.loads(again[1]) != document:
            problems.append("report")
        broken = _damaged(random.Random(one.number), line)
        code, out, err = commanded(asking, broken)
        asking.asked[f"exit code {code}"] += 1
        if code not in (0, 1, 2, 3) or not _one_line(code, out, err):
            problems.append(f"{code}: {' '.join(broken)}: {err[-300:]}")
        return problems


def trainers(asking: Asking, one: Case, _: Run) -> list[str]:
    """The same line with each trainer's name: one answer, or one line that says why not."""
    problems = []
    with tempfile.TemporaryDirectory() as home, contextlib.chdir(home):
        Path("config.json").write_text(json.dumps(one.job.model.config))
        for engine in ENGINES:
            spelled = _spelled(replace(one, plan=replace_checked(one.plan, {"engine": engine.name})))
            line = ["estimate", "config.json", "--gpu", str(one.cluster), *spelled, "--json"]
            code, out, err = commanded(asking, line)
            asking.asked[f"{engine.name}: exit code {code}"] += 1
            if code not in (0, 1, 2, 3) or not _one_line(code, out, err):
                problems.append(f"{code}: {' '.join(line)}: {err[-300:]}")
    return problems


def _one_line(code: int, out: str, err: str) -> bool:
    """Whether a program that gives no answer says why in one line, and nothing else."""
    errors = sum(line.startswith("error:") for line in err.splitlines())
    return "Traceback" not in err and (code < 2 or (errors == 1 and not out))


def _spelled(one: Case) -> Iterator[str]:
    for value in (one.job, one.plan):
        for item, option in options(type(value)):
            found = getattr(value, item.name)
            if found != item.default:
                yield f"--{spell_option(item.name)}"
                if option.kind != "switch":
                    yield ",".join(found) if isinstance(found, tuple) else str(found)


def _damaged(rng: random.Random, line: list[str]) -> list[str]:
    """One or two words of the line left out, cut, changed or added."""
    command, *broken = line
    words = ("0", "-1", "", "x", "1e9", "nan", "--", "--steps", "4096k", "1.5", "é", "every-0", "--pp", "2", "40GB")
    for _ in range(rng.choice((1, 2))):
        place = rng.randrange(len(broken))
        broken[place : place + 1] = rng.choice(
            ([], [rng.choice(words)], [rng.choice(words), broken[place]], [broken[place][:3]])
        )
    return [command, *broken]


class _Lent(Worker):
    """A worker that whoever gets it does not end."""

    def __init__(self, worker: Worker) -> None:
        self.__dict__ = worker.__dict__

    def close(self) -> None:
        """Leave it open."""

    def kill(self) -> None:
        """Leave it running."""


def commanded(asking: Asking, arguments: list[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the program, in this process and by the warm worker."""
    from tonnage.cli.main import run

    started = sources._start
    sources._start = lambda torch_version, progress: _Lent(asking.worker)
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            return run(arguments), out.getvalue(), err.getvalue()
    finally:
        sources._start = started


WAYS: dict[str, Callable[[Asking, Case, Run], list[str] | None]] = {
    way.__name__: way
    for way in (
        *(invariants, repeated, continued, meta, fresh, card, more, kept, exported, dropped, delivered, own),
        *(trainers, command),
    )
}


def tell(asking: Asking, one: Case, ways: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    """By way what is wrong with a case: nothing, most often.  What cannot be run at all is refused, or failed."""
    try:
        whole = asking.run(one)
    except UsageError as error:
        yield "refused", [str(error)]
        return
    except CannotEstimate as error:
        fell = any(words in str(error) for words in ("step failed", "ended early", "died"))
        yield "failed" if fell else "refused", [str(error)]
        return
    for way in ways:
        try:
            found = WAYS[way](asking, one, whole)
        except TonnageError as error:
            found = [f"{type(error).__name__}: {error}"]
        if found is not None:
            yield way, found


def of_engine(plan: Plan) -> tuple[str, ...]:
    """The ways that ask something of a plan's engine."""
    return OF_TRAINERS if plan.engine != "tonnage" else tuple(way for way in WAYS if way not in ("own", "delivered"))
