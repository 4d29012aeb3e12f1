"""Training by tonnage.apply beside Hugging Face's Trainer and TRL, on one GPU: tokens/s, MFU, losses, peaks.

    PYTHONPATH=src python benchmarks/gpu/train.py --out train.jsonl --work DIR [--only '8B*'] [--budget-seconds 500]
    PYTHONPATH=src python benchmarks/gpu/train.py --report train.jsonl

Each contestant of each job (`contests.CONTESTS`) runs in a process of its own, and a line is written as it ends; the
same call goes on with what is missing.  `--source ghost --gpu NAME` runs all on a ghost of that card: it shows memory
and no time.  The report has the aims: as fast as the Trainer with its settings, 1.3 times as fast as
its defaults by a searched plan, that plan within 3 % of the grid's best, memory within 1 % of the estimate.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

import contests
from contests import Contest

SECONDS: Final = 900.0
"""Time limit of a contestant."""


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", type=Path, help="folder for weights, deleted by nobody")
    parser.add_argument("--only", default="*")
    parser.add_argument("--model", help="train this model or folder in every job instead, such as a tiny one")
    parser.add_argument("--seq-len", type=int, help="tokens of a row in every job")
    parser.add_argument("--budget-seconds", type=float, default=float("inf"), help="begin nothing after these")
    parser.add_argument("--source", choices=("real", "ghost"), default="real")
    parser.add_argument("--gpu", default="here", help="the card to plan for, and of a ghost")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--one", nargs=3, metavar=("SPEC", "RESULT", "SOURCE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        return _run_one(*given.one)
    if given.report:
        records = [json.loads(line) for line in given.report.read_text(encoding="utf-8").splitlines()]
        print(report(records))
        return 0
    if given.out is None or given.work is None:
        parser.error("give --out and --work, or --report")
    changes = {name: value for name, value in (("model", given.model), ("seq_len", given.seq_len)) if value}
    chosen = [
        Contest(**{**vars(contest), **changes}) for contest in contests.CONTESTS if fnmatch(contest.name, given.only)
    ]
    for record in compete(chosen, given.out, given.work, given.source, given.gpu, given.budget_seconds):
        print(f"{record['contest']['name']}: {record['contestant']}: {_summarise(record)}", file=sys.stderr)
    return 0


def compete(
    chosen: list[Contest], out: Path, work: Path, source: str, gpu: str, budget_seconds: float
) -> Iterator[dict[str, Any]]:
    """Yield the record of each contestant that the file lacks, after it was written there."""
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    done = {(record["contest"]["name"], record["contestant"]) for record in map(json.loads, lines)}
    began = time.monotonic()
    for contest in chosen:
        for contestant in contests.list_contestants(contest):
            if (contest.name, contestant) in done or time.monotonic() - began > budget_seconds:
                continue
            record = _compete(contest, contestant, work.absolute(), source, gpu)
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            yield record


def _compete(contest: Contest, contestant: str, work: Path, source: str, gpu: str) -> dict[str, Any]:
    """Return the record of one contestant."""
    missing = contests.missing_package(contestant)
    if missing:
        skipped = {"contest": asdict(contest), "contestant": contestant, "source": source}
        return {**skipped, "error": f"{missing} is not installed"}
    from tonnage.units import pluralise

    found = _search(contest, gpu) if contestant == "tonnage planned" else None
    work.mkdir(parents=True, exist_ok=True)
    folder = work / contest.model.replace("/", "_")
    spec = contests.make_spec(contest, contestant, folder, found)
    variables = _variables(spec, source, gpu, work)
    spec_file, result = work / "spec.json", work / "result.json"
    spec_file.write_text(json.dumps(spec), encoding="utf-8")
    result.unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__)), "--one", str(spec_file), str(result), source]
    contests.write_weights(contest, folder)
    try:
        done = subprocess.run(command, env=variables, timeout=SECONDS, capture_output=True, text=True, check=False)
        said = done.stderr.strip().splitlines()
    except subprocess.TimeoutExpired:
        said = [f"no end after {pluralise(int(SECONDS), 'second')}"]
    record = {**spec, "source": source, "mfu": None}
    if not result.exists():
        return {**record, "error": said[-1][:300] if said else "no words"}
    record |= json.loads(result.read_text(encoding="utf-8"))
    return record | _expect(contest, record, gpu)


def _search(contest: Contest, gpu: str) -> tuple[Any, Any] | None:
    """Return job and plan that tonnage's search finds for the tokens of a step."""
    import tonnage

    tokens = contest.seq_len * contest.micro_batch * contest.grad_accum
    solution = tonnage.plan(
        contest.model,
        gpu=gpu,
        offline=True,
        top=1,
        method=contest.method,
        seq_len=contest.seq_len,
        global_batch_tokens=tokens,
        precision=contest.precision,
        clip_grad_norm=contests.CLIP_NORM,
        **contest.adapters,
    )
    if not solution.plans:
        return None
    candidate = solution.plans[0].candidate
    return candidate.job, candidate.plan


def _expect(contest: Contest, record: dict[str, Any], gpu: str) -> dict[str, Any]:
    """Return the estimate's memory for a plan of tonnage, and the MFU of what was measured."""
    import tonnage
    from tonnage.catalog.devices import parse_cluster
    from tonnage.errors import TonnageError
    from tonnage.job import read_job
    from tonnage.planner.pricing import price_candidate
    from tonnage.planner.solution import Candidate
    from tonnage.plans import Plan

    own = record if "plan" in record else contests.make_spec(contest, "tonnage, the Trainer's settings", Path(), None)
    job, plan = read_job(own["job"]), Plan(**own["plan"])
    expected: dict[str, Any] = {}
    try:
        timing = price_candidate(Candidate(job=job, plan=plan), parse_cluster(gpu)).timing
        if timing is not None and record.get("step_seconds"):
            expected["mfu"] = timing.mfu * timing.step_seconds / record["step_seconds"]
        if "plan" in record and "error" not in record:
            names = {"model"}
            options = {name: value for name, value in {**vars(job), **vars(plan)}.items() if name not in names}
            peak = tonnage.estimate(contest.model, gpu=gpu, offline=True, advice=False, **_changed(options)).peak
            expected |= {
                "predicted_allocated_bytes": peak.allocated_bytes,
                "predicted_reserved_bytes": peak.reserved_bytes,
            }
    except TonnageError as error:
        expected["unpredicted"] = str(error)
    return expected


def _changed(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that differ from their defaults."""
    from tonnage.job import Job
    from tonnage.plans import Plan

    usual = {**vars(Job()), **vars(Plan())}
    return {name: value for name, value in options.items() if value != usual[name]}


def _variables(spec: dict[str, Any], source: str, gpu: str, work: Path) -> dict[str, str]:
    """Return the environment of a contestant's process."""
    from tonnage.catalog.devices import parse_cluster
    from tonnage.plans import Plan
    from tonnage.techniques import environment

    variables = {**os.environ, **(environment(Plan(**spec["plan"])) if "plan" in spec else {})}
    if source == "real":
        return variables
    from tonnage.ghost.environment import environment as ghost_environment

    settings: dict[str, Any] = {
        name.removeprefix("GHOST_").lower(): value
        for name, value in parse_cluster(gpu).device.ghost_settings().items()
    }
    watched = work / "watched"  # computed values are answered for, as in a dry-run; no step is the last
    watched.mkdir(parents=True, exist_ok=True)
    return ghost_environment(inherit=variables, watch_into=watched, steps=10**6, **settings)


def _run_one(spec_file: str, result: str, source: str) -> int:
    """Run one contestant in this process, and write its record."""
    spec = contests.read_spec(spec_file)
    record: dict[str, Any] = {}
    for part in contests.run(spec, source == "ghost"):
        record |= part
    import torch
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    record["versions"], record["card"] = versions, torch.cuda.get_device_name()
    Path(result).write_text(json.dumps(record), encoding="utf-8")
    return 0


def _summarise(record: dict[str, Any]) -> str:
    if "error" in record:
        return f"failed: {record['error']}"
    if "oom" in record:
        return f"out of memory after {record['steps']} steps"
    speed = record["tokens_per_second"]
    seconds = "" if speed is None else f"{speed:,.0f} tokens/s, "
    return f"{seconds}{record['reserved_bytes'] / 2**30:.2f} GiB reserved"


def report(records: list[dict[str, Any]]) -> str:
    """Return the records as Markdown: a table for each job, and what became of the aims."""
    lines: list[str] = []
    for name in dict.fromkeys(record["contest"]["name"] for record in records):
        of_job = [record for record in records if record["contest"]["name"] == name]
        lines += [f"## {name}", "", _HEAD, "|---|---:|---:|---:|---:|---:|---:|---:|"]
        lines += [_row(record, of_job) for record in of_job]
        lines += ["", *(f"- {aim}" for aim in _aims(of_job)), ""]
    return "\n".join(lines)


_HEAD: Final = (
    "| contestant | tokens/s | to the Trainer | MFU | loss at the end | allocated GiB | of predicted | reserved GiB |"
)


def _row(record: dict[str, Any], of_job: list[dict[str, Any]]) -> str:
    if "error" in record or "oom" in record:
        return f"| {record['contestant']} | {_summarise(record)} | | | | | | |"
    speed, default = record["tokens_per_second"], _speed(of_job, "trainer")
    predicted = record.get("predicted_allocated_bytes")
    cells = [
        record["contestant"],
        "" if speed is None else f"{speed:,.0f}",
        "" if not (speed and default) else f"{speed / default:.2f}",
        "" if record.get("mfu") is None else f"{record['mfu']:.1%}",
        f"{record['losses'][-1]:.4f}" if record["losses"] else "",
        f"{record['allocated_bytes'] / 2**30:.2f}",
        "" if not predicted else f"{record['allocated_bytes'] / predicted - 1:+.2%}",
        f"{record['reserved_bytes'] / 2**30:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def _speed(of_job: list[dict[str, Any]], contestant: str) -> float | None:
    return next((one.get("tokens_per_second") for one in of_job if one["contestant"] == contestant), None)


def _aims(of_job: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a sentence about each aim that the records of a job can judge."""
    default = _speed(of_job, "trainer")
    for contestant, aim in (("tonnage, the Trainer's settings", 1.0), ("tonnage planned", 1.3)):
        own = _speed(of_job, contestant)
        if own and default:
            yield f"{contestant}: {own / default:.2f} times the Trainer's defaults; the aim is {aim}"
    grid = [one["tokens_per_second"] for one in of_job if "tonnage: " in one["contestant"] and _ran(one)]
    planned = _speed(of_job, "tonnage planned")
    if planned and grid:
        yield f"tonnage planned: {planned / max(grid):.1%} of the grid's best; the aim is 97 %"
    both = [
        abs(one["allocated_bytes"] / one["predicted_allocated_bytes"] - 1)
        for one in of_job
        if one.get("predicted_allocated_bytes") and "oom" not in one
    ]
    if both:
        yield f"memory: at most {max(both):.2%} from the estimate; the aim is 1 %"


def _ran(record: dict[str, Any]) -> bool:
    return bool(record.get("tokens_per_second"))


if __name__ == "__main__":
    sys.exit(main())
