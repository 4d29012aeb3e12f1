"""What people say fits where and what to do about it, beside what does: the tables of docs/tutorial/guide.md.

    python benchmarks/guide.py largest [--card '24 GB' ...]     some minutes a card
    python benchmarks/guide.py said | advice | batch

`largest`: for each card and kind of training the largest of the networks below of which any plan fits, with one
sequence a GPU; "with the host" is with its memory, of which it says how much a machine's processes need.  `said`:
what the network of the saying needs at least.  `advice`: the usual five steps, one after the other, then what they
leave out.  `batch`: the arithmetic of a global batch.  All bytes are the ghost's.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace

from tonnage.case import Case
from tonnage.catalog.configurations import resolve
from tonnage.catalog.devices import find_device, parse_cluster
from tonnage.catalog.models import find_model
from tonnage.cluster import Cluster
from tonnage.errors import TonnageError
from tonnage.estimates.estimate import Estimate
from tonnage.estimates.step_time import price
from tonnage.job import Job
from tonnage.planner.fit import fits, host_bytes
from tonnage.planner.nearest import list_smallest
from tonnage.planner.probe import Need
from tonnage.planner.question import Question
from tonnage.planner.search_space import OFFLOADS
from tonnage.planner.solution import Candidate
from tonnage.planner.trial_runner import TrialRunner
from tonnage.plans import Plan
from tonnage.shallow.depths import roomy
from tonnage.units import GIB, count, format_gib, parse_bytes

NETWORKS = (
    "qwen2.5-0.5b",
    "llama-3.2-1b",
    "qwen2.5-1.5b",
    "llama-3.2-3b",
    "qwen2.5-7b",
    "llama-3.1-8b",
    "llama-2-13b",
    "qwen2.5-14b",
    "qwen2.5-32b",
    "llama-3.1-70b",
)
"""Dense decoders, smallest first."""

SAID = {
    "8 GB": ("8GiB", "about 1B", "llama-3.2-1b"),
    "16 GB": ("t4", "about 3B", "llama-3.2-3b"),
    "24 GB": ("rtx-4090", "about 7B with LoRA", "qwen2.5-7b"),
    "40 GB": ("a100-40gb", "about 13B", "llama-2-13b"),
    "80 GB": ("a100-80gb", "about 7B full", "qwen2.5-7b"),
    "8 x 80 GB": ("8xa100-80gb", "about 70B", "llama-3.1-70b"),
}
"""Cards as people say; the one that was run, what is said of it, and a network of that size."""

ON_HOST = "full, with the host"

KINDS = {
    "full": ("full", Plan(), OFFLOADS),
    ON_HOST: ("full", Plan(), ()),
    "full, pure bf16": ("full", Plan(precision="bf16-true"), OFFLOADS),
    "LoRA": ("lora", Plan(), OFFLOADS),
    "QLoRA": ("qlora", Plan(), OFFLOADS),
}
"""Kinds of training: a method, what is said of the plan, and what is left out."""

LADDER = ("qwen2.5-0.5b", "rtx-4090", 8)
"""The network of the advice, its card, and the sequences of a step."""


HOST_BYTES = 512 * GIB
"""The memory of the host that is allowed for each GPU."""


def question(name: str, gpu: str, kind: str, seq_len: int) -> Question:
    """Whether a network can be trained so."""
    named_by_memory = gpu.endswith("GiB")
    cluster = parse_cluster(None, gpu_memory_bytes=parse_bytes(gpu)) if named_by_memory else parse_cluster(gpu)
    cluster = replace(cluster, device=replace(cluster.device, host_bytes=HOST_BYTES))
    method, plan, without = KINDS[kind]
    job = Job(model=resolve(name, offline=True), seq_len=seq_len).with_method(method)
    return Question(job=job, plan=plan, cluster=cluster, without=without)


def needs(asked: Question, runner: TrialRunner) -> list[tuple[Candidate, Need]]:
    """The plans that need least, with what they need, least first; none where no plan can be run."""
    try:
        small = list_smallest(asked)
    except TonnageError:
        return []
    answers = zip(small, runner.probe(small, asked.cluster), strict=True)
    known = [(one, need) for one, need in answers if isinstance(need, Need)]
    return sorted(known, key=lambda pair: pair[1].process_bytes)


def whole(candidates: list[Candidate], cluster: Cluster, runner: TrialRunner) -> list[int | None]:
    """The peak of each, run whole on a card where everything fits; None where it cannot be run."""
    runs = runner.run_whole(candidates, roomy(cluster))
    return [run.peak.process_bytes if isinstance(run, Estimate) else None for run in runs]


def possible(asked: Question, runner: TrialRunner) -> Estimate | None:
    """One of the plans that need least that fits, run whole; of several the one with the least of the host."""
    hopeful = [one for one, need in needs(asked, runner) if need.uncached_bytes <= asked.budget_bytes]
    runs = [run for run in runner.run_whole(hopeful, asked.cluster) if isinstance(run, Estimate) and fits(run, asked)]
    return min(runs, key=host_bytes, default=None)


def largest(gpu: str, kind: str, seq_len: int, runner: TrialRunner) -> str:
    """The largest network that fits, by halving, as what fits is smaller than what does not."""
    if not _has(gpu, kind):
        return "-"
    low, high, found = -1, len(NETWORKS), None
    while high - low > 1:
        middle = (low + high) // 2
        run = possible(question(NETWORKS[middle], gpu, kind, seq_len), runner)
        if run:
            low, found = middle, run
        else:
            high = middle
    if found is None:
        return "none"
    beside = f"; host {host_bytes(found) / GIB:.0f} GiB" if kind == ON_HOST else ""
    known = find_model(NETWORKS[low])
    return f"{NETWORKS[low]} ({count(known.parameters)}{beside})" if known else NETWORKS[low]


def _has(gpu: str, kind: str) -> bool:
    """Whether the card computes in that dtype."""
    return gpu.endswith("GiB") or "bf16" not in kind or parse_cluster(gpu).device.capability >= (8, 0)


def largest_rows(cards: list[str], seq_len: int, runner: TrialRunner) -> Iterator[str]:
    yield "| card | said | " + " | ".join(KINDS) + " |"
    yield "|---|---|" + "---|" * len(KINDS)
    for words in cards:
        gpu, said, _ = SAID[words]
        cells = [largest(gpu, kind, seq_len, runner) for kind in KINDS]
        yield f"| {words} ({gpu}) | {said} | " + " | ".join(cells) + " |"


def said_rows(cards: list[str], seq_len: int, runner: TrialRunner) -> Iterator[str]:
    """What the networks of the sayings need at least, by plans that keep as little as they can."""
    yield "| card | may use | network of the saying | " + " | ".join(KINDS) + " |"
    yield "|---|---:|---|" + "---:|" * len(KINDS)
    for words in cards:
        gpu, _, name = SAID[words]
        cells = []
        for kind in KINDS:
            asked = question(name, gpu, kind, seq_len)
            found = needs(asked, runner) if _has(gpu, kind) else []
            [peak] = whole([found[0][0]], asked.cluster, runner) if found else [None]
            cells.append("-" if peak is None else format_gib(peak))
        budget = question(name, gpu, "full", seq_len).budget_bytes
        yield f"| {words} ({gpu}) | {format_gib(budget)} | {name} | " + " | ".join(cells) + " |"


def advice_rows(seq_len: int, runner: TrialRunner) -> Iterator[str]:
    """The usual steps, then the others, each with all those before it."""
    name, gpu, sequences = LADDER
    cluster = parse_cluster(gpu)
    job = Job(model=resolve(name, offline=True), seq_len=seq_len, micro_batch=sequences)
    one = replace(job, micro_batch=1, grad_accum=sequences)
    bf16 = Plan(checkpointing="full")
    usual = [
        ("a plain loop in fp32", job, Plan(precision="fp32")),
        ("reduce the batch, accumulate", one, Plan(precision="fp32")),
        ("mixed precision", one, Plan()),
        ("checkpoint", one, bf16),
        ("offload the optimizer", one, replace(bf16, optimizer_offload="cpu")),
    ]
    free = Plan(loss="chunked", allocator="expandable", optimizer="adamw-fused")
    others = [
        ("a plain loop in fp32", job, Plan(precision="fp32")),
        ("mixed precision", job, Plan()),
        ("the loss in slices", job, Plan(loss="chunked")),
        ("expandable segments, fused AdamW", job, free),
        ("half the batch, accumulate", replace(job, micro_batch=sequences // 2, grad_accum=2), free),
        ("checkpoint op by op, whole batch", job, replace(free, checkpointing="selective")),
    ]
    for title, rungs in (("the usual advice", usual), ("what costs nothing first", others)):
        yield f"| {title} | peak | less by | a step |"
        yield "|---|---:|---:|---:|"
        before = None
        peaks = whole([Candidate(job=at, plan=plan) for _, at, plan in rungs], cluster, runner)
        for (words, at, plan), peak in zip(rungs, peaks, strict=True):
            less = "" if before is None or peak is None else f"{(before - peak) / GIB:.2f} GiB"
            seconds = f"{price(Case(at, plan, cluster)).step_seconds:.2f} s"
            yield f"| {words} | {'-' if peak is None else format_gib(peak)} | {less} | {seconds} |"
            before = peak
        yield ""
    yield f"{name} on {gpu} ({format_gib(find_device(gpu).capacity_bytes)}), {sequences} x {seq_len:,} tokens a step."


def batch_rows() -> Iterator[str]:
    """4M tokens, at 4,096 tokens of one micro-batch on each of 8 GPUs."""
    yield "| global batch | on 8 GPUs, one sequence of 4,096 tokens each |"
    yield "|---|---|"
    job = Job(model=resolve("llama-3.1-8b", offline=True), seq_len=4096)
    for tokens in (4_000_000, 4_096_000, 4 * 2**20):
        try:
            steps = f"{replace(job, global_batch_tokens=tokens).on_ranks(8).grad_accum} accumulation steps"
        except TonnageError as error:
            steps = str(error)
        yield f"| {tokens:,} tokens | {steps} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("largest", "said", "advice", "batch"))
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--card", action="append", choices=list(SAID), help="only this row")
    options = parser.parse_args()
    cards = options.card or list(SAID)
    with TrialRunner(lambda text: None) as runner:
        rows = {
            "largest": lambda: largest_rows(cards, options.seq_len, runner),
            "said": lambda: said_rows(cards, options.seq_len, runner),
            "advice": lambda: advice_rows(options.seq_len, runner),
            "batch": batch_rows,
        }[options.table]
        for line in rows():
            print(line, flush=True)


if __name__ == "__main__":
    main()
