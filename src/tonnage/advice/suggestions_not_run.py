"""Suggestions for a step that did not fit, most bytes first.

None is run: each is derived from the numbers of the Estimate and of its out-of-memory message, and its bytes are an
upper limit.  The report shows them where no changes were tried.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tonnage.allocator.settings import variable
from tonnage.catalog.optimizers import WHOLE_MOMENTS, find_optimizer
from tonnage.estimates.estimate import Estimate, capacity_bytes, shown_peak, whole
from tonnage.estimates.shortage import Shortage, shortage
from tonnage.mesh import SHARDING
from tonnage.options import spell_option
from tonnage.plans import Plan
from tonnage.trainers import engine_of
from tonnage.units import format_gib, format_size

_MAX_SUGGESTIONS: Final = 4


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """One suggestion."""

    what: str
    """Option or setting to try."""
    why: str
    """Reason, with the bytes that it can save."""
    at_stake_bytes: int
    """Upper limit of the bytes that it can save."""


def suggest(estimate: Estimate) -> list[Suggestion]:
    """Return suggestions that may help, those with the most bytes first; none when the step fits, or for an engine.

    The bytes are upper limits: a new estimate has to confirm them.  Suggestions with fewer bytes than the request
    that failed are omitted.
    """
    if estimate.fits_card or estimate.serving is not None:
        return []
    expandable = _suggest_expandable_segments(estimate)
    least = _parse_shortage(estimate).asked_bytes or shown_peak(estimate).process_bytes // 100
    most = _MAX_SUGGESTIONS if estimate.plan else 2 * _MAX_SUGGESTIONS
    possible = (item for item in _suggest_options(estimate) if _has_setting_for(item.what, estimate.plan))
    ordered = sorted(possible, key=lambda item: -item.at_stake_bytes)
    best = [item for item in ordered if item.at_stake_bytes >= least][: most - 1]
    if expandable is None:
        return best
    return [*best, expandable] if _has_just_begun(estimate) else [expandable, *best]


def _has_just_begun(estimate: Estimate) -> bool:
    """Return True if the card was full before the first backward pass: more requests of this kind would follow."""
    oom = estimate.oom
    if oom is None or oom.phase == "backward":
        return False
    return (oom.step <= 1 and oom.phase in ("load", "forward")) or _missing_moments_bytes(estimate) > 0


def _missing_moments_bytes(estimate: Estimate) -> int:
    """Return the bytes of Adam's two moments that did not exist yet when memory ran out.

    That is the case in the first backward pass and while the moments are created; otherwise 0.  Each moment is as
    large as the gradients.
    """
    oom, held = estimate.oom, estimate.peak.by_category
    if oom is None:
        return 0
    is_creating = any("optim/adam" in frame and "_init_group" in frame for frame in oom.stack)
    is_before = oom.step <= 1 and oom.phase == "backward" and _has_whole_moments(estimate)
    return max(0, 2 * held.get("gradient", 0) - held.get("optimizer_state", 0)) if is_creating or is_before else 0


def _has_whole_moments(estimate: Estimate) -> bool:
    """Return True if the caching allocator holds Adam's two moments, each as large as the gradients."""
    name = estimate.plan.get("optimizer")
    return name in WHOLE_MOMENTS and not find_optimizer(name).is_paged


def _suggest_expandable_segments(estimate: Estimate) -> Suggestion | None:
    """Return the suggestion of expandable segments if the unallocated bytes were enough for the request.

    Not if the whole step needs more than the card even without them.
    """
    capacity = capacity_bytes(estimate)
    if estimate.needed and capacity and estimate.needed.allocated_bytes > capacity:
        return None
    lack = _parse_shortage(estimate)
    requested, cached = lack.asked_bytes, lack.unallocated_bytes
    if requested is None or cached is None or requested > cached + (lack.free_bytes or 0) or _is_expandable(estimate):
        return None
    if _missing_moments_bytes(estimate) > cached:  # the next requests need more than the unallocated bytes
        return None
    name = variable(estimate.versions.get("torch"))
    setting = "--allocator expandable" if estimate.plan else f"{name}=expandable_segments:True"
    return Suggestion(
        what=setting,
        why=f"{format_size(requested)} were requested while {format_size(cached)} were reserved but unallocated, in "
        "blocks that were too small; expandable segments can join such blocks",
        at_stake_bytes=cached,
    )


def _parse_shortage(estimate: Estimate) -> Shortage:
    return shortage(estimate.oom.message if estimate.oom else "")


def _is_expandable(estimate: Estimate) -> bool:
    settings = str(estimate.job.get("allocator_settings", "")).replace(" ", "")
    return estimate.plan.get("allocator") == "expandable" or "expandable_segments:True" in settings


def _suggest_options(estimate: Estimate) -> Iterator[Suggestion]:
    """Yield options of `tonnage estimate`; for a dry-run, what to change in the script."""
    if not estimate.plan:
        yield from _suggest_for_script(estimate)
        return
    held, plan = estimate.peak.by_category, estimate.plan
    activations = held.get("activation", 0)
    if plan.get("checkpointing") == "none" and activations:
        yield Suggestion(
            what="--checkpointing full",
            why=f"activations take {format_gib(activations)}; most of them are recomputed in backward instead",
            at_stake_bytes=activations,
        )
    yield from _suggest_smaller_batch(estimate)
    yield from _suggest_for_states(estimate, held)
    yield from _suggest_for_temporaries(estimate, held)


def _suggest_for_script(estimate: Estimate) -> Iterator[Suggestion]:
    """Yield what usually helps a script, with the bytes of the whole step that each can save at most."""
    peak = shown_peak(estimate)
    held = peak.by_category
    parameters, gradients, states = (held.get(name, 0) for name in ("parameter", "gradient", "optimizer_state"))
    activations, temporaries = held.get("activation", 0), held.get("workspace", 0)
    passing = activations + (temporaries if peak.phase in ("forward", "backward") else 0)
    gpus = whole(estimate.cluster, "gpus") or 1
    is_language_model = str(estimate.model.get("class", "")).endswith(("ForCausalLM", "LMHeadModel"))
    for what, why, at_stake_bytes in (
        ("activation checkpointing", "layers run again in backward instead of keeping activations", activations),
        ("half the batch, twice the accumulation", "activations and temporaries grow with the batch", passing // 2),
        (
            "Liger's loss, or one in slices",
            "the logits of all tokens are among activations and temporaries",
            passing if is_language_model else 0,
        ),
        (
            "AdamW(fused=True)",
            "the update makes temporaries as large as the weights",
            temporaries if peak.phase == "optimizer" else 0,
        ),
        ("an 8-bit optimizer (changes the mathematics)", "moments take a quarter", 3 * states // 4),
        (
            "FSDP2 or ZeRO-3",
            f"weights, gradients and states are divided among {gpus} ranks",
            (parameters + gradients + states) * (gpus - 1) // gpus,
        ),
        (
            "optimizer states in host memory",
            "ZeRO's offload or a paged optimizer; steps take longer",
            states,
        ),
        ("LoRA (changes the mathematics)", "adapters need little of gradients and states", gradients + states),
    ):
        yield Suggestion(what=what, why=f"{why}: at most {format_gib(at_stake_bytes)}", at_stake_bytes=at_stake_bytes)


def _has_setting_for(what: str, plan: Mapping[str, Any]) -> bool:
    """Return True if the plan's engine has a setting for `--option value`, or for a switch."""
    if not plan:  # a script
        return True
    name, _, value = what.removeprefix("--").partition(" ")
    engine = engine_of(Plan(engine=plan.get("engine", "tonnage")))
    return engine.has_setting(name.replace("-", "_"), value or True, None)


def _suggest_smaller_batch(estimate: Estimate) -> Iterator[Suggestion]:
    """Yield half the micro-batch, which saves activations, and temporaries while the model itself runs."""
    held, job = estimate.peak.by_category, estimate.job
    batch, micro_batches = whole(job, "micro_batch") or 1, whole(job, "grad_accum") or 1
    growing, names = held.get("activation", 0), "activations"
    if estimate.peak.phase in ("forward", "backward") and estimate.plan.get("shard") in ("none", "ddp"):
        growing, names = growing + held.get("workspace", 0), "activations and temporaries"
    if batch > 1 and growing:
        kept = f"; --grad-accum {2 * micro_batches} keeps the global batch" if batch % 2 == 0 else ""
        yield Suggestion(
            what=f"--micro-batch {batch // 2}",
            why=f"{names} take {format_gib(growing)}, and most of it grows with the batch{kept}",
            at_stake_bytes=growing // 2,
        )


def _suggest_for_states(estimate: Estimate, held: dict[str, int]) -> Iterator[Suggestion]:
    plan, gpus = estimate.plan, whole(estimate.cluster, "gpus") or 1
    states = [held.get(name, 0) for name in ("parameter", "gradient", "optimizer_state")]
    if gpus > 1 and plan.get("shard") in ("none", "ddp", "zero1", "zero2"):
        yield Suggestion(
            what="--shard zero3",
            why=f"parameters, gradients and optimizer states take {format_gib(sum(states))}; "
            f"they can be divided among {gpus} ranks",
            at_stake_bytes=sum(states) * (gpus - 1) // gpus,
        )
    accumulates = plan.get("shard") in SHARDING and (whole(estimate.job, "grad_accum") or 1) > 1
    if accumulates and gpus > 1 and not plan.get("accum_sync") and states[1]:
        yield Suggestion(
            what="--accum-sync",
            why=f"gradients take {format_gib(states[1])}, unsharded on each rank until the last micro-batch; "
            f"reduced after each micro-batch, they are divided among {gpus} ranks",
            at_stake_bytes=states[1] * (gpus - 1) // gpus,
        )
    if missing := _missing_moments_bytes(estimate):
        yield from _suggest_for_moments(plan, 2 * states[1], missing)
    if estimate.job.get("method") == "full" and sum(states[1:]):
        yield Suggestion(
            what="--method lora",
            why=f"gradients and optimizer states take {format_gib(sum(states[1:]))}; adapters need little of either",
            at_stake_bytes=sum(states[1:]),
        )


def _suggest_for_moments(plan: Mapping[str, Any], moments: int, missing: int) -> Iterator[Suggestion]:
    """Yield Adam's moments on the host, and in 8 bits, as far as the plan's sharding supports it."""
    if missing < moments:
        need = f"take {format_gib(moments)}, of which {format_gib(missing)} were not created yet"
    else:
        need = f"take {format_gib(moments)} or more, and were not created yet"
    by_fsdp = plan.get("shard") in SHARDING and plan.get("engine") != "deepspeed"
    offload = "param_offload" if by_fsdp else "optimizer_offload"
    by_torch = plan.get("shard") == "zero1" and plan.get("engine") != "deepspeed"  # that optimizer stays on the card
    if plan.get(offload) == "none" and not by_torch:
        weights = ", together with the weights" if by_fsdp else ""
        yield Suggestion(
            what=f"--{spell_option(offload)} cpu",
            why=f"Adam's moments {need}; host memory can hold them{weights}",
            at_stake_bytes=moments,
        )
    small, library = ("adamw-8bit-ao", "torchao") if by_fsdp else ("adamw-8bit", "bitsandbytes")
    yield Suggestion(
        what=f"--optimizer {small}",
        why=f"Adam's moments {need}; in 8 bits ({library}, which changes the mathematics) they take a quarter",
        at_stake_bytes=3 * moments // 4,
    )


def _suggest_for_temporaries(estimate: Estimate, held: dict[str, int]) -> Iterator[Suggestion]:
    oom, plan = estimate.oom, estimate.plan
    is_foreach = plan.get("optimizer") in ("adamw", "adamw-foreach")
    if oom is not None and oom.phase == "optimizer" and is_foreach and not _missing_moments_bytes(estimate):
        yield Suggestion(
            what="--optimizer adamw-fused",
            why="memory ran out in the optimizer, whose foreach implementation needs temporaries as large as the "
            f"parameters ({format_gib(held.get('parameter', 0))})",
            at_stake_bytes=held.get("parameter", 0),
        )
    logits = _logits_bytes(estimate)
    requested = _parse_shortage(estimate).asked_bytes
    if plan.get("loss") == "plain" and logits and requested and _is_close(requested, (logits, 2 * logits)):
        yield Suggestion(
            what="--loss chunked",
            why=f"the {format_size(requested)} requested are the size of the logits of one micro-batch",
            at_stake_bytes=requested,
        )
    scores = whole(estimate.model, "scores_bytes")
    if scores and requested and _is_close(requested, (scores, 2 * scores)):
        sparing = str(estimate.model.get("sparing_attention"))
        compiled = ", in kernels that are compiled when training starts" if sparing == "flex" else ""
        yield Suggestion(
            what=f"--attention {sparing}",
            why=f"the {format_size(requested)} requested are the size of one layer's attention scores; {sparing} "
            f"attention stores one block of them at a time{compiled}",
            at_stake_bytes=requested + (held.get("activation", 0) if plan.get("checkpointing") == "none" else 0),
        )


def _logits_bytes(estimate: Estimate) -> int | None:
    """Return the bytes of one micro-batch's logits, two bytes each; None when a dimension is not known."""
    vocabulary = whole(estimate.model, "vocab_size")
    tokens, batch = whole(estimate.job, "seq_len"), whole(estimate.job, "micro_batch")
    return 2 * vocabulary * tokens * batch if vocabulary and tokens and batch else None


def _is_close(requested: int, sizes: tuple[int, ...]) -> bool:
    return any(abs(requested - value) <= value // 100 for value in sizes)
