"""How long a memory estimate takes and what it says: tonnage beside what else can be installed.

    python benchmarks/estimators.py [MODEL ...] [--seq-len 4096]

One optimizer step of full fine-tuning in pure bf16 with AdamW, one sequence, on one (imaginary) 8-TiB card, so that
every tool has something to say.  Each tool runs in a process of its own; seconds are those after its imports.
What each number means is in the last column: only tonnage and MemTracker run a step, the others are formulas.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

MODELS = ("llama-2-7b", "llama-3-8b", "llama-3-70b", "llama-3.1-405b")
GIB = 2**30
PATIENCE_SECONDS = 300


def tonnage(model: str, seq_len: int) -> dict[str, Any]:
    """Two runs on a warm worker, imports done: what a plan search pays."""
    from tonnage.device import parse_cluster
    from tonnage.ghost.pool import Worker
    from tonnage.job import Job
    from tonnage.modelref import resolve
    from tonnage.plan import Plan
    from tonnage.predict import estimate

    job = Job(model=resolve(model, offline=True), seq_len=seq_len)
    plan = Plan(precision="bf16-true")
    card = parse_cluster("h100-80gb")
    cluster = replace(card, device=card.device.with_capacity(2**43))
    with Worker() as worker:
        small = Job(model=resolve("smollm2-135m", offline=True), seq_len=64)
        estimate(small, plan, cluster, worker=worker)  # imports what a Llama needs
        began = time.perf_counter()
        run = estimate(job, plan, cluster, worker=worker)
        seconds = time.perf_counter() - began
        began = time.perf_counter()
        estimate(job, plan, cluster, worker=worker)
        again = time.perf_counter() - began
    peak = run.estimate.peak
    return {
        "seconds": seconds,
        "gib": peak.allocated_bytes / GIB,
        "means": f"peak allocated over 3 steps; reserved {peak.reserved_bytes / GIB:.2f}; again {again:.2f} s",
    }


def _meta_model(model: str) -> Any:
    import torch

    from tonnage import model as models
    from tonnage.modelref import resolve

    ref = resolve(model, offline=True)
    return models.build(ref, dtype=torch.bfloat16, attention="sdpa", device=torch.device("meta"))


def memtracker(model: str, seq_len: int) -> dict[str, Any]:
    """torch's own tracker on fake CPU tensors: two steps, so that optimizer states are there."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    from tonnage import model as models
    from tonnage.modelref import resolve

    began = time.perf_counter()
    with FakeTensorMode():
        network = models.build(
            resolve(model, offline=True), dtype=torch.bfloat16, attention="sdpa", device=torch.device("cpu")
        )
        optimizer = torch.optim.AdamW(network.parameters(), foreach=True)
        ids = torch.zeros(1, seq_len, dtype=torch.long)
        tracker = MemTracker()
        tracker.track_external(network, optimizer)
        with tracker:
            for _ in range(2):
                network(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                tracker.reset_mod_stats()
    peak = tracker.get_tracker_snapshot("peak")
    total = max(device["Total"] for device in peak.values())
    return {
        "seconds": time.perf_counter() - began,
        "gib": total / GIB,
        "means": "peak of live tensors (CPU kernels' choices)",
    }


def accelerate(model: str, seq_len: int) -> dict[str, Any]:
    """What `accelerate estimate-memory` computes: four times the weights for training with Adam."""
    from accelerate.utils import calculate_maximum_sizes

    network = _meta_model(model)
    began = time.perf_counter()
    total, _largest = calculate_maximum_sizes(network)
    return {"seconds": time.perf_counter() - began, "gib": 4 * total / GIB, "means": "4 x weights; no activations"}


def deepspeed(model: str, seq_len: int) -> dict[str, Any]:
    """DeepSpeed's estimator for ZeRO-2 on one GPU without offload: 18 bytes a parameter."""
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    network = _meta_model(model)
    began = time.perf_counter()
    parameters = sum(p.numel() for p in network.parameters())
    _cpu, gpu = estimate_zero2_model_states_mem_needs(parameters, num_gpus_per_node=1, cpu_offload=False)
    return {
        "seconds": time.perf_counter() - began,
        "gib": gpu / GIB,
        "means": "model states of ZeRO-2, fp16; no activations",
    }


TOOLS: dict[str, Callable[[str, int], dict[str, Any]]] = {
    "tonnage": tonnage,
    "MemTracker": memtracker,
    "accelerate": accelerate,
    "deepspeed": deepspeed,
}


def apart(tool: str, model: str, seq_len: int) -> dict[str, Any]:
    """The tool's answer from a process of its own, with that process's peak memory."""
    command = [sys.executable, __file__, "--one", tool, model, "--seq-len", str(seq_len)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        return {"error": f"stopped after {PATIENCE_SECONDS} s"}
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return {"error": lines[-1][:90] if lines else f"exit code {done.returncode}"}
    answer = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(answer, dict)
    return answer


def one(tool: str, model: str, seq_len: int) -> None:
    import resource

    answer = TOOLS[tool](model, seq_len)
    used = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(json.dumps({**answer, "rss_gib": max(used) * 1024 / GIB}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--one", choices=TOOLS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.one, options.models[0], options.seq_len)
        return
    print("| model | tool | seconds | GiB | tool's own RAM, GiB | what the number is |\n|---|---|---|---|---|---|")
    for model in options.models:
        for tool in TOOLS:
            answer = apart(tool, model, options.seq_len)
            if "error" in answer:
                print(f"| {model} | {tool} | - | - | - | did not run: {answer['error']} |", flush=True)
                continue
            print(
                f"| {model} | {tool} | {answer['seconds']:.2f} | {answer['gib']:.2f} | {answer['rss_gib']:.2f} "
                f"| {answer['means']} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
