"""How good is the first plan?  Jobs are planned, and every faster setting that `estimate` takes is run beside it.

    python -m benchmarks.planner [--engine NAME] [--jobs N] [--runs N] [--json FILE]

The grid has the values of every option that leave the mathematics of training as they are, in every combination
that the engine takes.  All are priced by the time model.  Those that are faster than the first plan and whose lower
bound of memory fits are run on the ghost, fastest first, until one fits: that is the best of the grid.  What needs
at least as much as a combination that did not fit is not run.  `--json` keeps each answer, and a second call goes on.

Compilation is no part of the grid: `plan` offers it, and takes it if it is stated.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.errors import TonnageError
from tonnage.estimates.estimate import Estimate
from tonnage.job import Job
from tonnage.mesh import divisors, make_mesh
from tonnage.options import options, replace_checked
from tonnage.planner.ask import ask
from tonnage.planner.describe import describe
from tonnage.planner.dominance import needs_at_least
from tonnage.planner.fit import fits
from tonnage.planner.pricing import Priced, bound_candidate, price_all, price_candidate, price_in_order
from tonnage.planner.probe import Need
from tonnage.planner.question import Question
from tonnage.planner.solution import Candidate
from tonnage.planner.solve import solve
from tonnage.planner.trial_runner import TrialRunner
from tonnage.plans import Plan
from tonnage.trainers import engine_of

ENGINES: Final = ("tonnage", "hf-trainer", "deepspeed", "accelerate", "trl", "torchtitan")

JOBS: Final = (
    ("smollm2-135m", "t4", {"seq_len": 1024, "global_batch_tokens": 32768}),
    ("smollm2-135m", "rtx-4090", {"seq_len": 2048, "global_batch_tokens": 65536}),
    ("smollm2-135m", "2xa100-40gb", {"seq_len": 2048, "global_batch_tokens": 65536}),
    ("smollm2-135m", "t4", {"seq_len": 1024, "global_batch_tokens": 16384, "method": "lora"}),
    ("qwen3-0.6b", "l4", {"seq_len": 1024, "global_batch_tokens": 16384}),
    ("qwen3-0.6b", "rtx-4090", {"seq_len": 2048, "global_batch_tokens": 32768}),
    ("qwen3-0.6b", "2xrtx-4090", {"seq_len": 2048, "global_batch_tokens": 32768}),
    ("qwen3-0.6b", "l4", {"seq_len": 4096, "global_batch_tokens": 32768, "method": "lora"}),
    ("llama-3.2-1b", "rtx-4090", {"seq_len": 4096, "global_batch_tokens": 32768}),
    ("llama-3.2-1b", "l4", {"seq_len": 2048, "global_batch_tokens": 32768, "method": "lora"}),
    ("llama-3.2-1b", "a100-40gb", {"seq_len": 2048, "global_batch_tokens": 32768}),
    ("llama-3.2-1b", "2xl4", {"seq_len": 2048, "global_batch_tokens": 32768}),
    ("llama-3.2-1b", "4xrtx-4090", {"seq_len": 2048, "global_batch_tokens": 65536}),
    ("llama-3.2-1b", "8xl4", {"seq_len": 4096, "global_batch_tokens": 131072}),
    ("llama-3.2-1b", "rtx-4090", {"seq_len": 1024, "global_batch_tokens": 16384, "method": "qlora"}),
    ("gpt2", "rtx-3090", {"seq_len": 1024, "global_batch_tokens": 32768}),
    ("qwen3-1.7b", "a100-80gb", {"seq_len": 4096, "global_batch_tokens": 65536}),
    ("qwen3-1.7b", "4xa100-40gb", {"seq_len": 2048, "global_batch_tokens": 65536}),
    ("llama-3.2-3b", "4xa100-40gb", {"seq_len": 2048, "global_batch_tokens": 65536}),
    ("llama-3.1-8b", "8xh100-80gb", {"seq_len": 4096, "global_batch_tokens": 131072}),
)
"""Model, cards and options of each job."""

SAME_MATHEMATICS: Final = ("adamw", "adamw-fused")
"""Kinds of one optimizer."""

SEARCHED: Final = ("shard", "checkpointing", "loss", "accum_sync", "optimizer_in_backward", "attention", "optimizer")
"""Options of the grid that keep everything on the card, beside the degrees and the micro-batch."""

OFFLOADS: Final = ("activation_offload", "optimizer_offload", "param_offload")
"""Options that are slower than the same combination without them: tried where that is faster than the first plan."""

KEEPS_SCORES: Final = ("eager", "math")
"""Attention that is slower than the others and needs more; files (`nvme`) are slower than the host's memory."""

INTERVALS: Final = ("every-2", "every-3", "every-4")
"""What stands for `every-N`."""

MARGIN: Final = 0.001
"""A setting that is faster by less is no better."""


@dataclass(frozen=True)
class Result:
    """The first plan of a job beside the best of its grid."""

    engine: str
    job: int
    """Number of the job."""
    status: str
    plan: str = ""
    seconds: float = 0.0
    """A step of the first plan."""
    best: str = ""
    """The fastest of the grid that fits."""
    best_seconds: float = 0.0
    """A step of it; where the runs ended before one fitted, a bound: the fastest that was not run."""
    runs: int = 0
    whole: bool = True
    """False if the runs ended before the grid was decided: the share is then a lower bound."""

    @property
    def share(self) -> float:
        """Return the share of the best speed that the first plan has."""
        return self.best_seconds / self.seconds


def judge(engine: str, number: int, most_runs: int) -> Result:
    """Return the first plan of a job beside the best of its grid."""
    model, cards, given = JOBS[number]
    try:
        question = ask(model, parse_cluster(cards), {**given, "engine": engine}, offline=True)
    except TonnageError as error:
        return Result(engine, number, f"refused: {error}")
    solution = solve(question, top=4)
    if not solution.plans:
        return Result(engine, number, solution.status)
    first = price_candidate(solution.plans[0].candidate, question.cluster)
    assert first.timing is not None
    faster = list(_list_faster(question, first))
    with TrialRunner(lambda text: None) as runner:
        best, runs, whole = _find_best(question, faster, runner, most_runs)
    best = best or first
    assert best.timing is not None
    return Result(
        engine,
        number,
        "found",
        plan=describe(first.candidate),
        seconds=first.timing.step_seconds,
        best=describe(best.candidate),
        best_seconds=best.timing.step_seconds,
        runs=runs,
        whole=whole,
    )


def _list_faster(question: Question, first: Priced) -> Iterator[Priced]:
    """Yield what the engine takes and that is faster than the first plan, fastest first, if its bound fits."""
    engine, cluster = engine_of(question.plan), question.cluster
    grid = list(_list_grid(question, first.candidate.plan))
    without = [one for one in price_all(grid, cluster) if _is_faster(one, first)]
    moved = (candidate for one in without for candidate in _list_offloads(question, one.candidate))
    bounded = (bound_candidate(one, cluster) for one in (*(one.candidate for one in without), *moved))
    possible = [one for one in bounded if one.bound_bytes <= question.budget_bytes]
    for priced in price_in_order(possible, cluster):
        if not _is_faster(priced, first):
            return
        if not engine.refusals(Case(priced.candidate.job, priced.candidate.plan, cluster)):
            yield priced


def _is_faster(priced: Priced, first: Priced) -> bool:
    return priced.seconds_per_token < first.seconds_per_token * (1 - MARGIN)


def _list_offloads(question: Question, candidate: Candidate) -> Iterator[Candidate]:
    """Yield a candidate with every combination of offloads but none."""
    values = [list(_list_values(question, name)) for name in OFFLOADS]
    for chosen in itertools.product(*values):
        if set(chosen) != {"none"}:
            plan = replace_checked(candidate.plan, dict(zip(OFFLOADS, chosen, strict=True)))
            yield replace(candidate, plan=plan)


def _list_grid(question: Question, first: Plan) -> Iterator[Candidate]:
    """Yield every combination of values; `first` has the options that are not in the grid."""
    values = {name: list(_list_values(question, name)) for name in SEARCHED}
    bare = replace(first, **dict.fromkeys(OFFLOADS, "none"))
    base = replace(question.job, global_batch_tokens=None)
    jobs: dict[tuple[int, int], Job] = {}
    engine, cluster = engine_of(first), question.cluster
    degrees = divisors(question.cluster.gpus)
    for tp, pp, cp in itertools.product(degrees, degrees, degrees):
        for chosen in itertools.product(*values.values()):
            try:
                changes = {"tp": tp, "pp": pp, "cp": cp, **dict(zip(values, chosen, strict=True))}
                plan = replace_checked(bare, changes)
                mesh = make_mesh(plan, cluster.gpus, cluster.gpus_per_node)
            except TonnageError:
                continue
            each, rest = divmod(question.sequences, mesh.data_parallel)
            if rest or all(
                engine.refusals(Case(_divide(jobs, base, each, size), plan, cluster)) for size in (1, each)
            ):
                continue
            for micro_batch in divisors(each):
                yield Candidate(job=_divide(jobs, base, each, micro_batch), plan=plan)


def _divide(jobs: dict[tuple[int, int], Job], base: Job, each: int, micro_batch: int) -> Job:
    """Return the job with each rank's sequences in micro-batches; few differ, and making one checks it."""
    size = micro_batch, each // micro_batch
    return jobs.setdefault(size, replace(base, micro_batch=size[0], grad_accum=size[1]))


def _list_values(question: Question, name: str) -> Iterator[Any]:
    """Yield the values of an option that the engine has a setting for."""
    option = next(option for item, option in options(Plan) if item.name == name)
    default = getattr(Plan, name)
    words: tuple[Any, ...]
    if name == "optimizer":
        words = SAME_MATHEMATICS
    elif option.kind == "switch":
        words = (False, True)
    else:
        left_out = {*KEEPS_SCORES, "nvme", "every-N"}
        words = tuple(word for word in option.possible if "=" not in word and word not in left_out)
        words += INTERVALS if name == "checkpointing" else ()
    engine = engine_of(question.plan)
    return (word for word in words if engine.has_setting(name, word, default))


def _find_best(
    question: Question, faster: list[Priced], runner: TrialRunner, most_runs: int
) -> tuple[Priced | None, int, bool]:
    """Return the fastest that fits, the number of runs, and whether all before it were decided."""
    too_large: list[Candidate] = []
    runs = 0
    for priced in faster:
        if any(needs_at_least(priced.candidate, large) for large in too_large):
            continue
        if runs == most_runs:
            return priced, runs, False
        runs += 1
        (need,) = runner.probe([priced.candidate], question.cluster)
        if not isinstance(need, Need):
            continue
        if need.uncached_bytes <= question.budget_bytes:
            (answer,) = runner.run_whole([priced.candidate], question.cluster, question.budget_bytes)
            if isinstance(answer, Estimate) and fits(answer, question):
                return priced, runs, True
        too_large.append(priced.candidate)
    return None, runs, True


def table(results: list[Result]) -> Iterator[str]:
    """Yield the table of engines, in Markdown."""
    yield "| engine | jobs with a plan | median | worst | worst job: first plan, best of the grid |"
    yield "|-|-:|-:|-:|-|"
    for engine in ENGINES:
        planned = [result for result in results if result.engine == engine and result.status == "found"]
        if not planned:
            continue
        worst = min(planned, key=lambda result: result.share)
        model, cards, given = JOBS[worst.job]
        job = f"{model}, {cards}, {given.get('method', 'full')}: {worst.plan}; {worst.best}"
        median = statistics.median(result.share for result in planned)
        yield f"| {engine} | {len(planned)} | {median:.3f} | {worst.share:.3f} | {job} |"


def main() -> None:
    """Judge the jobs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, help="only this engine")
    parser.add_argument("--jobs", type=int, default=len(JOBS), help="only the first N jobs")
    parser.add_argument("--runs", type=int, default=40, help="combinations that are run for a job at most")
    parser.add_argument("--json", type=Path, help="keep the answers, a JSON line each, and ask only what it lacks")
    given = parser.parse_args()
    lines = given.json.read_text().splitlines() if given.json and given.json.exists() else []
    results = [Result(**json.loads(line)) for line in lines]
    known = {(result.engine, result.job) for result in results}
    for engine, number in itertools.product([given.engine] if given.engine else ENGINES, range(given.jobs)):
        if (engine, number) in known:
            continue
        result = judge(engine, number, given.runs)
        results.append(result)
        shown = f"{result.share:.3f}{'' if result.whole else ' at least'}" if result.status == "found" else ""
        print(f"{engine} {JOBS[number][:2]} {result.status} {shown} {result.plan} | {result.best}", flush=True)
        if given.json:
            with given.json.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
