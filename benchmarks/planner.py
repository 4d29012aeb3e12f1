"""How good is the first plan?  Jobs are planned, and every faster setting that `estimate` takes is run beside it.

    python -m benchmarks.planner [--engine NAME] [--jobs FIRST-LAST] [--runs N] [--json FILE]

The grid has the values of every option that leave the mathematics of training as they are, in every combination
that the engine takes.  All are priced by the time model.  Those that are faster than the first plan and whose lower
bound of memory fits are run on the ghost, until all that are faster than one that fits are known not to fit.
Combinations that use the host's memory, which `plan` only tries if nothing fits without, are judged apart.  `--json`
keeps each answer, and a second call goes on.

Compilation is no part of the grid: `plan` offers it, and takes it if it is stated.  Nor is FSDP2 on one card, which
shares nothing and computes in 16 bits what autocast keeps in 32: other mathematics, and often faster.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Iterable, Iterator
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
from tonnage.planner.pricing import Priced, price_all, price_candidate
from tonnage.planner.probe import Need
from tonnage.planner.question import Question
from tonnage.planner.solution import Candidate
from tonnage.planner.solve import search
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
    """The fastest of the grid that fits without the host's memory."""
    best_seconds: float = 0.0
    """A step of it; where the runs ended before one fitted, a bound: the fastest that was not run."""
    runs: int = 0
    whole: bool = True
    """False if the runs ended before the grid was decided: the share is then a lower bound."""
    best_offload: str = ""
    """The fastest of those that use the host's memory, if it is faster than `best`."""
    offload_seconds: float = 0.0
    """A step of it, or of `best`, or a bound as above."""
    offload_whole: bool = True

    @property
    def share(self) -> float:
        """Return the share of the best speed without the host's memory that the first plan has."""
        return self.best_seconds / self.seconds

    @property
    def offload_share(self) -> float:
        """Return the share of the best speed of the whole grid that the first plan has."""
        return self.offload_seconds / self.seconds


class _Patient(TrialRunner):
    """A search with it ends by itself, so that no plan depends on what else the machine does."""

    @property
    def is_late(self) -> bool:
        return False


def judge(engine: str, number: int, most_runs: int) -> Result:
    """Return the first plan of a job beside the best of its grid."""
    model, cards, given = JOBS[number]
    try:
        question = ask(model, parse_cluster(cards), {**given, "engine": engine}, offline=True)
    except TonnageError as error:
        return Result(engine, number, f"refused: {error}")
    with _Patient(lambda text: None) as runner:
        solution = search(question, runner)
        if not solution.plans:
            return Result(engine, number, solution.status)
        first = price_candidate(solution.plans[0].candidate, question.cluster)
        assert first.timing is not None
        grid = list(_list_grid(question, first.candidate.plan))
        faster = [one for one in price_all(grid, question.cluster) if _is_faster(one, first)]
        best, runs, whole = _find_best(question, _list_possible(question, faster), runner, most_runs)
        best = best or first
        moved = (offload for one in faster for offload in _list_offloads(question, one.candidate))
        rivals = [one for one in price_all(moved, question.cluster) if _is_faster(one, best)]
        offload, more, offload_whole = _find_best(question, _list_possible(question, rivals), runner, most_runs)
    offload = offload or best
    assert best.timing is not None
    assert offload.timing is not None
    return Result(
        engine,
        number,
        "found",
        plan=describe(first.candidate, whole=True),
        seconds=first.timing.step_seconds,
        best=describe(best.candidate, whole=True),
        best_seconds=best.timing.step_seconds,
        runs=runs + more,
        whole=whole,
        best_offload=describe(offload.candidate, whole=True) if offload is not best else "",
        offload_seconds=offload.timing.step_seconds,
        offload_whole=offload_whole,
    )


def _list_possible(question: Question, order: list[Priced]) -> Iterator[Priced]:
    """Yield those whose lower bound fits and that the engine takes."""
    engine, cluster = engine_of(question.plan), question.cluster
    for priced in order:
        case = Case(priced.candidate.job, priced.candidate.plan, cluster)
        if priced.bound_bytes <= question.budget_bytes and not engine.refusals(case):
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
    bare = replace_checked(first, dict.fromkeys(OFFLOADS, "none"))
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
            ends = () if rest else (_divide(jobs, base, each, size) for size in (1, each))
            if all(engine.refusals(Case(job, plan, cluster)) for job in ends):
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
    elif name == "shard" and question.cluster.gpus == 1:
        words = (default,)
    else:
        left_out = {*KEEPS_SCORES, "nvme", "every-N"}
        words = tuple(word for word in option.possible if "=" not in word and word not in left_out)
        words += INTERVALS if name == "checkpointing" else ()
    engine = engine_of(question.plan)
    return (word for word in words if engine.has_setting(name, word, default))


def _find_best(
    question: Question, order: Iterable[Priced], runner: TrialRunner, most_runs: int
) -> tuple[Priced | None, int, bool]:
    """Return the fastest of an order that fits, the number of runs, and whether all before it were decided.

    The next to run is the one of the faster half that is expected to need least: if it fits, the slower ones are out,
    else all that need at least as much.  Kinds of AdamW and of attention that keeps no scores count as equal in
    memory, though some may need less by a workspace.  Where the runs end, the fastest that is left is the bound.
    """
    left, best = list(order), None
    for runs in range(most_runs):
        if not left:
            return best, runs, True
        half = left[: (len(left) + 1) // 2]
        chosen = min(half, key=lambda priced: priced.bound_bytes + priced.extra_bytes)
        if _is_fitting(question, chosen.candidate, runner):
            left, best = left[: left.index(chosen)], chosen
        else:
            large = _with_one_kind(chosen)
            left = [one for one in left if one is not chosen and not needs_at_least(_with_one_kind(one), large)]
    return (left[0], most_runs, False) if left else (best, most_runs, True)


def _is_fitting(question: Question, candidate: Candidate, runner: TrialRunner) -> bool:
    """Return whether a candidate runs and fits, by a probe and then whole."""
    (need,) = runner.probe([candidate], question.cluster)
    if not isinstance(need, Need) or need.uncached_bytes > question.budget_bytes:
        return False
    (answer,) = runner.run_whole([candidate], question.cluster, question.budget_bytes)
    return isinstance(answer, Estimate) and fits(answer, question)


def _with_one_kind(priced: Priced) -> Candidate:
    """Return the candidate with one kind of AdamW and of attention."""
    plan = replace_checked(priced.candidate.plan, {"optimizer": "adamw-fused", "attention": "auto"})
    return replace(priced.candidate, plan=plan)


def table(results: list[Result]) -> Iterator[str]:
    """Yield the table of engines, in Markdown."""
    yield "| engine | plans | median | worst | worst job: first plan; best of the grid | offload: median | worst |"
    yield "|-|-:|-:|-:|-|-:|-:|"
    for engine in ENGINES:
        planned = [result for result in results if result.engine == engine and result.status == "found"]
        if not planned:
            continue
        worst = min(planned, key=lambda result: result.share)
        model, cards, given = JOBS[worst.job]
        job = f"{model}, {cards}, {given.get('method', 'full')}: {worst.plan}; {worst.best}"
        median = statistics.median(result.share for result in planned)
        moved = [result.offload_share for result in planned]
        cells = (engine, len(planned), f"{median:.3f}", f"{worst.share:.3f}", job, f"{statistics.median(moved):.3f}")
        yield f"| {' | '.join(map(str, cells))} | {min(moved):.3f} |"


def _list_words(result: Result) -> Iterator[str]:
    """Yield the words of a job's line."""
    model, cards, _ = JOBS[result.job]
    yield f"{result.engine} {model} {cards} {result.status}"
    if result.status == "found":
        yield result.plan
        yield f"{result.share:.3f}{'' if result.whole else ' at least'} of {result.best}"
        yield f"{result.offload_share:.3f}{'' if result.offload_whole else ' at least'} of {result.best_offload}"


def _read_numbers(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def main() -> None:
    """Judge the jobs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, help="only this engine")
    parser.add_argument("--jobs", type=_read_numbers, default=range(len(JOBS)), help="numbers of jobs: 7, or 7-12")
    parser.add_argument("--runs", type=int, default=40, help="combinations that are run for a job at most")
    parser.add_argument("--json", type=Path, help="keep the answers, a JSON line each, and ask only what it lacks")
    given = parser.parse_args()
    lines = given.json.read_text().splitlines() if given.json and given.json.exists() else []
    results = [Result(**json.loads(line)) for line in lines]
    known = {(result.engine, result.job) for result in results}
    for number, engine in itertools.product(given.jobs, [given.engine] if given.engine else ENGINES):
        if (engine, number) in known:
            continue
        result = judge(engine, number, given.runs)
        results.append(result)
        print(*_list_words(result), sep=" | ", flush=True)
        if given.json:
            with given.json.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
