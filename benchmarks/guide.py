"""What people say fits where, beside what does: the largest network of a family that each card can train.

    python benchmarks/guide.py [--seq-len 2048] [--card '24 GB' ...]

For each card and method the networks below in the order of their size; one fits if any plan does, with the global
batch of one sequence a GPU: first without the host's memory, then with it (optimizer and activations offloaded).
Every entry was run on the ghost.  Then the arithmetic of a global batch in tokens.
"""

import argparse
from dataclasses import replace

from tonnage.catalog import find_model
from tonnage.device import parse_cluster
from tonnage.errors import TonnageError
from tonnage.estimates import Estimate
from tonnage.job import Job
from tonnage.modelref import resolve
from tonnage.plans import Plan
from tonnage.search.best import fits
from tonnage.search.depth import Need
from tonnage.search.memory import Ghosts
from tonnage.search.nearest import smallest
from tonnage.search.space import OFFLOADS, Question
from tonnage.units import count, parse_bytes

NETWORKS = (
    "qwen2.5-0.5b",
    "llama-3.2-1b",
    "qwen2.5-1.5b",
    "llama-3.2-3b",
    "qwen2.5-7b",
    "llama-3.1-8b",
    "qwen2.5-14b",
    "qwen2.5-32b",
    "llama-3.1-70b",
)
"""Dense decoders, smallest first."""

SAID = {
    "8 GB": ("8GiB", "about 1B"),
    "16 GB": ("t4", "about 3B"),
    "24 GB": ("rtx-4090", "about 7B with LoRA"),
    "40 GB": ("a100-40gb", "about 13B"),
    "80 GB": ("a100-80gb", "about 7B full"),
    "8 x 80 GB": ("8xa100-80gb", "about 70B"),
}
"""Cards as people say, the one that was run, and what is said of them."""

METHODS = ("full", "lora", "qlora")


def question(name: str, gpu: str, method: str, seq_len: int, *, host: bool) -> Question:
    """Whether a network can be trained so; `host`: with its memory."""
    named_by_memory = gpu.endswith("GiB")
    cluster = parse_cluster(None, gpu_memory_bytes=parse_bytes(gpu)) if named_by_memory else parse_cluster(gpu)
    job = Job(model=resolve(name, offline=True), method=method, seq_len=seq_len)
    without = () if host else OFFLOADS
    return Question(job=job, plan=Plan(), cluster=cluster, without=without)


def possible(asked: Question, ghosts: Ghosts) -> bool:
    """Whether one of the plans that need least fits."""
    try:
        small = smallest(asked)
    except TonnageError:
        return False
    needs = zip(small, ghosts.need(small, asked.cluster), strict=True)
    hopeful = [one for one, need in needs if isinstance(need, Need) and need.least_bytes <= asked.budget_bytes]
    return any(isinstance(run, Estimate) and fits(run, asked) for run in ghosts.fit(hopeful, asked.cluster))


def largest(gpu: str, method: str, seq_len: int, ghosts: Ghosts, *, host: bool) -> str:
    """The largest network that fits, by halving, as what fits is smaller than what does not."""
    low, high = -1, len(NETWORKS)
    while high - low > 1:
        middle = (low + high) // 2
        if possible(question(NETWORKS[middle], gpu, method, seq_len, host=host), ghosts):
            low = middle
        else:
            high = middle
    if low < 0:
        return "none"
    known = find_model(NETWORKS[low])
    return f"{NETWORKS[low]} ({count(known.parameters)})" if known else NETWORKS[low]


def batch_rows() -> list[str]:
    """4M tokens, at 4,096 tokens of one micro-batch on each of 8 GPUs."""
    job = Job(model=resolve("llama-3.1-8b", offline=True), seq_len=4096)
    rows = []
    for tokens in (4_000_000, 4_096_000, 4 * 2**20):
        try:
            steps = f"{replace(job, global_batch_tokens=tokens).on_ranks(8).grad_accum} accumulation steps"
        except TonnageError as error:
            steps = str(error)
        rows.append(f"| {tokens:,} tokens | {steps} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--card", action="append", choices=list(SAID), help="only this row; some minutes each")
    options = parser.parse_args()
    print("| card | said | " + " | ".join(f"{name} | {name}, with the host" for name in METHODS) + " |")
    print("|---|---|" + "---|" * (2 * len(METHODS)), flush=True)
    with Ghosts(lambda text: None) as ghosts:
        for words in options.card or SAID:
            gpu, said = SAID[words]
            cells = [
                largest(gpu, method, options.seq_len, ghosts, host=host)
                for method in METHODS
                for host in (False, True)
            ]
            print(f"| {words} ({gpu}) | {said} | " + " | ".join(cells) + " |", flush=True)
    print("\n| global batch, 8 GPUs, 4,096 tokens each | |\n|---|---|")
    print("\n".join(batch_rows()))


if __name__ == "__main__":
    main()
