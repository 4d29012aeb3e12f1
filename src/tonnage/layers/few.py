"""Networks of a few layers in place of one of many equal ones: which, and whether that is worth it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import lcm
from typing import Any, Final

from tonnage.axes import SHARDING
from tonnage.device import Cluster
from tonnage.job import Job
from tonnage.plans import Plan

WORTH: Final = 3
"""The deeper of two runs that only compare has at most so much less than the whole, or the whole is run."""

ENOUGH_BYTES: Final = 2**40
"""1 TiB: a card on which nearly everything fits, so that a peak can be named.  Expandable segments reserve addresses
for a whole card each, and there are only so many addresses."""

COMPILED: Final = ("adamw-8bit-ao", "adamw-4bit", "adamw-fp8-ao")
"""Optimizers of torchao, whose step is compiled when it is first made."""

_LEAST: Final = 2
"""Layers of the shallowest run: the first and the last of a network are not like those between."""

_LEAST_SHARDED: Final = 3
"""The same where weights are gathered: buffers for several layers are in use at once, whatever the depth."""

_WORTH_OF_STAGES: Final = 3
"""Three runs of a pipeline's stage have at most so much less than all its layers, or all are run: each run takes time
of its own, for which a stage has few layers."""

_UNEVEN: Final = ("budget", "sqrt")
"""Kinds of checkpointing that do with a layer what hangs on how many there are."""


def depths(job: Job, plan: Plan) -> tuple[int, int] | None:
    """Numbers of layers for two runs that say what all need, about; None where the whole is as well."""
    found = _first_and_period(job, plan)
    if found is None:
        return None
    small, period = found
    return (small, small + period) if (small + period) * WORTH <= layers_of(job) else None


def depths_to_continue(job: Job, plan: Plan) -> tuple[int, int, int] | None:
    """Numbers of layers for three runs from which all follow; None where the whole is as well.

    Layers that are neither divided nor adapted take hardly longer than to ask for their memory again, except in a
    pipeline, which takes many micro-batches through them.
    """
    found = _first_and_period(job, plan)
    slow = plan.shard in SHARDING or job.method != "full" or max(plan.tp, plan.pp, plan.cp, plan.ep) > 1
    if found is None or not slow or not is_repetitive(job, plan):
        return None
    small, period = found
    least = 3 * (small + period)
    if plan.pp > 1:  # a stage's first and last layer are not like those between
        small = small + period
        least = _WORTH_OF_STAGES * 3 * (small + period)
    return (small, small + period, small + 2 * period) if least <= layers_of(job) else None


def layers_of(job: Job) -> int:
    """How many layers the network has; 0 where its configuration does not say."""
    found = job.model.config.get("num_hidden_layers")
    return found if isinstance(found, int) else 0


def with_layers(job: Job, layers: int) -> Job:
    """The job of a network with so many layers, otherwise the same."""
    config = dict(job.model.config)
    if isinstance(config.get("layer_types"), Sequence):
        config["layer_types"] = list(config["layer_types"])[:layers]
    config["num_hidden_layers"] = layers
    return replace(job, model=replace(job.model, config=config))


def roomy(cluster: Cluster) -> Cluster:
    """The same machines with cards on which everything fits."""
    return replace(cluster, device=cluster.device.with_capacity(ENOUGH_BYTES))


def is_repetitive(job: Job, plan: Plan) -> bool:
    """Whether all steps ask for the same.

    Not where DDP makes its buckets anew in the second step, the first one compiles kernels, a loop holds what the
    step before returned, a budget is kept by what was seen before, lengths are drawn, something happens once besides
    the steps, or a trainer of others makes them.
    """
    once = job.eval_batch, job.generate, job.resume != "none", job.save_checkpoint != "none", job.lengths
    changes = (
        plan.shard in ("ddp", "zero1")
        or plan.optimizer in COMPILED
        or plan.attention == "flex"
        or plan.outputs == "loop"
        or plan.checkpointing.startswith("budget")
    )
    return plan.engine == "tonnage" and not changes and not any(once)


def _first_and_period(job: Job, plan: Plan) -> tuple[int, int] | None:
    """Layers of the shallowest network, and how many more make the next one like it; None where there are none."""
    config, layers = job.model.config, layers_of(job)
    period = _period(config)
    uneven = (
        plan.checkpointing.startswith(_UNEVEN) or config.get("is_encoder_decoder") or config.get("mlp_only_layers")
    )
    if period is None or uneven or not layers:
        return None
    first = int(config.get("first_k_dense_replace") or 0)
    period = lcm(period, plan.checkpoint_interval or 1)
    if plan.pp > 1:
        stages = plan.pp * (plan.pp_stages if plan.pp_schedule == "interleaved" else 1)
        if first or stages % period:
            return None
        period = stages
    least = first + (_LEAST_SHARDED if plan.shard in SHARDING else _LEAST)
    return least + (layers - least) % period, period


def _period(config: Mapping[str, Any]) -> int | None:
    """After how many layers their kinds repeat; None where they do not."""
    found = int(config.get("decoder_sparse_step") or 1)
    found = lcm(found, int(config.get("sliding_window_pattern") or 1), int(config.get("moe_layer_freq") or 1))
    kinds = config.get("layer_types")
    if isinstance(kinds, Sequence) and kinds:
        same = (
            size for size in range(1, len(kinds)) if all(a == b for a, b in zip(kinds, kinds[size:], strict=False))
        )
        repeats = next(same, None)
        return None if repeats is None else lcm(found, repeats)
    return found
