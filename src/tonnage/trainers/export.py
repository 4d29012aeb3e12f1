"""Plans in the words of the trainers that people use: `export` writes one, `check` reads it back."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from tonnage.errors import UsageError
from tonnage.options import options, spelled
from tonnage.trainers.accelerate import write as accelerate
from tonnage.trainers.axolotl import write as axolotl
from tonnage.trainers.deepspeed import write as deepspeed
from tonnage.trainers.hf_trainer import write as hf_trainer
from tonnage.trainers.llama_factory import write as llama_factory
from tonnage.trainers.loop import write as torchrun
from tonnage.trainers.megatron import write as megatron_bridge
from tonnage.trainers.target import Export, File, Target, Unexpressed, Wish
from tonnage.trainers.torchtitan import write as torchtitan
from tonnage.trainers.trl import write as trl

if TYPE_CHECKING:
    from tonnage.case import Case
    from tonnage.cluster import Cluster
    from tonnage.job import Job
    from tonnage.plans import Plan

TARGETS: Final[tuple[Target, ...]] = (
    hf_trainer.HF_TRAINER,
    trl.TRL,
    accelerate.ACCELERATE,
    deepspeed.DEEPSPEED,
    torchrun.TORCHRUN,
    torchtitan.TORCHTITAN,
    axolotl.AXOLOTL,
    llama_factory.LLAMA_FACTORY,
    megatron_bridge.MEGATRON_BRIDGE,
)

REFUSED: Final = ("method", "tp", "pp", "cp", "ep")
"""Options without which it would be another job: nothing can be said in their place."""

DECIDED: Final = ("engine", "global_batch_tokens")
"""Options that the export itself decides."""

QUANTIZED: Final = ("quant", "unquantized_dtype")
"""Options that say something under method qlora alone."""

INSTEAD: Final[dict[str, tuple[str, ...]]] = {
    "checkpointing": ("full",),
    "optimizer": ("adamw", "adamw-fused"),
    "precision": ("bf16-mixed", "bf16-true", "megatron-bf16", "fp32"),
    "loss": ("plain", "chunked"),
    "attention": ("auto", "flash", "flex"),
    "unquantized_dtype": ("fp32", "compute"),
    "allocator": ("default",),
}
"""What is said in place of a value that a target has no words for: the first that it has, else the default.

Of checkpointing that is something which keeps no more memory than any other choice.
"""

SHARDS: Final = ("ddp", "zero1", "zero2", "hsdp", "zero3")
"""Ways to divide, from the most memory to the least: in place of one the next that needs less, else the nearest."""


def target(name: str) -> Target:
    """The target of that name.  Raises UsageError with those that there are."""
    for known in TARGETS:
        if known.name == name:
            return known
    raise UsageError(f"Unknown target {name!r}; possible: {', '.join(known.name for known in TARGETS)}.")


def export(case: Case, model: str, to: Target) -> Export:
    """The plan in the words of a target; nothing is written to disk.

    `model` is what the user calls the network.  Raises UsageError where nothing of use could be said.
    """
    job, plan, cluster = case.job, case.plan, case.cluster
    from tonnage.techniques import environment
    from tonnage.trainers import image_rows as seeing
    from tonnage.trainers import launching

    launching.check_network(job, to)
    launching.check_cluster(cluster, to.name)
    besides = to.besides(job, plan)
    missing = _settled(tuple(_unexpressed(job, plan, to, besides)), job, plan, to)
    wish = Wish(
        job=replace(job, **{item.name: new for item, new in missing if hasattr(job, item.name)}).on_ranks(
            launching.data_parallel(plan, cluster)
        ),
        plan=replace(plan, **{item.name: new for item, new in missing if hasattr(plan, item.name)}),
        cluster=cluster,
        model=launching.loadable(job, model),
        seen=seeing.asked(job) if to.sees and launching.reads_images(job) else None,
    )
    launching.check_plan(wish, to)
    written = to.write(wish)
    variables = {**environment(wish.plan), **written.environment}
    return Export(
        target=to.name,
        files=written.files,
        command=shlex.join([*(["env"] if variables else []), *(f"{n}={v}" for n, v in variables.items())])
        + (" " if variables else "")
        + shlex.join(written.command),
        settings=written.settings,
        notes=(
            *written.notes,
            *_without_bf16(wish.plan, plan, to, cluster),
            *_estimated_elsewhere(plan, to, _in_their_place(job, plan, missing)),
        ),
        unexpressed=tuple(
            _said(to, item.name, getattr(job if hasattr(job, item.name) else plan, item.name), new, besides)
            for item, new in missing
        ),
    )


def _without_bf16(written: Plan, plan: Plan, to: Target, cluster: Cluster) -> tuple[str, ...]:
    """That the card has no bf16, which is written: as planned, or since the target has no words for what is."""
    lacking = cluster.device.without_bf16 if written.precision.startswith("bf16") else ""
    if not lacking:
        return ()
    instead = "plan with precision fp16-mixed"
    if not plan.precision.startswith("bf16"):
        instead = f"{to.name} has no words for {plan.precision}, export to another target"
    return (f"{lacking}; torch goes by way of fp32, far slower: {instead}.",)


def _in_their_place(job: Job, plan: Plan, missing: Sequence[tuple[Any, Any]]) -> str:
    """Options of `estimate` for what is written in place of what the target has no words for."""
    said = []
    for item, new in missing:
        old = getattr(job if hasattr(job, item.name) else plan, item.name)
        if isinstance(new, str) and new != old:
            said.append(f" --{spelled(item.name)} {new}")
    return "".join(said)


def _unexpressed(job: Job, plan: Plan, to: Target, besides: Any) -> Any:
    """The fields that the target has no words for, each with what is said in its place."""
    for value in (job, plan):
        for item, _ in options(type(value)):
            found = getattr(value, item.name)
            unused = item.name in QUANTIZED and job.method != "qlora"
            text_alone = item.name == "images" and job.images == 0  # which is said by rows of text
            if unused or text_alone or item.name in DECIDED or to.has_words(item.name, found, item.default):
                continue
            if item.name in REFUSED:
                raise UsageError(
                    f"{to.name} has no words for {spelled(item.name)} {found}{_because(to, item.name, found)}; "
                    f"plan without it: tonnage plan MODEL {_without(to, item)}."
                )
            yield item, _in_its_place(to, item, found)
    both = (*options(type(job)), *options(type(plan)))
    for option, (_, new) in besides.items():
        yield next(item for item, _ in both if item.name == option), new


def _without(to: Target, item: Any) -> str:
    """Options of a search whose plans the target has words for; methods are not left out but compared."""
    if item.name == "method":
        return f"--method {','.join(to.expresses.get('method', (item.default,)))}"
    engine = f", or --engine {to.engine}" if to.engine not in (None, "tonnage") else ""
    return f"--without {spelled(item.name)}{engine}"


def _settled(missing: Any, job: Job, plan: Plan, to: Target) -> Any:
    """What is said in the place of others may have no words either: axolotl's bf16-mixed, in that of fp16-mixed."""
    changed: dict[str, Any] = {item.name: new for item, new in missing}
    again = to.besides(
        replace(job, **{name: new for name, new in changed.items() if hasattr(job, name)}),
        replace(plan, **{name: new for name, new in changed.items() if hasattr(plan, name)}),
    )
    return tuple((item, again[item.name][1] if item.name in again else new) for item, new in missing)


def _in_its_place(to: Target, item: Any, value: Any) -> Any:
    known = to.expresses.get(item.name)
    if known is None:
        return item.default
    instead = _other_shards(value) if item.name == "shard" else INSTEAD.get(item.name, ())
    wanted = (*instead, item.default)
    return next((value for value in wanted if to.has_words(item.name, value, item.default)), known[0])


def _other_shards(value: str) -> tuple[str, ...]:
    """The other ways to divide, the most like one first."""
    if value not in SHARDS:
        return ()
    place = SHARDS.index(value)
    return (*SHARDS[place + 1 :], *reversed(SHARDS[:place]))


def _because(to: Target, option: str, value: Any) -> str:
    reason = to.why.get(f"{option}={value}", to.why.get(option))
    return f" ({reason})" if reason else ""


def _said(to: Target, option: str, value: Any, new: Any, besides: Any) -> Unexpressed:
    general = to.why.get(f"{option}={value}", to.why.get(option, f"{to.name} has no setting for it"))
    reason = besides[option][0] if option in besides else general
    return Unexpressed(option=spelled(option), value=_shown(value), why=reason, instead=_shown(new))


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(value) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)


def _estimated_elsewhere(plan: Plan, to: Target, instead: str) -> tuple[str, ...]:
    """The plan's own estimate is that of whoever ran it."""
    if plan.engine == (to.engine or "tonnage"):
        return ()
    if to.beneath is not None:
        return (
            f"{to.name} stands on what engine {to.beneath(plan)} runs; what it needs itself: "
            "tonnage dry-run --gpu NAME -- and the command above.",
        )
    if to.engine is None:
        return (f"{to.name} is not run on a ghost: its own memory may differ from the plan's estimate.",)
    return (
        f"The plan was estimated with engine {plan.engine}; what {to.name} itself needs: "
        f"tonnage estimate --plan FILE --engine {to.engine}{instead}.",
    )


__all__ = ["TARGETS", "Export", "File", "Target", "Unexpressed", "Wish", "export", "target"]
