"""How long `tonnage plan` takes to answer, and how much it runs for that.

    python benchmarks/search.py [QUESTION ...] [--kept]

Each question is asked as a user asks it, of workers that have yet to start, with an empty shelf of traces; `--kept`
leaves the shelf as it is.  "start" lasts until the first trace: workers import their libraries, the combinations are
priced meanwhile, and the first run is made.  What follows is counted from there: "found" when the plans stand, each
run whole, and "answer" when the best is explained as well (each technique taken back, the path to it), which idle
workers have begun before; "own" is the processor time of all of tonnage's processes until then, which hardly depends
on what else the machine does, but on how fast its processors are in that minute: "loop" is what ten million squares
take there in plain Python just before; "at work" is the part of that wait in which a worker runs something; "looks"
are candidates seen by one step of a few layers (two runs each), "whole" those that were run as they are shown, "in
vain" runs that were made ahead and that nobody asked for.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tonnage.catalog.devices import parse_cluster
from tonnage.cluster import Cluster
from tonnage.estimates import cache as shelf
from tonnage.estimates.estimate import Estimate
from tonnage.planner.solution import Candidate
from tonnage.search.depth import Need
from tonnage.search.memory import Failure, Ghosts
from tonnage.search.solve import EXPLAINING, search
from tonnage.search.space import Question, methods_named
from tonnage.search.words import describe
from tonnage.trainers.cases import request

QUESTIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "8B on 1": ("llama-3.1-8b", "h100-80gb", {"seq_len": 4096, "method": "lora"}),
    "8B on 8": ("llama-3.1-8b", "8xh100-80gb", {"seq_len": 8192}),
    "Mixtral on 16": ("mixtral-8x7b", "2x8xh100-80gb", {"seq_len": 4096, "global_batch_tokens": 2**20}),
    "70B on 32": ("llama-3.1-70b", "4x8xh100-80gb", {"seq_len": 8192, "global_batch_tokens": 2**22}),
    "70B on 64": ("llama-3.1-70b", "8x8xh100-80gb", {"seq_len": 8192, "global_batch_tokens": 2**22}),
    "70B on 64 of 40 GB": ("llama-3.1-70b", "8x8xa100-40gb", {"seq_len": 8192, "global_batch_tokens": 2**22}),
    "Mixtral on 64": ("mixtral-8x7b", "8x8xh100-80gb", {"seq_len": 4096, "global_batch_tokens": 2**22}),
    "Qwen3-30B-A3B on 64": ("qwen3-30b-a3b", "8x8xh100-80gb", {"seq_len": 8192, "global_batch_tokens": 2**22}),
    "8B on 64, 128k tokens": ("llama-3.1-8b", "8x8xh100-80gb", {"seq_len": 2**17, "global_batch_tokens": 2**23}),
    "7B on 24 GB, any method": ("qwen2.5-7b", "rtx-4090", {"method": "any"}),
    "70B on 8 of 40 GB, LoRA": ("llama-3.1-70b", "8xa100-40gb", {"seq_len": 8192, "method": "lora"}),
    "8B on 24 GB, LoRA": ("llama-3.1-8b", "rtx-4090", {"method": "lora"}),
    "8B on 24 GB, QLoRA": ("llama-3.1-8b", "rtx-3090", {"method": "qlora"}),
    "Gemma 27B on 2 of 24 GB": ("gemma-3-27b", "2xrtx-3090", {"method": "qlora"}),
    "T5 on 24 GB": ("t5-large", "rtx-3090", {}),
    "T5 on 8 of 16 GB": ("t5-large", "8xt4", {}),
    "Whisper on 24 GB": ("whisper-large-v3", "rtx-3090", {"seq_len": 448}),
    "Whisper on 8 of 24 GB": ("whisper-large-v3", "8xrtx-4090", {"seq_len": 448}),
}
"""Model, GPUs, and options of `tonnage plan`."""

COLUMNS = (
    *("question", "start s", "loop s", "found s", "answer s", "own s", "at work"),
    *("priced", "looks", "whole", "in vain", "best plan"),
)


class Counted(Ghosts):
    """Ghosts that count what they are asked."""

    def __init__(self) -> None:
        super().__init__(lambda text: None)
        self.looks = self.whole = self.begun = 0
        self.busy: list[tuple[float, float]] = []
        """When each run began and ended."""
        self.own_at_first: float | None = None
        """The processor time until the first trace."""

    def fit(
        self, candidates: Sequence[Candidate], cluster: Cluster, budget_bytes: int | None = None
    ) -> list[Estimate | Failure]:
        self.whole += len(candidates)
        return super().fit(candidates, cluster, budget_bytes)

    def need(self, candidates: Sequence[Candidate], cluster: Cluster) -> list[Need | Failure]:
        self.looks += len(candidates)
        return super().need(candidates, cluster)

    def _run(self, wanted: Any) -> Any:
        self.begun += 1
        began = time.perf_counter()
        try:
            return super()._run(wanted)
        finally:
            self.busy.append((began, time.perf_counter()))
            if self.own_at_first is None:
                self.own_at_first = own_seconds()

    @property
    def first_trace(self) -> float:
        """When the first run had ended."""
        return min(ended for _, ended in self.busy)

    def at_work(self, until: float) -> float:
        """Part of the time since then in which workers run something."""
        first = self.first_trace
        busy = sum(min(ended, until) - max(began, first) for began, ended in self.busy)
        return busy / (self.count * (until - first))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=f"of: {', '.join(QUESTIONS)}")
    parser.add_argument("--kept", action="store_true", help="leave the shelf of traces as it is")
    arguments = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |")
    print(f"|---|{'---:|' * (len(COLUMNS) - 2)}---|")
    for name in arguments.questions or QUESTIONS:
        print(row(name, kept=arguments.kept), flush=True)


def row(name: str, *, kept: bool) -> str:
    """A line of the table."""
    model, gpu, options = QUESTIONS[name]
    methods = methods_named(options.get("method", ""))
    job, plan = request(model, offline=True, **{**options, **({"method": methods[0]} if methods else {})})
    question = Question(job=job, plan=plan, cluster=parse_cluster(gpu), methods=methods)
    with ExitStack() as stack:
        if not kept:
            stack.enter_context(empty_shelf())
        ghosts = stack.enter_context(Counted())
        found: list[float] = []

        def hear(text: str) -> None:
            if text == EXPLAINING:
                found.append(time.perf_counter())

        loop, began = loop_seconds(), time.perf_counter()
        solution = search(question, ghosts, progress=hear)
        answered, own = time.perf_counter(), own_seconds()
        if ghosts.own_at_first is None:
            return f"| {name} | nothing was run: {'; '.join(str(one.why) for one in solution.refused)} |"
        first, at_work = ghosts.first_trace, ghosts.at_work(answered)
    assert solution.looked_at is not None
    best = describe(solution.plans[0].candidate) if solution.plans else solution.status
    seconds = ((found[0] if found else answered) - first, answered - first, own - ghosts.own_at_first)
    machine = (f"{first - began:.1f}", f"{loop:.2f}")
    counts = (f"{solution.looked_at['priced']:,}", ghosts.looks, ghosts.whole, ghosts.begun - ghosts.runs)
    cells = (name, *machine, *(f"{each:.1f}" for each in seconds), f"{at_work:.0%}", *counts, best)
    return f"| {' | '.join(map(str, cells))} |"


def loop_seconds() -> float:
    """Processor time of a loop that is the same everywhere."""
    began = time.process_time()
    sum(number * number for number in range(10**7))
    return time.process_time() - began


@contextmanager
def empty_shelf() -> Iterator[None]:
    """Traces are kept in a folder of their own, which is gone afterwards."""
    place = shelf.folder
    with tempfile.TemporaryDirectory() as folder:
        shelf.folder = lambda: Path(folder)  # type: ignore[assignment]
        try:
            yield
        finally:
            shelf.folder = place


def own_seconds() -> float:
    """Processor time of this process and of all that it started, so far."""
    me = psutil.Process()
    seconds = 0.0
    for one in (me, *me.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # it has ended since, and counts among its parent's children
            times = one.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


if __name__ == "__main__":
    main()
