"""Does advice hold?  Jobs that do not fit are asked, and every change that is proposed is run again by itself.

    python -m benchmarks.advice [--only NAME] [--json FILE]

Prints for each job the seconds until the verdict and until the table, and for each proposed change whether it fits
and needs the bytes that were said.  The last line counts them.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tonnage.advice.advise import Asked, answers
from tonnage.advice.changes import Change, apply
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.estimates import predict
from tonnage.estimates.estimate import Advice, Estimate
from tonnage.trainers import cases
from tonnage.workers.worker import Worker


@dataclass(frozen=True)
class Failure:
    """A job that does not fit."""

    kind: str
    """What holds the bytes."""
    model: str
    gpu: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return a name for `--only`."""
        words = " ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.kind}: {self.model} {self.gpu} {words}"


FAILURES: Final = (
    Failure("logits", "smollm2-135m", "t4", {"seq_len": 2048, "micro_batch": 8, "precision": "fp16-mixed"}),
    Failure("logits", "llama-3.2-1b", "l4", {"seq_len": 8192, "method": "lora", "micro_batch": 2}),
    Failure("logits", "llama-3.2-1b", "a100-40gb", {"seq_len": 8192, "micro_batch": 4}),
    Failure("logits", "qwen3-0.6b", "rtx-4090", {"seq_len": 4096, "micro_batch": 4}),
    Failure("logits", "llama-3.1-8b", "a100-80gb", {"seq_len": 65536, "method": "lora", "checkpointing": "full"}),
    Failure("logits", "llama-3.2-1b", "rtx-4090", {"seq_len": 8192, "engine": "hf-trainer", "method": "lora"}),
    Failure("activations", "llama-3.2-1b", "rtx-4090", {"seq_len": 4096, "micro_batch": 8}),
    Failure("activations", "llama-3.1-8b", "a100-80gb", {"seq_len": 8192, "method": "lora", "micro_batch": 4}),
    Failure("activations", "smollm2-135m", "rtx-4090", {"seq_len": 2048, "micro_batch": 32}),
    Failure("activations", "gpt2", "t4", {"seq_len": 1024, "micro_batch": 16, "precision": "fp16-mixed"}),
    Failure("activations", "llama-3.1-8b", "4xh100-80gb", {"seq_len": 16384, "shard": "zero3"}),
    Failure("activations", "llama-3.1-70b", "32xh100-80gb", {"seq_len": 8192, "shard": "zero3"}),
    Failure("activations", "mistral-7b", "h100-80gb", {"seq_len": 8192, "method": "lora", "micro_batch": 4}),
    Failure("activations", "llama-3.2-1b", "l4", {"seq_len": 2048, "micro_batch": 8, "engine": "hf-trainer"}),
    Failure("activations", "bert-base-uncased", "t4", {"seq_len": 512, "micro_batch": 128, "precision": "fp32"}),
    Failure("states", "llama-3-8b", "rtx-4090", {"seq_len": 2048}),
    Failure("states", "llama-3-8b", "a100-80gb", {"seq_len": 2048}),
    Failure("states", "llama-3-8b", "h200", {"seq_len": 2048}),
    Failure("states", "llama-3.2-3b", "a100-40gb", {"seq_len": 2048}),
    Failure("states", "llama-3.2-1b", "t4", {"seq_len": 1024, "precision": "fp16-mixed"}),
    Failure("states", "llama-3-8b", "8xa100-40gb", {"seq_len": 4096, "shard": "ddp"}),
    Failure("states", "llama-3-8b", "8xa100-40gb", {"seq_len": 4096, "shard": "zero1"}),
    Failure("states", "llama-3-8b", "4xa100-80gb", {"seq_len": 4096, "shard": "zero2", "grad_accum": 4}),
    Failure("states", "llama-3.1-70b", "8xh100-80gb", {"seq_len": 4096, "shard": "zero3"}),
    Failure("states", "mistral-7b", "2xl40s", {"seq_len": 2048, "shard": "zero3"}),
    Failure("states", "qwen3-4b", "rtx-4090", {"seq_len": 1024, "optimizer": "adamw-fused"}),
    Failure("states", "llama-3-8b", "8xa100-40gb", {"seq_len": 2048, "shard": "ddp", "engine": "accelerate"}),
    Failure("states", "llama-3-8b", "2xa100-80gb", {"seq_len": 2048, "shard": "zero2", "engine": "deepspeed"}),
    Failure("states", "llama-3.2-3b", "a100-40gb", {"seq_len": 1024, "engine": "hf-trainer"}),
    Failure("weights", "llama-3.1-70b", "a100-80gb", {"seq_len": 2048, "method": "lora"}),
    Failure("weights", "llama-3-8b", "t4", {"seq_len": 1024, "method": "lora", "precision": "fp16-true"}),
    Failure("weights", "llama-3.1-70b", "8xa100-40gb", {"seq_len": 2048, "method": "lora", "shard": "ddp"}),
    Failure("weights", "mixtral-8x7b", "h100-80gb", {"seq_len": 2048, "method": "lora"}),
    Failure("weights", "llama-3.1-70b", "2xh200", {"seq_len": 2048, "method": "lora"}),
    Failure("weights", "qwen3-32b", "l40s", {"seq_len": 1024, "method": "lora", "checkpointing": "full"}),
    Failure("temporaries", "llama-3.2-1b", "rtx-4090", {"seq_len": 512, "optimizer": "adamw-foreach"}),
    Failure("temporaries", "qwen3-1.7b", "rtx-4090", {"seq_len": 512, "optimizer": "adamw"}),
    Failure("scores", "llama-3.2-1b", "a100-40gb", {"seq_len": 8192, "attention": "eager"}),
    Failure("fragmentation", "llama-3.2-1b", "l4", {"seq_len": 1536, "checkpointing": "full", "loss": "chunked"}),
    Failure(
        "long rows", "llama-3.1-8b", "8xh100-80gb", {"seq_len": 131072, "shard": "zero3", "checkpointing": "full"}
    ),
    Failure("long rows", "llama-3.2-1b", "h100-80gb", {"seq_len": 65536, "checkpointing": "full"}),
    Failure("experts", "mixtral-8x7b", "8xh100-80gb", {"seq_len": 4096, "shard": "zero3"}),
    Failure("64 cards", "llama-3.1-70b", "8x8xa100-40gb", {"seq_len": 4096, "shard": "zero3", "micro_batch": 2}),
)


@dataclass(frozen=True)
class Result:
    """One job with its advice, each change of it asked again."""

    failure: Failure
    estimate: Estimate
    verdict_seconds: float
    advice_seconds: float
    held: tuple[bool, ...]
    """For each change that was said to fit: whether it fits by itself, gains, and needs the bytes that were said."""


def ask(failure: Failure) -> Result:
    """Return the advice for a job, checked."""
    case = cases.make_case(failure.model, parse_cluster(failure.gpu), failure.options, offline=True)
    began = time.monotonic()
    runs = answers(Asked(model=failure.model, case=case, options=failure.options), fresh=True)
    run = next(runs)
    verdict = time.monotonic()
    run = next(runs, run)
    ended = time.monotonic()
    runs.close()
    fitting = [advice for advice in run.estimate.advice if advice.fits]
    with Worker(wait=False) as worker:
        held = tuple(_holds(case, advice, worker) for advice in fitting)
    return Result(failure, run.estimate, verdict - began, ended - verdict, held)


def _holds(case: Case, advice: Advice, worker: Worker) -> bool:
    options = {name: value for name, value in advice.change.items() if name != "gpu"}
    cluster = parse_cluster(advice.change["gpu"]) if "gpu" in advice.change else None
    changed = apply(Change(options=options, cluster=cluster), case)
    if changed is None:
        return False
    again = predict.answer(changed, worker=worker, fresh=True).estimate
    gains = cluster is not None or advice.gain_bytes > 0
    return again.fits and gains and again.peak.process_bytes == advice.peak_bytes


def lines(result: Result) -> Iterator[str]:
    """Yield the lines of a job."""
    estimate = result.estimate
    if not estimate.wants_advice:
        yield f"{result.failure.name}: fits, and is no failure"
        return
    times = f"{result.verdict_seconds:.1f} s, advice after {result.advice_seconds:.1f} s"
    yield f"{result.failure.name}: {estimate.verdict()}; {times}"
    checks = iter(result.held)
    for advice in estimate.advice:
        said = ("holds" if next(checks) else "DOES NOT HOLD") if advice.fits else "does not fit, the nearest"
        seconds = "?" if advice.step_seconds is None else f"{advice.step_seconds:.3g}"
        yield f"    {said}: {advice.change} {advice.peak_bytes / 2**30:.2f} GiB, {seconds} s"


def main() -> None:
    """Ask all jobs and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="ask only jobs with this text in their name")
    parser.add_argument("--json", type=Path, help="also write the results into a file")
    options = parser.parse_args()
    results = []
    for failure in FAILURES:
        if options.only in failure.name:
            results.append(ask(failure))
            print("\n".join(lines(results[-1])), flush=True)
    wanting = [result for result in results if result.estimate.wants_advice]
    helped = [result for result in wanting if any(result.held)]
    own = [
        result
        for result in wanting
        if any(advice.fits and "gpu" not in advice.change for advice in result.estimate.advice)
    ]
    checks = [held for result in wanting for held in result.held]
    slowest = max((result.advice_seconds for result in wanting), default=0.0)
    print(
        f"{len(wanting)} jobs do not fit or fit barely; {len(helped)} end in a change that fits, {len(own)} of them "
        f"on these cards; {sum(checks)} of {len(checks)} changes hold; advice took at most {slowest:.1f} s"
    )
    if options.json:
        documents = [
            {
                "name": result.failure.name,
                "needed_bytes": result.estimate.needed_bytes,
                "verdict_seconds": result.verdict_seconds,
                "advice_seconds": result.advice_seconds,
                "held": list(result.held),
                "advice": result.estimate.to_json()["advice"],
            }
            for result in results
        ]
        options.json.write_text(json.dumps(documents, indent=1))


if __name__ == "__main__":
    main()
