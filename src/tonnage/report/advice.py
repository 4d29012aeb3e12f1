"""What to try when a step did not fit: only what the Estimate itself shows to be at stake, most bytes first."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tonnage.allocator.settings import variable
from tonnage.estimates.estimate import Estimate
from tonnage.mesh import SHARDING
from tonnage.options import spelled
from tonnage.plans import Plan
from tonnage.report.shortage import Shortage, shortage
from tonnage.report.wording import whole
from tonnage.trainers import engine_of
from tonnage.units import gib, size

_MOST: Final = 4

_WHOLE_MOMENTS: Final = ("adamw", "adamw-loop", "adamw-foreach", "adamw-fused")
"""Optimizers with two moments as large as the gradients."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One thing to try."""

    what: str
    """The option or setting."""
    why: str
    """The bytes it is about."""
    at_stake_bytes: int
    """How many bytes it can touch; an upper limit, not a promise."""


def advice(estimate: Estimate) -> list[Advice]:
    """What could help, most bytes at stake first; empty when it fits.  None of it is a promise: estimate again.

    What touches fewer bytes than were asked for when the card was full is left out.
    """
    if estimate.fits:
        return []
    pieces = _fragmentation(estimate)
    worth = _shortage(estimate).asked_bytes or estimate.peak.process_bytes // 100
    possible = (item for item in _choices(estimate) if _can_be_said(item.what, estimate.plan))
    found = sorted(possible, key=lambda item: -item.at_stake_bytes)
    found = [item for item in found if item.at_stake_bytes >= worth][: _MOST - 1]
    if pieces is None:
        return found
    return [*found, pieces] if _has_just_begun(estimate) else [pieces, *found]


def _has_just_begun(estimate: Estimate) -> bool:
    """True when the card was full before the first backward pass: more requests like this one would follow."""
    oom = estimate.oom
    if oom is None or oom.phase == "backward":
        return False
    return (oom.step <= 1 and oom.phase in ("load", "forward")) or _unmade_states(estimate) > 0


def _unmade_states(estimate: Estimate) -> int:
    """Bytes of Adam's two moments that were still to be made when memory ran out while they were, or in the first
    backward pass; else 0.

    They are as large as the gradients, each.
    """
    oom, held = estimate.oom, estimate.peak.by_category
    if oom is None:
        return 0
    making = any("optim/adam" in frame and "_init_group" in frame for frame in oom.stack)
    before = oom.step <= 1 and oom.phase == "backward" and estimate.plan.get("optimizer") in _WHOLE_MOMENTS
    return max(0, 2 * held.get("gradient", 0) - held.get("optimizer_state", 0)) if making or before else 0


def _fragmentation(estimate: Estimate) -> Advice | None:
    """Expandable segments, when the bytes that lay unused would have been enough for this request."""
    lack = _shortage(estimate)
    asked, cached = lack.asked_bytes, lack.unallocated_bytes
    if asked is None or cached is None or asked > cached + (lack.free_bytes or 0) or _is_expandable(estimate):
        return None
    if _unmade_states(estimate) > cached:  # what would have been asked for next is more than lay unused
        return None
    named = variable(estimate.versions.get("torch"))
    setting = "--allocator expandable" if estimate.plan else f"{named}=expandable_segments:True"
    return Advice(
        what=setting,
        why=f"{size(asked)} were asked for while {size(cached)} lay reserved but unallocated, in pieces too small; "
        "expandable segments can join such pieces",
        at_stake_bytes=cached,
    )


def _shortage(estimate: Estimate) -> Shortage:
    return shortage(estimate.oom.message if estimate.oom else "")


def _is_expandable(estimate: Estimate) -> bool:
    settings = str(estimate.job.get("allocator_settings", "")).replace(" ", "")
    return estimate.plan.get("allocator") == "expandable" or "expandable_segments:True" in settings


def _choices(estimate: Estimate) -> Iterator[Advice]:
    """Options of `tonnage estimate`; a dry-run's script decides for itself, so there are none for it."""
    if not estimate.plan:
        return
    held, plan = estimate.peak.by_category, estimate.plan
    activations = held.get("activation", 0)
    if plan.get("checkpointing") == "none" and activations:
        yield Advice(
            what="--checkpointing full",
            why=f"activations hold {gib(activations)}; most are recomputed in backward instead",
            at_stake_bytes=activations,
        )
    yield from _smaller_batch(estimate)
    yield from _states(estimate, held)
    yield from _temporaries(estimate, held)


def _can_be_said(what: str, plan: Mapping[str, Any]) -> bool:
    """Whether the engine of the plan has words for `--option value`, or for a switch."""
    name, _, value = what.removeprefix("--").partition(" ")
    engine = engine_of(Plan(engine=plan.get("engine", "tonnage")))
    return engine.has_words(name.replace("-", "_"), value or True, None)


def _smaller_batch(estimate: Estimate) -> Iterator[Advice]:
    """Half the micro-batch, for what grows with it: activations, and temporaries while the model itself runs."""
    held, job = estimate.peak.by_category, estimate.job
    batch, micro_batches = whole(job, "micro_batch") or 1, whole(job, "grad_accum") or 1
    growing, names = held.get("activation", 0), "activations"
    if estimate.peak.phase in ("forward", "backward") and estimate.plan.get("shard") in ("none", "ddp"):
        growing, names = growing + held.get("workspace", 0), "activations and temporaries"
    if batch > 1 and growing:
        kept = f"; --grad-accum {2 * micro_batches} keeps the global batch" if batch % 2 == 0 else ""
        yield Advice(
            what=f"--micro-batch {batch // 2}",
            why=f"{names} hold {gib(growing)}, and most of it grows with the batch{kept}",
            at_stake_bytes=growing // 2,
        )


def _states(estimate: Estimate, held: dict[str, int]) -> Iterator[Advice]:
    plan, gpus = estimate.plan, whole(estimate.cluster, "gpus") or 1
    states = [held.get(name, 0) for name in ("parameter", "gradient", "optimizer_state")]
    if gpus > 1 and plan.get("shard") in ("none", "ddp", "zero1", "zero2"):
        yield Advice(
            what="--shard zero3",
            why=f"parameters, gradients and optimizer states hold {gib(sum(states))}; "
            f"they can be divided among {gpus} ranks",
            at_stake_bytes=sum(states) * (gpus - 1) // gpus,
        )
    waiting = plan.get("shard") in SHARDING and (whole(estimate.job, "grad_accum") or 1) > 1
    if waiting and gpus > 1 and not plan.get("accum_sync") and states[1]:
        yield Advice(
            what="--accum-sync",
            why=f"gradients hold {gib(states[1])}, whole on each rank until the last micro-batch; averaged after "
            f"each, they are divided among {gpus} ranks",
            at_stake_bytes=states[1] * (gpus - 1) // gpus,
        )
    if unmade := _unmade_states(estimate):
        yield from _elsewhere_or_smaller(plan, 2 * states[1], unmade)
    if estimate.job.get("method") == "full" and sum(states[1:]):
        yield Advice(
            what="--method lora",
            why=f"gradients and optimizer states hold {gib(sum(states[1:]))}; adapters have few of either",
            at_stake_bytes=sum(states[1:]),
        )


def _elsewhere_or_smaller(plan: Mapping[str, Any], moments: int, unmade: int) -> Iterator[Advice]:
    """Adam's moments on the host, or of 8 bits, by what the plan's way to divide takes."""
    take = (
        f"take {gib(moments)}, of which {gib(unmade)} were" if unmade < moments else f"take {gib(moments)} or more,"
    )
    by_fsdp = plan.get("shard") in SHARDING and plan.get("engine") != "deepspeed"
    offload = "param_offload" if by_fsdp else "optimizer_offload"
    by_torch = plan.get("shard") == "zero1" and plan.get("engine") != "deepspeed"  # whose optimizer stays on the card
    if plan.get(offload) == "none" and not by_torch:
        along = ", weights along with them" if by_fsdp else ""
        yield Advice(
            what=f"--{spelled(offload)} cpu",
            why=f"Adam's moments {take} still to be made; the host can hold them{along}",
            at_stake_bytes=moments,
        )
    small, library = ("adamw-8bit-ao", "torchao") if by_fsdp else ("adamw-8bit", "bitsandbytes")
    yield Advice(
        what=f"--optimizer {small}",
        why=f"Adam's moments {take} still to be made; of 8 bits ({library}, another mathematics) a fourth of it",
        at_stake_bytes=3 * moments // 4,
    )


def _temporaries(estimate: Estimate, held: dict[str, int]) -> Iterator[Advice]:
    oom, plan = estimate.oom, estimate.plan
    foreach = plan.get("optimizer") in ("adamw", "adamw-foreach")
    if oom is not None and oom.phase == "optimizer" and foreach and not _unmade_states(estimate):
        yield Advice(
            what="--optimizer adamw-fused",
            why="it ran out in the optimizer, where the foreach implementation makes temporaries as large as the "
            f"parameters ({gib(held.get('parameter', 0))})",
            at_stake_bytes=held.get("parameter", 0),
        )
    logits = _logits_bytes(estimate)
    asked = _shortage(estimate).asked_bytes
    if plan.get("loss") == "plain" and logits and asked and _close(asked, (logits, 2 * logits)):
        yield Advice(
            what="--loss chunked",
            why=f"the {size(asked)} asked for are as large as the logits of one micro-batch",
            at_stake_bytes=asked,
        )
    scores = whole(estimate.model, "scores_bytes")
    if scores and asked and _close(asked, (scores, 2 * scores)):
        sparing = str(estimate.model.get("sparing_attention"))
        compiled = ", in kernels that are compiled when training starts" if sparing == "flex" else ""
        yield Advice(
            what=f"--attention {sparing}",
            why=f"the {size(asked)} asked for are as large as one layer's attention scores; {sparing} attention has "
            f"a block of them at a time{compiled}",
            at_stake_bytes=asked + (held.get("activation", 0) if plan.get("checkpointing") == "none" else 0),
        )


def _logits_bytes(estimate: Estimate) -> int | None:
    """Logits of one micro-batch in two bytes each; None when a dimension is not known."""
    vocabulary = whole(estimate.model, "vocab_size")
    tokens, batch = whole(estimate.job, "seq_len"), whole(estimate.job, "micro_batch")
    return 2 * vocabulary * tokens * batch if vocabulary and tokens and batch else None


def _close(asked: int, sizes: tuple[int, ...]) -> bool:
    return any(abs(asked - value) <= value // 100 for value in sizes)
