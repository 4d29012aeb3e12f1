"""Bytes alive on the CPU after load, forward, backward and step: of real runs, and predicted.

    python benchmarks/exactness.py [--cases N] [--seed N]

The product of the test networks, precisions, kinds of checkpointing, optimizers and methods of
tests/meta/test_recording.py has thousands of cases, each a real run of two steps on the CPU under torch's profiler
and the same recorded without computing.  Takes N of them in an order that the seed decides (default: all, hours), and
prints a line for each network: how many were equal to the byte at all seven moments.  Where the real run's loss
scaler (fp16) found infinities it made no step, and so no states; a prediction has them.
"""

import argparse
import gc
import importlib
import itertools
import random
import sys
import warnings
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # their tiny networks, and how bytes are counted
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "meta"))

import test_recording as tests
import torch
from asking import table

from live_bytes import measured, predicted
from networks import TINY, tiny_job
from tonnage.job import Job
from tonnage.options import replace_checked
from tonnage.plans import Plan
from tonnage.trace.gc_paused import gc_paused

Case = tuple[str, str, str, str, str]
"""Network, method, optimizer, checkpointing, precision."""

KINDS = ("equal", "step skipped", "other")
MADE_BEFORE_A_STEP = 3
"""Moments ahead of the first optimizer step: load, forward, backward."""


def cases(seed: int) -> list[Case]:
    """All of them, in an order of the seed; Muon wants more than adapters, which are all matrices."""
    values = tests.ARCHITECTURES, tests.METHODS, tests.OPTIMIZERS, tests.CHECKPOINTING, tests.PRECISIONS
    found = [one for one in itertools.product(*values) if one[1:3] != ("lora", "muon")]
    random.Random(seed).shuffle(found)
    return found


def difference(case: Case) -> list[int]:
    """Predicted minus real bytes at each moment."""
    name, method, optimizer, checkpointing, precision = case
    image = tiny_job(name).image_size if name in TINY else None
    job = Job(model=tests.model(name), seq_len=24, micro_batch=2, image_size=image).with_method(method)
    plan = replace_checked(Plan(checkpointing=checkpointing), {"precision": precision, "optimizer": optimizer})
    real, ours = measured(job, plan)[0], predicted(job, plan)[0]
    return [of_ours - of_real for (_, of_real), (_, of_ours) in zip(real, ours, strict=True)]


def kind(case: Case, more: list[int]) -> str:
    """One of KINDS; a real step that was skipped lacks its states, until one is made."""
    before, after = more[:MADE_BEFORE_A_STEP], more[MADE_BEFORE_A_STEP:]
    if not any(more):
        return "equal"
    lacking = not any(before) and after[0] > 0 and set(after) <= {0, after[0]}
    return "step skipped" if case[-1] == "fp16-mixed" and lacking else "other"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int)
    parser.add_argument("--seed", type=int, default=0)
    said = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if "lora" in tests.METHODS:
        importlib.import_module("peft")  # what it allocates when it is imported is no step's
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for case in cases(said.seed)[: said.cases]:
        with gc_paused():
            more = difference(case)
        gc.collect()  # else hundreds of networks stay
        found[case[0]][kind(case, more)] += 1
        if kind(case, more) == "other":
            print(" ".join(case), more, file=sys.stderr, flush=True)
    rows: list[tuple[Any, ...]] = [(name, *(counts[one] for one in KINDS)) for name, counts in sorted(found.items())]
    rows.append(("**all**", *(sum(counts[one] for counts in found.values()) for one in KINDS)))
    print(table(("network", *KINDS), [tuple(map(str, row)) for row in rows]), end="")


if __name__ == "__main__":
    main()
