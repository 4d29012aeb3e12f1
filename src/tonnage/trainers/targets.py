"""The targets of `tonnage export`: a plan in the settings of the trainers that people use.

`export_plan` returns the files of a plan for one of TARGETS; `reread.check` has the trainer read them back.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, replace
from typing import TYPE_CHECKING, Any, Final

from tonnage.errors import UsageError
from tonnage.options import options, spell_option
from tonnage.trainers.accelerate.write import ACCELERATE
from tonnage.trainers.axolotl.write import AXOLOTL
from tonnage.trainers.deepspeed.write import DEEPSPEED
from tonnage.trainers.hf_trainer.write import HF_TRAINER
from tonnage.trainers.llama_factory.write import LLAMA_FACTORY
from tonnage.trainers.loop.write import TORCHRUN
from tonnage.trainers.megatron.write import MEGATRON_BRIDGE
from tonnage.trainers.target import Export, ExportRequest, File, Target, Unexpressed
from tonnage.trainers.torchtitan.write import TORCHTITAN
from tonnage.trainers.trl.write import TRL

if TYPE_CHECKING:
    from tonnage.case import Case
    from tonnage.cluster import Cluster
    from tonnage.job import Job
    from tonnage.plans import Plan

TARGETS: Final[tuple[Target, ...]] = (
    HF_TRAINER,
    TRL,
    ACCELERATE,
    DEEPSPEED,
    TORCHRUN,
    TORCHTITAN,
    AXOLOTL,
    LLAMA_FACTORY,
    MEGATRON_BRIDGE,
)

REFUSED: Final = ("method", "tp", "pp", "cp", "ep")
"""Options that have no substitute: without them it would be another job."""

DECIDED: Final = ("engine", "global_batch_tokens")
"""Options that the export itself decides."""

QUANTIZED: Final = ("quant", "unquantized_dtype")
"""Options that have an effect under method qlora alone."""

SUBSTITUTES: Final[Mapping[str, tuple[str, ...]]] = {
    "checkpointing": ("full",),
    "optimizer": ("adamw", "adamw-fused"),
    "precision": ("bf16-mixed", "bf16-true", "megatron-bf16", "fp32"),
    "loss": ("plain", "chunked"),
    "attention": ("auto", "flash", "flex"),
    "unquantized_dtype": ("fp32", "compute"),
    "allocator": ("default",),
}
"""The values to write in place of one that a target has no setting for: the first that it has, else the default.

That of checkpointing keeps no more memory than any other choice.
"""

SHARDS: Final = ("ddp", "zero1", "zero2", "hsdp", "zero3")
"""Ways to divide, from the most memory to the least: the substitute is the next that needs less, else the nearest."""

Missing = Sequence[tuple["Field[Any]", Any]]
"""Fields that a target has no setting for, each with the value that is written in its place."""

Overrides = Mapping[str, tuple[str, Any]]
"""The answer of `Target.overrides`: the reason and the value that is written instead, by option."""


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
    overrides = to.overrides(job, plan)
    missing = _settle(tuple(_find_missing(job, plan, to, overrides)), job, plan, to)
    data_parallel = checks.data_parallel(plan, cluster)
    request = ExportRequest(
        job=_with_substitutes(job, missing).on_ranks(data_parallel),
        plan=_with_substitutes(plan, missing),
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
        notes=(
            *written.notes,
            *_note_without_bf16(request.plan, plan, to, cluster),
            *_note_estimate(plan, to, _substitute_options(job, plan, missing)),
        ),
        unexpressed=tuple(
            _describe(to, item.name, getattr(job if hasattr(job, item.name) else plan, item.name), new, overrides)
            for item, new in missing
        ),
    )


def _with_substitutes(value: Any, missing: Missing) -> Any:
    """Return a job or a plan with the substitutes of its fields."""
    return replace(value, **{item.name: new for item, new in missing if hasattr(value, item.name)})


def _note_without_bf16(written: Plan, plan: Plan, to: Target, cluster: Cluster) -> tuple[str, ...]:
    """Return the note that bf16 is written for a card without it: the plan's own, or a substitute of the target."""
    lacking = cluster.device.without_bf16 if written.precision.startswith("bf16") else ""
    if not lacking:
        return ()
    instead = "plan with precision fp16-mixed"
    if not plan.precision.startswith("bf16"):
        instead = f"{to.name} has no setting for {plan.precision}, export to another target"
    return (f"{lacking}; torch goes by way of fp32, far slower: {instead}.",)


def _substitute_options(job: Job, plan: Plan, missing: Missing) -> str:
    """Return the substitutes as options of `tonnage estimate`."""
    arguments = []
    for item, new in missing:
        old = getattr(job if hasattr(job, item.name) else plan, item.name)
        if isinstance(new, str) and new != old:
            arguments.append(f" --{spell_option(item.name)} {new}")
    return "".join(arguments)


def _find_missing(job: Job, plan: Plan, to: Target, overrides: Overrides) -> Iterator[tuple[Field[Any], Any]]:
    """Yield the fields that the target has no setting for, each with its substitute."""
    for owner in (job, plan):
        for item, _ in options(type(owner)):
            value = getattr(owner, item.name)
            is_unused = item.name in QUANTIZED and job.method != "qlora"
            is_text_alone = item.name == "images" and job.images == 0  # which rows of text express
            if is_unused or is_text_alone or item.name in DECIDED or to.has_setting(item.name, value, item.default):
                continue
            if item.name in REFUSED:
                raise UsageError(
                    f"{to.name} has no setting for {spell_option(item.name)} {value}{_reason(to, item.name, value)}; "
                    f"plan without it: tonnage plan MODEL {_search_options(to, item)}."
                )
            yield item, _substitute(to, item, value)
    fields = {item.name: item for owner in (job, plan) for item, _ in options(type(owner))}
    for option, (_, new) in overrides.items():
        yield fields[option], new


def _search_options(to: Target, item: Field[Any]) -> str:
    """Return options of a search whose plans the target can express; methods are not left out but compared."""
    if item.name == "method":
        return f"--method {','.join(to.expresses.get('method', (str(item.default),)))}"
    engine = f", or --engine {to.engine}" if to.engine not in (None, "tonnage") else ""
    return f"--without {spell_option(item.name)}{engine}"


def _settle(missing: Missing, job: Job, plan: Plan, to: Target) -> Missing:
    """Return the substitutes with those of substitutes that the target cannot express for this job.

    In place of fp16-mixed axolotl would get bf16-mixed, for which it has a setting under adapters alone.
    """
    again = to.overrides(_with_substitutes(job, missing), _with_substitutes(plan, missing))
    return tuple((item, again[item.name][1] if item.name in again else new) for item, new in missing)


def _substitute(to: Target, item: Field[Any], value: Any) -> Any:
    """Return the value that is written in place of one that the target has no setting for."""
    known = to.expresses.get(item.name)
    if known is None:
        return item.default
    preferred = _nearest_shards(value) if item.name == "shard" else SUBSTITUTES.get(item.name, ())
    candidates = (*preferred, item.default)
    return next((word for word in candidates if to.has_setting(item.name, word, item.default)), known[0])


def _nearest_shards(value: str) -> tuple[str, ...]:
    """Return the other ways to divide, the nearest first."""
    if value not in SHARDS:
        return ()
    index = SHARDS.index(value)
    return (*SHARDS[index + 1 :], *reversed(SHARDS[:index]))


def _reason(to: Target, option: str, value: Any) -> str:
    reason = to.why.get(f"{option}={value}", to.why.get(option))
    return f" ({reason})" if reason else ""


def _describe(to: Target, option: str, value: Any, new: Any, overrides: Overrides) -> Unexpressed:
    general = to.why.get(f"{option}={value}", to.why.get(option, f"{to.name} has no setting for it"))
    reason = overrides[option][0] if option in overrides else general
    return Unexpressed(option=spell_option(option), value=_shown(value), why=reason, instead=_shown(new))


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(value) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)


def _note_estimate(plan: Plan, to: Target, substitutes: str) -> tuple[str, ...]:
    """Return the note that the plan's estimate is that of another engine, and how to get the target's own."""
    if plan.engine == (to.engine or "tonnage"):
        return ()
    if to.base_engine is not None:
        return (
            f"{to.name} is built on what engine {to.base_engine(plan)} runs; what it needs itself: "
            "tonnage dry-run --gpu NAME -- and the command above.",
        )
    if to.engine is None:
        return (f"{to.name} is not run on a ghost: its own memory may differ from the plan's estimate.",)
    return (
        f"The plan was estimated with engine {plan.engine}; what {to.name} itself needs: "
        f"tonnage estimate --plan FILE --engine {to.engine}{substitutes}.",
    )


__all__ = ["TARGETS", "Export", "ExportRequest", "File", "Target", "Unexpressed", "export_plan", "find_target"]
