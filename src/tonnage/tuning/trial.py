"""A trial of one plan on this machine, in a process of its own for each rank.

    python -m tonnage.tuning.trial SPEC FOLDER

SPEC is a file with the job and the plan as JSON; each rank writes what it found to FOLDER/RANK.json.  The network has
random weights and its batches have full length, so nothing that training meets is longer.  After enough steps to be
steady it evaluates and saves once, because runs also end there.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tonnage.tuning.outcome import Outcome

if TYPE_CHECKING:
    from tonnage.step.step import ReadyStep

WARM_STEPS: Final = 2
"""Steps that are not timed: libraries load, states are made, torch.compile compiles."""

FEWEST_STEPS: Final = 5
"""Timed steps after which a trial may end."""

STEADY: Final = 0.02
"""Spread of the last steps at which more of them would say no more."""


def main() -> None:
    """Run the trial of the command line and write its outcome."""
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    rank = int(os.environ.get("RANK", "0"))
    outcome = run(spec)
    result = Path(sys.argv[2]) / f"{rank}.json"
    draft = result.with_suffix(".part")
    draft.write_text(json.dumps({"outcome": outcome.to_json()}), encoding="utf-8")
    draft.rename(result)
    sys.stdout.flush()
    os._exit(0)  # ranks whose peers failed would wait for them at the end


def run(spec: dict[str, Any]) -> Outcome:
    """Return what the trial gave; any error is an outcome."""
    moment = ["load"]
    try:
        return _run(spec, moment)
    except MemoryError as error:
        return Outcome(ended="out_of_memory", moment=moment[0], message=f"host memory: {error}", **_memory())
    except Exception as error:
        text = " ".join(str(error).split())
        is_memory = type(error).__name__ == "OutOfMemoryError" or "out of memory" in text.lower()
        return Outcome(
            ended="out_of_memory" if is_memory else "failed",
            moment=moment[0],
            message=f"{type(error).__name__}: {text[:300]}",
            **_memory(),
        )


def _run(spec: dict[str, Any], moment: list[str]) -> Outcome:
    import torch

    from tonnage.job import read_job
    from tonnage.plans import Plan
    from tonnage.techniques import build

    job, plan = read_job(spec["job"]), Plan(**spec["plan"])
    ready = build(
        job,
        plan,
        device=spec["device"],
        initialise=True,
        world_size=spec["world_size"],
        gpus_per_node=spec["gpus_per_node"],
        alone=False,
    )
    on_card = ready.step.world.device.type == "cuda"
    batches = [ready.random_batch() for _ in range(job.grad_accum)]
    seconds: list[float] = []
    for index in range(WARM_STEPS + spec["steps"]):
        moment[0] = f"step {index + 1}"
        begun = time.perf_counter()
        ready.train_step(batches)
        if on_card:
            torch.cuda.synchronize()
        if index >= WARM_STEPS:
            seconds.append(time.perf_counter() - begun)
        if _is_steady(seconds) and spec["world_size"] == 1:  # several ranks make as many steps each
            break
    moment[0] = "evaluation"
    _evaluate(ready)
    moment[0] = "save"
    _save(ready, spec["folder"])
    median = statistics.median(seconds)
    replicas = ready.step.world.axes.data_parallel
    return Outcome(
        ended="finished",
        moment=moment[0],
        step_seconds=median,
        spread=(max(seconds) - min(seconds)) / 2 / median,
        tokens_per_second=job.tokens_per_micro_batch * job.grad_accum * replicas / median,
        **_memory(),
    )


def _is_steady(seconds: list[float]) -> bool:
    last = seconds[-FEWEST_STEPS:]
    return len(last) == FEWEST_STEPS and max(last) - min(last) <= STEADY * statistics.median(last)


def _evaluate(ready: ReadyStep) -> None:
    from tonnage.step import events
    from tonnage.step.stages import Stage

    if any(isinstance(module, Stage) for module in ready.model.modules()):
        return  # a stage alone has no loss
    events.evaluate(ready)


def _save(ready: ReadyStep, folder: str) -> None:
    from tonnage.train import checkpoints

    checkpoints.save(ready, Path(folder) / "saved")


def _memory() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "capacity_bytes": torch.cuda.mem_get_info()[1],
    }


if __name__ == "__main__":
    main()
