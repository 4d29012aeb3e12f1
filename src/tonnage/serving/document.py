"""The answer of `estimate --task serve` as the document of the contract."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tonnage.serving.advice import ServingAdvice, needed_bytes
from tonnage.serving.closed_form import SOURCE, ServingEstimate
from tonnage.serving.exports import own_command
from tonnage.serving.planning import ServePlan, ServeSolution

SCHEMA_VERSION = 1


def to_json(estimate: ServingEstimate, advice: Sequence[ServingAdvice] = ()) -> dict[str, Any]:
    """Return the document that `--json` prints: bytes as integers, absent values as None."""
    from tonnage import __version__

    worst, full, device = estimate.worst, estimate.settings, estimate.settings.device
    pool = max(0, worst.pool_bytes)
    categories = {
        "parameter": worst.weights_bytes,
        "activation": worst.profile.bytes,
        "kv_cache": pool,
        "graphs": worst.graphs.bytes,
        "runtime": worst.outside.bytes + full.first_bytes,
    }
    process = sum(categories.values())
    return {
        "schema_version": SCHEMA_VERSION,
        "source": SOURCE,
        "versions": {"tonnage": __version__, full.engine.name: ".".join(map(str, full.engine.version))},
        "model": {
            "name": estimate.network.name,
            "parameters": estimate.network.parameters,
            "trainable_parameters": 0,
        },
        "job": {"task": "serve", "max_len": full.max_len, "max_seqs": full.max_seqs},
        "plan": plan_fields(estimate),
        "cluster": {
            "gpu": device.id,
            "gpus": estimate.cluster.gpus,
            "nodes": estimate.cluster.nodes,
            "capacity_bytes": device.capacity_bytes,
        },
        "fits": estimate.starts,
        "rank": worst.stage * full.stated.tp,
        "peak": {
            "allocated_bytes": worst.weights_bytes + worst.profile.bytes + pool,
            "reserved_bytes": worst.weights_bytes + worst.profile.bytes + pool,
            "process_bytes": process,
            "low_bytes": process - pool + max(0, worst.low_pool_bytes),
            "high_bytes": process - pool + max(0, worst.high_pool_bytes),
            "phase": "load" if worst.pool_bytes <= 0 else "serve",
            "layer": "",
            "by_category": categories,
        },
        "needed_bytes": None if estimate.starts else needed_bytes(estimate),
        "serving": estimate.serving.to_json(),
        "advice": [item.to_json() for item in advice],
        "coverage": {"run": [], "modelled": list(estimate.modelled), "assumed": list(estimate.assumed)},
    }


def solution_to_json(solution: ServeSolution) -> dict[str, Any]:
    """Return the document of `plan --task serve --json`, best plan first."""
    question = solution.question
    nearest = None
    if solution.nearest is not None:
        remedies = [remedy.to_json() for remedy in solution.remedies]
        nearest = {**_plan_to_json(solution.nearest, question.price), "remedies": remedies}
    return {
        "schema_version": SCHEMA_VERSION,
        "status": solution.status,
        "question": {
            "task": "serve",
            "model": question.network.name,
            "gpu": f"{question.cluster}",
            "concurrency": question.concurrency,
            "max_len": question.max_len,
            "mean_prompt": question.lengths.mean_prompt,
            "mean_output": question.lengths.mean_output,
            "refused": question.refused,
        },
        "found": solution.found,
        "plans": [_plan_to_json(plan, question.price) for plan in solution.plans],
        "refused": list(solution.refused),
        "frontier": [],
        "nearest": nearest,
    }


def _plan_to_json(plan: ServePlan, price: float | None) -> dict[str, Any]:
    return {
        "name": plan.name,
        "plan": plan_fields(plan.estimate),
        "estimate": to_json(plan.estimate),
        "reasons": [reason.to_json() for reason in plan.reasons],
        "concurrency": plan.held,
        "keeps_numbers": plan.keeps_numbers,
        "speed": None if plan.speed is None else asdict(plan.speed),
        "simulation": None if plan.simulation is None else asdict(plan.simulation),
        "cost_per_million_tokens": plan.cost_per_million(price),
        "command": own_command(plan.estimate),
    }


def plan_fields(estimate: ServingEstimate) -> dict[str, Any]:
    """Return every setting of the engine with its value."""
    full = estimate.settings
    return {
        "engine": full.engine.name,
        "quantization": full.quantization.name,
        "kv_dtype": full.stated.kv_dtype,
        "gpu_memory_utilization": full.utilization,
        "max_batched_tokens": full.max_batched_tokens,
        "tp": full.stated.tp,
        "pp": full.stated.pp,
        "dp": full.stated.dp,
        "ep": full.stated.ep,
    }
