"""`tonnage train` killed by SIGKILL at random moments, saves included, and continued each time: is anything lost?

    python -m benchmarks.kills [--kills 30] [--seed 0]

A run of a tiny network on Python's own documentation is killed at random moments: half of the kills come while a
checkpoint is written, the last one while the trained network is.  Each time a new process continues it.  In the end
every line of metrics, but for seconds, and every weight must equal those of a run that was never stopped; the command
exits with 1 if one does not.  Processes are forked from one that has imported torch, and take a second each.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

STEPS: Final = 240
SAVE_EVERY: Final = 6

CONFIG: Final = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 32},
    **{"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
}
PLAN: Final = """schema_version = 1
model = "config.json"
gpu = "cpu"
[job]
seq_len = 64
micro_batch = 2
grad_accum = 2
[plan]
precision = "fp32"
clip_grad_norm = 1.0
"""

_TIMED: Final = ("step_seconds", "tokens_per_second")
_MOST_SECONDS: Final = 300.0
"""Time limit of a process."""


def main(arguments: list[str] | None = None) -> int:
    """Print how many kills came when, and return 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / "plan.toml").write_text(PLAN)
        (folder / "docs.txt").write_text("\n\n".join(pydoc_data.topics.topics.values())[:60_000])
        began = time.monotonic()
        _wait(_start(folder, "whole", given.steps))
        seconds = time.monotonic() - began
        moments = kill_often(folder, given.steps, given.kills, random.Random(given.seed), seconds)
        differing = compare(folder)
    print(f"{moments.total()} kills: {', '.join(f'{count} {moment}' for moment, count in sorted(moments.items()))}")
    print("nothing differs from the run that was never stopped" if not differing else "; ".join(differing))
    return int(bool(differing))


def kill_often(folder: Path, steps: int, kills: int, draw: random.Random, seconds: float) -> Counter[str]:
    """Kill the run of `folder` that often, then let it end; return what each kill found it doing."""
    moments: Counter[str] = Counter()
    run = folder / "killed"
    for number in range(kills):
        child = _start(folder, "killed", steps)
        if number == kills - 1:
            _wait_until(child, lambda: (run / ".final.part").exists())
        elif number % 2:
            _wait_until(child, lambda: _is_saving(run))
            time.sleep(draw.random() * 0.05)
        else:
            time.sleep(draw.random() * seconds / kills)
        moment = _describe(run)
        moments[moment if _kill(child) else "after the end"] += 1
    _wait(_start(folder, "killed", steps))
    return moments


def compare(folder: Path) -> list[str]:
    """Return what differs between the two runs."""
    import torch
    from safetensors.torch import load_file

    lines = [_read_metrics(folder / name / "metrics.jsonl") for name in ("whole", "killed")]
    differing = [f"step {one['step']}: {one} / {other}" for one, other in zip(*lines, strict=False) if one != other]
    if len(lines[0]) != len(lines[1]):
        differing.append(f"{len(lines[0])} and {len(lines[1])} lines of metrics")
    weights = [load_file(folder / name / "final" / "model.safetensors") for name in ("whole", "killed")]
    return differing + [name for name in weights[0] if not torch.equal(weights[0][name], weights[1][name])]


def _read_metrics(file: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in line.items() if name not in _TIMED} for line in lines]


def _start(folder: Path, out: str, steps: int) -> int:
    """Return the process id of a fork that trains, or goes on training."""
    import torch
    import transformers.models.llama.modeling_llama

    from tonnage.train import run
    from tonnage.train.settings import Settings

    del transformers
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.chdir(folder)
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        torch.set_num_threads(1)
        began = (Path(out) / "run.json").exists()
        run.train(
            Settings(
                plan=Path("plan.toml"),
                model="config.json",
                data=Path("docs.txt"),
                out=Path(out),
                max_steps=steps,
                lr=3e-3,
                save_every=SAVE_EVERY,
                eval_every=steps // 4,
                resume=began,
            )
        )
        code = 0
    finally:
        os._exit(code)


def _wait_until(child: int, is_so: Callable[[], bool]) -> None:
    """Wait until something is so, or the process has ended."""
    end = time.monotonic() + _MOST_SECONDS
    while not is_so() and time.monotonic() < end and Path(f"/proc/{child}").exists():
        if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.0005)


def _is_saving(run: Path) -> bool:
    return any(run.glob("checkpoints/.*.partial"))


def _describe(run: Path) -> str:
    if (run / ".final.part").exists():
        return "while the trained network was written"
    if _is_saving(run):
        return "while a checkpoint was written"
    return "in a step or before the first" if (run / "metrics.jsonl").exists() else "before the first step"


def _kill(child: int) -> bool:
    """Kill a process; return False if it had ended before."""
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def _wait(child: int) -> None:
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError("a run that was not killed failed; run tonnage train by hand to see why")


if __name__ == "__main__":
    sys.exit(main())
