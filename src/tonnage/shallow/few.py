"""Networks of a few layers in place of one of many equal ones: which, and whether that is worth it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from math import lcm
from operator import getitem
from typing import Any, Final

from tonnage.cluster import Cluster
from tonnage.job import Job
from tonnage.mesh import SHARDING
from tonnage.plans import Plan
from tonnage.techniques.activation_offload import AHEAD, LEAVING

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

_WORTH_OF_STAGES: Final = 2
"""Three runs of a pipeline's stage have at most so much less than all its layers, or all are run: each run takes time
of its own, for which a stage has few layers."""

_DEPTH: Final = ("num_hidden_layers", "n_layer", "n_layers")
"""What configurations of one stack call the number of its layers."""

_DEPTHS: Final = (
    *(*_DEPTH, "num_layers", "num_decoder_layers", "num_encoder_layers", "encoder_layers", "decoder_layers"),
    *("encoder_num_hidden_layers", "decoder_num_hidden_layers"),
)
"""What configurations of an encoder and a decoder call the numbers of theirs, and what repeats them."""

_WORDS: Final = "text_config"
"""What transformers' networks that see call the configuration of their decoder."""

_STACKS: Final = ("encoder", "decoder", "encoder_config", "decoder_config", _WORDS)
"""What networks of an encoder and a decoder call theirs, where each has one of its own."""

_TOWERS: Final = (*_DEPTH, "depth", "encoder_layers")
"""What configurations of stacks for images or sounds call the number of their layers."""

_UNLIKE: Final = ("mlp_only_layers", "moe_layers", "cross_attention_layers", "num_sparse_encoder_layers")
"""Options of configurations with which layers are not alike, and their places count."""

_PERIODS: Final[Mapping[str, int]] = {
    **dict.fromkeys(("gemma2", "gpt_neo", "gpt_oss", "minimax", "pegasus_x", "t5_gemma_module"), 2),
    **dict.fromkeys(("t5gemma", "vaultgemma"), 2),
    **dict.fromkeys(("colmodernvbert", "modernbert", "modernvbert", "pe_audio", "pe_video", "ultrabert"), 3),
    **dict.fromkeys(("afmoe", "cohere2", "cwm", "exaone4", "granite_swa", "granitemoe_swa", "jev", "llama4"), 4),
    **dict.fromkeys(("minicpm_ocr", "minicpmv4", "muse_glimmer", "muse_spark", "olmo3", "olmo_hybrid"), 4),
    **dict.fromkeys(("qwen3_5", "qwen3_next", "qwen4_exp", "smollm3"), 4),
    **dict.fromkeys(("gemma3n", "kolibri1"), 5),
    **dict.fromkeys(("diffusion_gemma", "embedding_gemma2", "gemma3", "gemma4", "inkling2", "inkling"), 6),
    **dict.fromkeys(("shieldgemma2", "t5gemma2"), 6),
}
"""After how many layers kinds repeat in configurations that do not list them (transformers 5.23), by families: a type
of model, with or without more behind an underscore."""

_STATED: Final = (
    *("decoder_sparse_step", "sliding_window_pattern", "moe_layer_freq", "moe_layer_interval", "attn_layer_period"),
    *("expert_layer_period", "full_attention_interval", "global_attn_every_n_layers", "interleave_moe_layer_step"),
    *("no_rope_layer_interval", "encoder_sparse_step"),
)
"""Options of configurations that say after how many layers a kind comes again."""

_UNEVEN: Final = ("budget", "sqrt")
"""Kinds of checkpointing that do with a layer what hangs on how many there are."""


def depths(job: Job, plan: Plan) -> tuple[int, int] | None:
    """Numbers of layers for two runs that say what all need, about; None where the whole is as well."""
    found = _first_and_period(job, plan)
    if found is None:
        return None
    small, period = found
    if plan.pp > 1 and (small + 2 * period) * WORTH <= layers_of(job):
        small += period  # a stage's first and last layer are not like those between
    return (small, small + period) if (small + period) * WORTH <= layers_of(job) else None


def depths_to_continue(job: Job, plan: Plan) -> tuple[int, int, int] | None:
    """Numbers of layers for three runs from which all follow; None where the whole is as well.

    Layers that are neither divided nor adapted take hardly longer than to ask for their memory again, except in a
    pipeline, which takes many micro-batches through them.  Layers for images or sounds are in each of the three.  Of
    an encoder and a decoder three run no faster than all, and say what all need of some families alone.
    """
    found = _first_and_period(job, plan)
    slow = plan.shard in SHARDING or job.method != "full" or max(plan.tp, plan.pp, plan.cp, plan.ep) > 1
    both = job.model.config.get("is_encoder_decoder")
    if found is None or both or not slow or not is_repetitive(job, plan):
        return None
    small, period = found
    if plan.pp == 1 and small < 2 * period:  # the first and the last of each kind are not like those between
        small += period
    least = 3 * (small + period) + 2 * _beside_words(job)
    if plan.pp > 1:
        small = max(small + period, _least_of_a_stage(plan) * period)
        least = _WORTH_OF_STAGES * 3 * (small + period)
    return (small, small + period, small + 2 * period) if least <= layers_of(job) else None


def _least_of_a_stage(plan: Plan) -> int:
    """A stage's first and last layer are not like those between; three are as more are where weights are gathered for
    each pass, or a rank has several stages."""
    return 3 if plan.shard in ("zero3", "hsdp") or plan.pp_schedule == "interleaved" else 2


def layers_of(job: Job) -> int:
    """How many layers the network has, of several stacks the one of words; 0 where its configuration does not say.

    An encoder and a decoder have so many each; 0 where one is deeper than the other.
    """
    stated = {_at(job.model.config, place) for place in _places(job.model.config)}
    return stated.pop() if len(stated) == 1 else 0


def _places(config: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Where a configuration says how many layers there are for words.

    That of a decoder alone may have kept the number of its encoder's, in names that hang on the family.
    """
    both = config.get("is_encoder_decoder")
    names = _DEPTHS if both else _DEPTH if "decoder_layers" not in config else ()
    found: list[tuple[str, ...]] = [(name,) for name in names if isinstance(config.get(name), int)]
    parts = _STACKS if both else (_WORDS,) if not found else ()
    within = {part: config[part] for part in parts if isinstance(config.get(part), Mapping)}
    return found + [(part, *place) for part, stack in within.items() for place in _places(stack)]


def _at(config: Mapping[str, Any], place: Sequence[str]) -> Any:
    return reduce(getitem, place, config)


def _beside_words(job: Job) -> int:
    """Layers of the network's other stacks, as far as its configuration says how many."""
    config = job.model.config
    words = {place[0] for place in _places(config)}
    others = [part for name, part in config.items() if isinstance(part, Mapping) and name not in words]
    stated = (part.get(name) for part in others for name in _TOWERS)
    return sum(number for number in stated if isinstance(number, int))


def with_layers(job: Job, layers: int) -> Job:
    """The job of a network with so many layers, in an encoder and a decoder each, otherwise the same."""
    config = reduce(lambda config, place: _cut(config, place, layers), _places(job.model.config), job.model.config)
    return replace(job, model=replace(job.model, config=config))


def _cut(config: Mapping[str, Any], place: Sequence[str], layers: int) -> dict[str, Any]:
    """The same configuration with another number in one place, and with that much of what is listed by layer."""
    name, *rest = place
    if rest:
        return {**config, name: _cut(config[name], rest, layers)}
    listed = {each: values[:layers] for each, values in _by_layer(config, config[name]).items()}
    return {**config, **listed, name: layers}


def roomy(cluster: Cluster) -> Cluster:
    """The same machines with cards on which everything fits."""
    return replace(cluster, device=cluster.device.with_capacity(ENOUGH_BYTES))


def is_repetitive(job: Job, plan: Plan) -> bool:
    """Whether all steps ask for the same.

    Not where DDP makes its buckets anew in the second step, the first one compiles kernels, a budget is kept by what
    was seen before, or a step does not leave what it found.
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
    """Whether a step, after the first, leaves the blocks behind that it found, in their places.

    Not where a loop holds what the step before returned, lengths are drawn, something happens once besides the steps,
    or a trainer of others makes them, which keeps some of what it made and lets go of what it kept before.
    """
    once = job.eval_batch, job.generate, job.resume != "none", job.save_checkpoint != "none", job.lengths
    return plan.engine == "tonnage" and plan.outputs != "loop" and not any(once)


def micro_batches_alike(job: Job, plan: Plan) -> bool:
    """Whether the micro-batches of a step ask for the same, but for the gradients that the first one makes.

    Not where kernels are compiled, a budget is kept by what was seen before, lengths are drawn, results are kept, or
    what is copied to the host waits there.
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
    """Whether the first micro-batch is like the others, each of which gives back what it has added to its gradients.

    HSDP keeps that until all are averaged among the groups of ranks.  Networks for more than text may keep something
    of the one before, as Qwen's do of where its images are.
    """
    parts = (part for name, part in job.model.config.items() if name.endswith("_config"))
    beside_text = any(isinstance(part, Mapping) and "model_type" in part for part in parts)
    return plan.accum_sync and plan.shard in ("zero2", "zero3") and not beside_text


def _first_and_period(job: Job, plan: Plan) -> tuple[int, int] | None:
    """Layers of the shallowest network, and how many more make the next one like it; None where there are none."""
    layers, config = layers_of(job), job.model.config
    parts = [_at(config, place[:-1]) for place in _places(config)]
    periods = [_period(part, layers) for part in parts]
    unlike = any(part.get(name) for part in parts for name in _UNLIKE)
    if not layers or unlike or None in periods or plan.checkpointing.startswith(_UNEVEN):
        return None
    first = max(int(part.get("first_k_dense_replace") or 0) for part in parts)
    period = lcm(*filter(None, periods), plan.checkpoint_interval or 1)
    if plan.pp > 1:
        stages = plan.pp * (plan.pp_stages if plan.pp_schedule == "interleaved" else 1)
        if first or stages % period:
            return None
        period = stages
    least = first + max(_LEAST_SHARDED if plan.shard in SHARDING else _LEAST, _under_way(plan))
    return least + (layers - least) % period, period


def _under_way(plan: Plan) -> int:
    """Layers whose inputs may be on their way to the host or back at once, where nothing else of them is kept."""
    streamed = plan.checkpointing in ("full", "full-reentrant") and plan.activation_offload in (
        "cpu-streamed",
        "nvme",
    )
    return LEAVING + AHEAD if streamed else 0


def _period(config: Mapping[str, Any], layers: int) -> int | None:
    """After how many of its layers their kinds repeat; None where they do not."""
    stated = [config[name] for name in _STATED if isinstance(config.get(name), int) and config[name] > 0]
    kinds = _by_layer(config, layers)
    listed = "layer_types" in kinds or isinstance(config.get("sliding_window_pattern"), int)
    found = lcm(*stated) if listed else lcm(*stated, _usual_period(str(config.get("model_type"))))
    for each in kinds.values():
        repeats = next((size for size in range(1, len(each)) if each[:-size] == each[size:]), None)
        if repeats is None:
            return None
        found = lcm(found, repeats)
    return found


def _usual_period(kind: str) -> int:
    parts = kind.replace("-", "_").split("_")
    families = ("_".join(parts[: len(parts) - less]) for less in range(len(parts)))
    return next((_PERIODS[family] for family in families if family in _PERIODS), 1)


def _by_layer(config: Mapping[str, Any], layers: int) -> dict[str, list[Any]]:
    """What a configuration lists for each of so many layers: its kind, whether it has positions."""
    return {name: value for name, value in config.items() if isinstance(value, list) and len(value) == layers}
