"""The targets of `tonnage export`: a plan in the settings of the trainers that people use.

`export_plan` returns the files of a plan for one of TARGETS; `reread.check` has the trainer read them back.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import Field, replace
from typing import TYPE_CHECKING, Any, Final

from tonnage.case import Case
from tonnage.catalog.devices import spell_options
from tonnage.catalog.optimizers import OPTIMIZERS, Optimizer, find_optimizer
from tonnage.errors import UsageError
from tonnage.options import options, spell_option
from tonnage.trainers.accelerate.write import ACCELERATE_TARGET
from tonnage.trainers.axolotl.write import AXOLOTL_TARGET
from tonnage.trainers.deepspeed.write import DEEPSPEED_TARGET
from tonnage.trainers.hf_trainer.write import HF_TRAINER_TARGET
from tonnage.trainers.llama_factory.write import LLAMA_FACTORY_TARGET
from tonnage.trainers.loop.write import TORCHRUN_TARGET
from tonnage.trainers.megatron.write import MEGATRON_BRIDGE_TARGET
from tonnage.trainers.target import Export, ExportRequest, NotExpressed, Target, Unexpressed
from tonnage.trainers.torchtitan.write import TORCHTITAN_TARGET
from tonnage.trainers.trl.write import TRL_TARGET

if TYPE_CHECKING:
    from tonnage.cluster import Cluster
    from tonnage.plans import Plan

TARGETS: Final[tuple[Target, ...]] = (
    HF_TRAINER_TARGET,
    TRL_TARGET,
    ACCELERATE_TARGET,
    DEEPSPEED_TARGET,
    TORCHRUN_TARGET,
    TORCHTITAN_TARGET,
    AXOLOTL_TARGET,
    LLAMA_FACTORY_TARGET,
    MEGATRON_BRIDGE_TARGET,
)

AXES: Final = ("tp", "pp", "cp", "ep")
"""Options that divide the ranks."""

REFUSED: Final = ("method", *AXES)
"""Options that have no substitute: without them it would be another job, or one of other ranks."""

DECIDED: Final = ("engine", "global_batch_tokens")
"""Options that the export itself decides."""

QUANTIZED: Final = ("quant", "unquantized_dtype")
"""Options that have an effect under method qlora alone."""

SUBSTITUTES: Final[Mapping[str, tuple[str, ...]]] = {
    "checkpointing": ("full",),
    "precision": ("bf16-mixed", "bf16-true", "megatron-bf16", "fp32"),
    "precision=fp16-true": ("bf16-true", "fp16-mixed"),
    "loss": ("chunked", "liger", "fused", "torch"),
    "loss=plain": ("plain", "chunked"),
    "attention": ("auto", "flash", "flex"),
    "unquantized_dtype": ("fp32", "compute"),
    "optimizer_offload": ("cpu",),
    "optimizer_offload=nvme": ("nvme", "cpu"),
    "activation_offload": ("cpu",),
    "param_offload": ("cpu",),
}
"""The values to write in place of one that a target has no setting for: the first that it has, else the default.

They are the nearest by memory: full checkpointing keeps no more than any other choice, and no loss but the plain one
has all logits.
"""

SHARDS: Final = ("ddp", "zero1", "zero2", "hsdp", "zero3")
"""Ways to divide, from the most memory to the least: the substitute is the next that needs less, else the nearest."""

Substitutes = Mapping[str, tuple[Any, str]]
"""The value that is written in place of each option's own, and why."""


def find_target(name: str) -> Target:
    """Return the target of that name.  Raises UsageError with those that there are."""
    for known in TARGETS:
        if known.name == name:
            return known
    raise UsageError(f"Unknown target {name!r}; possible: {', '.join(known.name for known in TARGETS)}.")


def export_plan(case: Case, model: str, to: Target) -> Export:
    """Return the plan in the settings of a target; nothing is written to disk.

    `model` is the user's name of the network.  Raises UsageError where nothing of use could be written.
    """
    from tonnage.techniques import environment
    from tonnage.trainers import checks, image_rows

    job, plan, cluster = case.job, case.plan, case.cluster
    checks.check_network(job, to)
    checks.check_cluster(cluster, to.name)
    substitutes = _find_substitutes(case, model, to)
    data_parallel = checks.data_parallel(plan, cluster)
    request = ExportRequest(
        job=_with_substitutes(job, substitutes).on_ranks(data_parallel),
        plan=_with_substitutes(plan, substitutes),
        cluster=cluster,
        model=checks.loadable_name(job, model),
        image_row=image_rows.describe_row(job) if to.reads_images and checks.reads_images(job) else None,
    )
    checks.check_plan(request, to)
    written = to.write(request)
    variables = {**environment(request.plan), **written.environment}
    setting_variables = shlex.join(["env", *(f"{name}={value}" for name, value in variables.items())])
    return Export(
        target=to.name,
        files=written.files,
        command=(f"{setting_variables} " if variables else "") + shlex.join(written.command),
        settings=written.settings,
        notes=(*written.notes, *_note_without_bf16(request.plan, cluster)),
        unexpressed=tuple(
            Unexpressed(
                option=spell_option(name),
                value=spell_value(getattr(job if hasattr(job, name) else plan, name)),
                why=why,
                instead=spell_value(new),
            )
            for name, (new, why) in substitutes.items()
        ),
        job=request.job,
        plan=request.plan,
    )


def nearest(case: Case, model: str, to: Target) -> Case:
    """Return the case with the nearest values that the target has settings for, on one rank of each axis it has not.

    These may contradict one another.  Raises UsageError for another method of training.
    """
    plan = case.plan
    axes: dict[str, Any] = {name: 1 for name in AXES if not to.has_setting(name, getattr(plan, name), 1)}
    case = replace(case.with_accumulation(), plan=replace(plan, **axes))
    substitutes = _find_substitutes(case, model, to)
    return Case(_with_substitutes(case.job, substitutes), _with_substitutes(case.plan, substitutes), case.cluster)


def _with_substitutes(value: Any, substitutes: Substitutes) -> Any:
    """Return a job or a plan with the substitutes of its fields."""
    return replace(value, **{name: new for name, (new, _) in substitutes.items() if hasattr(value, name)})


def _note_without_bf16(written: Plan, cluster: Cluster) -> tuple[str, ...]:
    """Return the note that bf16 is written for a card without it."""
    lacking = cluster.device.without_bf16 if written.precision.startswith("bf16") else ""
    return (f"{lacking}; torch goes by way of fp32, far slower: plan with precision fp16-mixed.",) if lacking else ()


def _find_substitutes(case: Case, model: str, to: Target) -> Substitutes:
    """Return the options that the target has no setting for, or not for this job, with what is written instead.

    In place of fp16-mixed a target may get bf16-mixed, for which it has a setting under adapters alone: the target's
    own substitutes are those of what is written.
    """
    job, plan = case.job, case.plan
    substitutes: dict[str, tuple[Any, str]] = {}
    for owner in (job, plan):
        for item, _ in options(type(owner)):
            value = getattr(owner, item.name)
            is_unused = item.name in QUANTIZED and job.method != "qlora"
            is_text_alone = item.name == "images" and job.images == 0  # which rows of text express
            if is_unused or is_text_alone or item.name in DECIDED or to.has_setting(item.name, value, item.default):
                continue
            reason = to.explain(item.name, value)
            if item.name in REFUSED:
                error = UsageError if item.name == "method" else NotExpressed
                raise error(
                    f"{to.name} cannot do {spell_option(item.name)} {value} ({reason}); plan without it: "
                    f"{_search_command(case, model, to, item)}."
                )
            substitutes[item.name] = (_substitute(to, item, value), reason)
    written = (_with_substitutes(job, substitutes), _with_substitutes(plan, substitutes))
    substitutes |= {name: (new, why) for name, (why, new) in to.overrides(*written).items()}
    precision, reason = substitutes.get("precision", ("", ""))
    if precision.startswith("bf16") and case.cluster.device.without_bf16 and plan.precision.startswith("fp16"):
        substitutes["precision"] = "fp32", reason
    return substitutes


def _search_command(case: Case, model: str, to: Target, item: Field[Any]) -> str:
    """Return the command of a search whose plans the target can express."""
    without = f"--without {spell_option(item.name)}"
    if item.name == "method":  # methods are not left out but compared
        without = f"--method {','.join(to.expresses.get('method', (str(item.default),)))}"
    return f"tonnage plan {shlex.quote(model)} {spell_options(case.cluster)} --seq-len {case.job.seq_len} {without}"


def _substitute(to: Target, item: Field[Any], value: Any) -> Any:
    """Return the value that is written in place of one that the target has no setting for."""
    known = to.expresses.get(item.name)
    if known is None:
        return item.default
    kind = str(value).partition("=")[0]
    nearest = {"shard": _nearest_shards, "optimizer": _nearest_optimizers}.get(item.name)
    listed = SUBSTITUTES.get(f"{item.name}={kind}", SUBSTITUTES.get(item.name, ()))
    candidates = (*(nearest(value) if nearest else listed), item.default)
    return next((word for word in candidates if to.has_setting(item.name, word, item.default)), known[0])


def _nearest_shards(value: str) -> tuple[str, ...]:
    """Return the other ways to divide, the nearest first."""
    if value not in SHARDS:
        return ()
    index = SHARDS.index(value)
    return (*SHARDS[index + 1 :], *reversed(SHARDS[:index]))


def _nearest_optimizers(value: str) -> tuple[str, ...]:
    """Return the other optimizers, the nearest first: of its update rule, with no larger states, of their size."""
    replaced = find_optimizer(value)

    def distance(other: Optimizer) -> tuple[bool, bool, float]:
        more = _state_bytes(other) - _state_bytes(replaced)
        return other.family != replaced.family, more > 0, abs(more)

    near = sorted(OPTIMIZERS, key=distance)
    same_rule = tuple(other.name for other in near if other.family == replaced.family)
    return (*same_rule, "adamw", "adamw-fused")


def _state_bytes(optimizer: Optimizer) -> float:
    """Return the bytes of an optimizer's states for each element of an fp32 parameter."""
    return optimizer.state_bytes(2**16, 4) / 2**16


def spell_value(value: Any) -> str:
    """Return a value of an option as messages have it."""
    if isinstance(value, tuple):
        return ",".join(value) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)


__all__ = [
    "TARGETS",
    "Export",
    "ExportRequest",
    "NotExpressed",
    "Target",
    "Unexpressed",
    "export_plan",
    "find_target",
    "nearest",
    "spell_value",
]
