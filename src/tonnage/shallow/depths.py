"""Depths of the shallow networks that stand for a deep one with many equal layers.

Two uses, with different depths:

- probes: two runs give approximately what the whole network needs (`choose_probe_depths`)
- assembly: the exact requests of the whole are made from those of three runs (`choose_assembly_depths`)

Both return None where the whole network runs as fast as the shallow ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from math import lcm
from operator import getitem
from typing import Any, Final

from tonnage.catalog.families import types_with
from tonnage.cluster import Cluster
from tonnage.job import Job
from tonnage.mesh import SHARDING
from tonnage.plans import Plan
from tonnage.techniques.activation_offload import AHEAD, LEAVING

WORTH: Final = 3
"""Probes are made if the network has at least this many times the layers of the deeper probe; else it runs whole."""

ENOUGH_BYTES: Final = 2**40
"""1 TiB: a GPU on which nearly everything fits, so that a peak can be measured.  Expandable segments reserve
addresses for a whole GPU each, and addresses are limited.
"""

COMPILED: Final = ("adamw-8bit-ao", "adamw-4bit", "adamw-fp8-ao")
"""Optimizers of torchao, whose step is compiled when it is first run."""

_LEAST: Final = 2
"""Layers of the shallowest run: the first and the last layer of a network differ from those between."""

_LEAST_SHARDED: Final = 3
"""Layers of the shallowest run if weights are gathered: buffers for several layers are in use at once."""

_WORTH_OF_STAGES: Final = 2
"""A pipeline is assembled if it has at least this many times the layers of the three runs together.

Each run has a fixed cost, and a stage has few layers to save.
"""

_DEPTH_FIELDS: Final = ("num_hidden_layers", "n_layer", "n_layers")
"""Fields with the number of layers in configurations of one stack."""

_DEPTH_FIELDS_OF_BOTH: Final = (
    *(*_DEPTH_FIELDS, "num_layers", "num_decoder_layers", "num_encoder_layers", "encoder_layers", "decoder_layers"),
    *("encoder_num_hidden_layers", "decoder_num_hidden_layers"),
)
"""Fields with the numbers of layers in configurations of an encoder and a decoder, and fields that repeat them."""

_TEXT_PART: Final = "text_config"
"""The part of a multimodal configuration of transformers that describes its decoder."""

_STACK_PARTS: Final = ("encoder", "decoder", "encoder_config", "decoder_config", _TEXT_PART)
"""Parts of a configuration that describe an encoder and a decoder, if each has its own."""

_TOWER_DEPTH_FIELDS: Final = (*_DEPTH_FIELDS, "depth", "encoder_layers")
"""Fields with the number of layers in configurations of vision or audio towers."""

_IRREGULAR_FIELDS: Final = ("mlp_only_layers", "moe_layers", "cross_attention_layers", "num_sparse_encoder_layers")
"""Fields with which layers differ by their position."""

_PERIOD_FIELDS: Final = (
    *("decoder_sparse_step", "sliding_window_pattern", "moe_layer_freq", "moe_layer_interval", "attn_layer_period"),
    *("expert_layer_period", "full_attention_interval", "global_attn_every_n_layers", "interleave_moe_layer_step"),
    *("no_rope_layer_interval", "encoder_sparse_step"),
)
"""Fields with the number of layers after which a kind of layer repeats."""

_IRREGULAR_CHECKPOINTING: Final = ("budget", "sqrt")
"""Kinds of checkpointing whose treatment of a layer depends on the number of layers."""


def choose_probe_depths(job: Job, plan: Plan) -> tuple[int, int] | None:
    """Return the depths of two probes, from which the need of the whole network is extrapolated.

    None if the layers follow no pattern, or if the whole network runs as fast (`WORTH`).
    """
    pattern = _first_and_period(job, plan)
    if pattern is None:
        return None
    small, period = pattern
    if plan.pp > 1 and (small + 2 * period) * WORTH <= layers_of(job):
        small += period  # a stage's first and last layer differ from those between
    return (small, small + period) if (small + period) * WORTH <= layers_of(job) else None


def choose_assembly_depths(job: Job, plan: Plan) -> tuple[int, int, int] | None:
    """Return the depths of three runs, from which the requests of the whole network are assembled.

    None if the whole network runs as fast:

    - Its layers are neither sharded, parallel nor adapted.  Running such a layer takes hardly longer than requesting
      its memory again.
    - The three runs together have more layers than it.  A vision or audio tower counts in each of them.
    - It has an encoder and a decoder.  Three runs then save nothing, and can be assembled for some families only.

    None also if the layers follow no pattern or the steps differ (`is_repetitive`).
    """
    pattern = _first_and_period(job, plan)
    slow = plan.shard in SHARDING or job.method != "full" or max(plan.tp, plan.pp, plan.cp, plan.ep) > 1
    is_encoder_decoder = job.model.config.get("is_encoder_decoder")
    if pattern is None or is_encoder_decoder or not slow or not is_repetitive(job, plan):
        return None
    small, period = pattern
    if plan.pp == 1 and small < 2 * period:  # the first and the last of each kind differ from those between
        small += period
    least = 3 * (small + period) + 2 * _count_tower_layers(job)
    if plan.pp > 1:
        small = max(small + period, _least_layers_of_stage(plan) * period)
        least = _WORTH_OF_STAGES * 3 * (small + period)
    return (small, small + period, small + 2 * period) if least <= layers_of(job) else None


def _least_layers_of_stage(plan: Plan) -> int:
    """Return the least number of layers of a stage: its first and its last layer, which differ from the others.

    If weights are gathered for each pass, or a rank has several stages, one layer between them is needed as well.
    """
    return 3 if plan.shard in ("zero3", "hsdp") or plan.pp_schedule == "interleaved" else 2


def layers_of(job: Job) -> int:
    """Return the number of layers of the network, or of its text model if it has several parts.

    For an encoder and a decoder it is the depth of each, and 0 if their depths differ.  0 also if the configuration
    has no number of layers.
    """
    stated = {_value_at(job.model.config, path) for path in _depth_paths(job.model.config)}
    return stated.pop() if len(stated) == 1 else 0


def _depth_paths(config: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the paths of the fields with the number of layers for text.

    The configuration of a decoder alone may still have the field of an encoder, under a name that depends on the
    family.
    """
    both = config.get("is_encoder_decoder")
    names = _DEPTH_FIELDS_OF_BOTH if both else _DEPTH_FIELDS if "decoder_layers" not in config else ()
    paths: list[tuple[str, ...]] = [(name,) for name in names if isinstance(config.get(name), int)]
    parts = _STACK_PARTS if both else (_TEXT_PART,) if not paths else ()
    parts_by_name = {part: config[part] for part in parts if isinstance(config.get(part), Mapping)}
    return paths + [(part, *path) for part, stack in parts_by_name.items() for path in _depth_paths(stack)]


def _value_at(config: Mapping[str, Any], path: Sequence[str]) -> Any:
    return reduce(getitem, path, config)


def _count_tower_layers(job: Job) -> int:
    """Return the layers of the network's other stacks, as far as its configuration states them."""
    config = job.model.config
    text_parts = {path[0] for path in _depth_paths(config)}
    others = [part for name, part in config.items() if isinstance(part, Mapping) and name not in text_parts]
    stated = (part.get(name) for part in others for name in _TOWER_DEPTH_FIELDS)
    return sum(number for number in stated if isinstance(number, int))


def with_layers(job: Job, layers: int) -> Job:
    """Return the job with so many layers in its network; an encoder and a decoder get so many each."""
    config = job.model.config
    for path in _depth_paths(job.model.config):
        config = _set_layers(config, path, layers)
    return replace(job, model=replace(job.model, config=config))


def _set_layers(config: Mapping[str, Any], path: Sequence[str], layers: int) -> dict[str, Any]:
    """Return the configuration with another number of layers at the path, and its lists by layer cut to it."""
    name, *rest = path
    if rest:
        return {**config, name: _set_layers(config[name], rest, layers)}
    lists = {field: values[:layers] for field, values in _lists_by_layer(config, config[name]).items()}
    return {**config, **lists, name: layers}


def roomy(cluster: Cluster) -> Cluster:
    """Return the same machines with GPUs on which everything fits."""
    return replace(cluster, device=cluster.device.with_capacity(ENOUGH_BYTES))


def is_repetitive(job: Job, plan: Plan) -> bool:
    """Return True if all steps make the same requests.

    They differ if DDP rebuilds its buckets in the second step, if the first step compiles kernels, if a budget
    follows from earlier measurements, or if a step leaves memory in another state than it found.
    """
    changes = (
        plan.shard in ("ddp", "zero1")
        or plan.optimizer in COMPILED
        or plan.compile != "none"
        or plan.attention == "flex"
        or plan.checkpointing.startswith("budget")
    )
    return leaves_what_it_found(job, plan) and not changes


def leaves_what_it_found(job: Job, plan: Plan) -> bool:
    """Return True if a step, after the first, leaves the same blocks at the same addresses as it found.

    It does not if a loop holds the outputs of the step before, if lengths are drawn, or if something happens once
    beside the steps (a checkpoint, an evaluation).  Nor under a third-party trainer, which keeps some objects of a
    step and frees those of the step before.
    """
    once = job.eval_batch, job.generate, job.resume != "none", job.save_checkpoint != "none", job.lengths
    return plan.engine == "tonnage" and plan.outputs != "loop" and not any(once)


def micro_batches_alike(job: Job, plan: Plan) -> bool:
    """Return True if the micro-batches of a step make the same requests, but for the first one's gradients.

    They differ if kernels are compiled, if a budget follows from earlier measurements, if lengths are drawn, if
    outputs are kept, or if copies to the host wait there.
    """
    changes = (
        plan.engine != "tonnage"
        or plan.pp > 1
        or plan.compile != "none"
        or plan.attention == "flex"
        or plan.checkpointing.startswith("budget")
        or plan.outputs != "freed"
    )
    hosts = (plan.activation_offload, plan.optimizer_offload, plan.param_offload)
    return not changes and not job.lengths and all(where == "none" for where in hosts)


def counted_micro_batches(job: Job, plan: Plan) -> int:
    """Return of how many micro-batches the operations are counted: two where all others are like the second."""
    return min(job.grad_accum, 2) if micro_batches_alike(job, plan) else job.grad_accum


def is_first_alike(job: Job, plan: Plan) -> bool:
    """Return True if the first micro-batch is like the others, each of which frees what it has added to its
    gradients.

    HSDP keeps that until all are averaged among the groups of ranks.  Networks for more than text may keep something
    of the one before, as Qwen's do with the positions of images.
    """
    parts = (part for name, part in job.model.config.items() if name.endswith("_config"))
    beside_text = any(isinstance(part, Mapping) and "model_type" in part for part in parts)
    return plan.accum_sync and plan.shard in ("zero2", "zero3") and not beside_text


def _first_and_period(job: Job, plan: Plan) -> tuple[int, int] | None:
    """Return the layers of the shallowest network, and the layers to add for the next one; None without a pattern."""
    layers, config = layers_of(job), job.model.config
    parts = [_value_at(config, path[:-1]) for path in _depth_paths(config)]
    periods = [_period(part, layers) for part in parts]
    irregular = any(part.get(name) for part in parts for name in _IRREGULAR_FIELDS)
    if not layers or irregular or None in periods or plan.checkpointing.startswith(_IRREGULAR_CHECKPOINTING):
        return None
    first = max(int(part.get("first_k_dense_replace") or 0) for part in parts)
    period = lcm(*filter(None, periods), plan.checkpoint_interval or 1)
    if plan.pp > 1:
        stages = plan.pp * (plan.pp_stages if plan.pp_schedule == "interleaved" else 1)
        if first or stages % period:
            return None
        period = stages
    least = first + max(_LEAST_SHARDED if plan.shard in SHARDING else _LEAST, _layers_in_flight(plan))
    return least + (layers - least) % period, period


def _layers_in_flight(plan: Plan) -> int:
    """Return how many layers' inputs may be on their way to the host or back at once; 0 if nothing is streamed."""
    streamed = plan.checkpointing in ("full", "full-reentrant") and plan.activation_offload in (
        "cpu-streamed",
        "nvme",
    )
    return LEAVING + AHEAD if streamed else 0


def _period(config: Mapping[str, Any], layers: int) -> int | None:
    """Return the number of layers after which their kinds repeat; None if they do not."""
    stated = [config[name] for name in _PERIOD_FIELDS if isinstance(config.get(name), int) and config[name] > 0]
    kinds = _lists_by_layer(config, layers)
    listed = "layer_types" in kinds or isinstance(config.get("sliding_window_pattern"), int)
    period = lcm(*stated) if listed else lcm(*stated, _usual_period(str(config.get("model_type"))))
    for values in kinds.values():
        repeats = next((size for size in range(1, len(values)) if values[:-size] == values[size:]), None)
        if repeats is None:
            return None
        period = lcm(period, repeats)
    return period


def _usual_period(kind: str) -> int:
    parts = kind.replace("-", "_").split("_")
    families = ("_".join(parts[: len(parts) - less]) for less in range(len(parts)))
    periods = types_with("layer_period")
    return next((int(periods[family]) for family in families if family in periods), 1)


def _lists_by_layer(config: Mapping[str, Any], layers: int) -> dict[str, list[Any]]:
    """Return the fields that list a value for each layer: its kind, or whether it has positions."""
    return {name: value for name, value in config.items() if isinstance(value, list) and len(value) == layers}
