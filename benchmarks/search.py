"""Measure how long `tonnage plan` takes to answer, and how much it runs for that.

    python -m benchmarks.search [QUESTION ...] [--kept]

Each question is asked as a user asks it: workers have yet to start, and the cache of traces is empty (`--kept` keeps
it).  Columns: "start" is the time until the first trial run has ended, in which workers import their libraries and
the combinations are priced; "found" and "answer" are counted from there, until the plans are found and until the best
one is explained; "CPU" is the processor time of all processes until then, which depends less on what else the machine
does; "loop" is the time of ten million squares in plain Python just before, which tells how fast the processor is at
that moment; "busy" is the part of the wait in which a worker runs something; "probes" are candidates probed by one
step of a few layers (two runs each), "whole" those that were run as they are shown.
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
from tonnage.estimates import cache
from tonnage.estimates.estimate import Estimate
from tonnage.planner.describe import describe
from tonnage.planner.probe import Need
from tonnage.planner.question import Question, parse_methods
from tonnage.planner.solution import Candidate
from tonnage.planner.solve import EXPLAINING, search
from tonnage.planner.trial_runner import Failure, TrialRunner
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
    *("question", "start s", "loop s", "found s", "answer s", "CPU s", "busy"),
    *("priced", "probes", "whole", "best plan"),
)


class CountingRunner(TrialRunner):
    """A TrialRunner that counts what it is asked, and when its workers are busy."""

    def __init__(self) -> None:
        super().__init__(lambda text: None)
        self.probes = self.whole = 0
        self.busy: list[tuple[float, float]] = []
        """When each run began and ended."""
        self.first_cpu_seconds: float | None = None
        """The processor time until the first run had ended."""

    def run_whole(
        self, candidates: Sequence[Candidate], cluster: Cluster, budget_bytes: int | None = None
    ) -> list[Estimate | Failure]:
        self.whole += len(candidates)
        return super().run_whole(candidates, cluster, budget_bytes)

    def probe(self, candidates: Sequence[Candidate], cluster: Cluster) -> list[Need | Failure]:
        self.probes += len(candidates)
        return super().probe(candidates, cluster)

    def _execute(self, run: Any) -> Any:
        began = time.perf_counter()
        try:
            return super()._execute(run)
        finally:
            self.busy.append((began, time.perf_counter()))
            if self.first_cpu_seconds is None:
                self.first_cpu_seconds = cpu_seconds()

    @property
    def first_end(self) -> float:
        """Return when the first run had ended."""
        return min(ended for _, ended in self.busy)

    def busy_part(self, until: float) -> float:
        """Return the part of the time since then in which workers run something."""
        first = self.first_end
        busy = sum(min(ended, until) - max(began, first) for began, ended in self.busy)
        return busy / (self.worker_count * (until - first))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=f"of: {', '.join(QUESTIONS)}")
    parser.add_argument("--kept", action="store_true", help="keep the cache of traces")
    arguments = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |")
    print(f"|---|{'---:|' * (len(COLUMNS) - 2)}---|")
    for name in arguments.questions or QUESTIONS:
        print(measure(name, kept=arguments.kept), flush=True)


def measure(name: str, *, kept: bool) -> str:
    """Return a line of the table."""
    model, gpu, options = QUESTIONS[name]
    methods = parse_methods(options.get("method", ""))
    job, plan = request(model, offline=True, **{**options, **({"method": methods[0]} if methods else {})})
    question = Question(job=job, plan=plan, cluster=parse_cluster(gpu), methods=methods)
    with ExitStack() as stack:
        if not kept:
            stack.enter_context(empty_cache())
        runner = stack.enter_context(CountingRunner())
        found: list[float] = []

        def record(text: str) -> None:
            if text == EXPLAINING:
                found.append(time.perf_counter())

        loop, began = loop_seconds(), time.perf_counter()
        solution = search(question, runner, progress=record)
        answered, cpu = time.perf_counter(), cpu_seconds()
        if runner.first_cpu_seconds is None:
            return f"| {name} | nothing was run: {'; '.join(str(one.why) for one in solution.refused)} |"
        first, busy = runner.first_end, runner.busy_part(answered)
    assert solution.looked_at is not None
    best = describe(solution.plans[0].candidate) if solution.plans else solution.status
    seconds = ((found[0] if found else answered) - first, answered - first, cpu - runner.first_cpu_seconds)
    machine = (f"{first - began:.1f}", f"{loop:.2f}")
    counts = (f"{solution.looked_at['priced']:,}", runner.probes, runner.whole)
    cells = (name, *machine, *(f"{each:.1f}" for each in seconds), f"{busy:.0%}", *counts, best)
    return f"| {' | '.join(map(str, cells))} |"


def loop_seconds() -> float:
    """Return the processor time of a loop that is the same everywhere."""
    began = time.process_time()
    sum(number * number for number in range(10**7))
    return time.process_time() - began


@contextmanager
def empty_cache() -> Iterator[None]:
    """Keep traces in a temporary folder."""
    folder = cache.folder
    with tempfile.TemporaryDirectory() as temporary:
        cache.folder = lambda: Path(temporary)  # type: ignore[assignment]
        try:
            yield
        finally:
            cache.folder = folder


def cpu_seconds() -> float:
    """Return the processor time of this process and of all that it started, so far."""
    me = psutil.Process()
    seconds = 0.0
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # it has ended since, and counts among its parent's children
            times = process.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


if __name__ == "__main__":
    main()
