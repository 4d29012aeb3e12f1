"""Shallow networks that replace one of many equal layers: their depths, and whether that saves time."""

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
"""The deeper of two runs that only compare must have at most this fraction (1 / WORTH) of the layers, or the
whole runs.
"""

ENOUGH_BYTES: Final = 2**40
"""1 TiB: a GPU on which nearly everything fits, so that a peak can be measured.  Expandable segments reserve
addresses for a whole GPU each, and addresses are limited.
"""

COMPILED: Final = ("adamw-8bit-ao", "adamw-4bit", "adamw-fp8-ao")
"""Optimizers of torchao, whose step is compiled when it is first run."""

_LEAST: Final = 2
"""Layers of the shallowest run: the first and the last layer of a network differ from those between."""

_LEAST_SHARDED: Final = 3
"""The same if weights are gathered: buffers for several layers are in use at once, whatever the depth."""

_WORTH_OF_STAGES: Final = 2
"""Three runs of a pipeline's stage must have at most this fraction (1 / _WORTH_OF_STAGES) of all its layers, or
all are run: each run has a fixed cost, for which a stage has few layers.
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
    """Return the depths of two runs that tell approximately what all layers need; None if the whole network runs
    as fast.
    """
    pattern = _first_and_period(job, plan)
    if pattern is None:
        return None
    small, period = pattern
    if plan.pp > 1 and (small + 2 * period) * WORTH <= layers_of(job):
        small += period  # a stage's first and last layer differ from those between
    return (small, small + period) if (small + period) * WORTH <= layers_of(job) else None


def choose_assembly_depths(job: Job, plan: Plan) -> tuple[int, int, int] | None:
    """Return the depths of three runs from which the whole follows; None if the whole network runs as fast.

    Layers that are neither sharded nor adapted take hardly longer than requesting their memory again, except in a
    pipeline, which passes many micro-batches through them.  Vision or audio towers are in each of the three runs.
    For an encoder and a decoder three runs are no faster than all, and give the requests of only some families.
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
    """Return the least layers of a stage, whose first and last layer differ from those between.

    Three behave as more do if weights are gathered for each pass, or a rank has several stages.
    """
    return 3 if plan.shard in ("zero3", "hsdp") or plan.pp_schedule == "interleaved" else 2


def layers_of(job: Job) -> int:
    """Return the number of layers of the network, of its text model if it has several; 0 if the configuration has
    none.

    An encoder and a decoder have so many each; 0 if one is deeper than the other.
    """
    stated = {_value_at(job.model.config, path) for path in _depth_paths(job.model.config)}
    return stated.pop() if len(stated) == 1 else 0


def _depth_paths(config: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the paths of the fields with the number of layers for text.

    A configuration of a decoder alone may have kept the number of its encoder's, under names that depend on the
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
    """Return the job of a network with so many layers, in an encoder and a decoder each, otherwise the same."""
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

    They do not if DDP rebuilds its buckets in the second step, the first one compiles kernels, a budget follows from
    earlier measurements, or a step does not leave memory as it found it.
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

    It does not if a loop holds the outputs of the step before, lengths are drawn, something happens once besides the
    steps, or a third-party trainer runs them, which keeps some of what it made and frees what it kept before.
    """
    once = job.eval_batch, job.generate, job.resume != "none", job.save_checkpoint != "none", job.lengths
    return plan.engine == "tonnage" and plan.outputs != "loop" and not any(once)


def micro_batches_alike(job: Job, plan: Plan) -> bool:
    """Return True if the micro-batches of a step make the same requests, except for the gradients that the first one
    makes.

    They do not if kernels are compiled, a budget follows from earlier measurements, lengths are drawn, outputs are
    kept, or copies to the host wait there.
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
    """Return the layers of the shallowest network, and how many more make the next one like it; None if there are
    none.
    """
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
    """Return the layers whose inputs may be in flight to the host or back at once, if nothing else of them is
    kept.
    """
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
