"""Changes that may help a case, by what holds the bytes at its peak.

Each change has an upper limit of what it can gain, derived from the categories at the peak: checkpointing gains no
more than the activations, ZeRO-3 on N ranks no more than (N - 1) / N of parameters, gradients and states.

    for change in list_changes(case, peak):
        apply(change, case)     # the changed case
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from typing import Any, Final

from tonnage.case import Case
from tonnage.catalog.optimizers import WHOLE_MOMENTS
from tonnage.cluster import Cluster
from tonnage.errors import CannotEstimate, UsageError
from tonnage.estimates.estimate import Host, Peak
from tonnage.job import Job
from tonnage.mesh import SHARDING
from tonnage.timing.scores import find_sparing_attention
from tonnage.trainers.cases import check

LEAST_PART: Final = 0.01
"""A change whose upper limit is less than this part of the peak is not worth a run."""

SHORTEST: Final = 512
"""Tokens below which no shorter sequence is proposed."""

_JOB_FIELDS: Final = frozenset(item.name for item in fields(Job))

_OFFLOADS: Final = frozenset(("activation_offload", "optimizer_offload", "param_offload"))
"""Options that move data to the host."""

_STATES: Final = ("parameter", "gradient", "optimizer_state")
"""Categories of what exists once for each weight."""

_WHOLE: Final = Fraction(1)
_HALF: Final = Fraction(1, 2)

_LISTED: Final = ("adamw", "adamw-foreach")
"""Optimizers whose update makes temporaries as large as the parameters."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Options with new values."""

    options: Mapping[str, Any]
    """Fields of Job and Plan by name."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """Upper limit of the bytes that it gains, by category."""
    cluster: Cluster | None = field(default=None)
    """Other cards; None: the same."""
    changes_mathematics: bool = False
    """True if training computes something else, or sees other data in a step."""

    @property
    def limit_bytes(self) -> int:
        """Return the upper limit of the bytes that it gains."""
        return sum(self.limits.values())

    @property
    def is_slow(self) -> bool:
        """Return True if the host's link or its cores then decide how long a step takes."""
        return any(self.options.get(name, "none") != "none" for name in _OFFLOADS)

    def after(self, first: Change) -> Change:
        """Return both changes as one, where `first` was made before."""
        return Change(
            options={**first.options, **self.options},
            limits=_add(first, self),
            cluster=self.cluster or first.cluster,
            changes_mathematics=first.changes_mathematics or self.changes_mathematics,
        )


NOTHING: Final = Change(options={})
"""The change that changes nothing."""


def limit_together(changes: Iterable[Change], peak: Peak) -> int:
    """Return the upper limit of the bytes that changes gain together, beside what the allocator only keeps."""
    limits = _add(*changes)
    return sum(min(limits.get(name, 0), held) for name, held in peak.by_category.items() if name != "cached")


def _add(*changes: Change) -> dict[str, int]:
    """Return the sum of the limits of changes, by category."""
    limits: Counter[str] = Counter()
    for change in changes:
        limits.update(change.limits)
    return dict(limits)


def apply(change: Change, case: Case) -> Case | None:
    """Return the changed case; None if its engine or a technique refuses it."""
    try:
        changed = Case(
            replace(case.job, **{name: value for name, value in change.options.items() if name in _JOB_FIELDS}),
            replace(case.plan, **{name: value for name, value in change.options.items() if name not in _JOB_FIELDS}),
            change.cluster or case.cluster,
        )
        check(changed.with_accumulation())
    except (UsageError, CannotEstimate):
        return None
    return changed


def list_changes(case: Case, peak: Peak) -> list[Change]:
    """Return single changes that may help: those that keep a step fast first, then those with the most at stake."""
    every = (
        *_change_loss(case, peak),
        *_change_attention(case, peak),
        *_change_activations(case, peak),
        *_shrink_batch(case, peak),
        *_change_optimizer(case, peak),
        *_divide_states(case, peak),
        *_offload_states(case, peak),
        *_change_method(case, peak),
        *_change_allocator(case, peak),
    )
    least = LEAST_PART * peak.process_bytes
    return sorted(
        (change for change in every if change.limit_bytes > least), key=lambda one: (one.is_slow, -one.limit_bytes)
    )


def list_host_changes(case: Case, host: Host) -> Iterator[Change]:
    """Yield changes that may help a case whose machines have too little host memory; limits are of that memory."""
    plan, job, held = case.plan, case.job, host.by_category
    tensors = _held(host, "pinned", "tensors", "managed")
    for name in sorted(_OFFLOADS):
        place = getattr(plan, name)
        for other in ("none", "nvme") if place != "none" and not place.startswith("nvme") else ():
            yield Change(options={name: other}, limits=tensors)
    if job.save_checkpoint == "full" and plan.shard in SHARDING:
        yield Change(options={"save_checkpoint": "sharded"}, limits=_held(host, "checkpoint"))
    if held.get("loading"):
        if case.cluster.gpus > 1 and plan.shard not in SHARDING:
            yield Change(options={"shard": "zero3"}, limits=_held(host, "loading"))
        if job.method == "full" and plan.precision == "bf16-mixed":
            yield Change(options={"precision": "bf16-true"}, limits=_held(host, "loading"), changes_mathematics=True)
    for method in {"full": ("lora", "qlora"), "lora": ("qlora",)}.get(job.method, ()):
        limits = tensors | _held(host, "loading", "checkpoint")
        yield Change(options={"method": method}, limits=limits, changes_mathematics=True)


def _held(peak: Peak | Host, *categories: str, part: Fraction = _WHOLE) -> dict[str, int]:
    """Return a part of the bytes of these categories at the peak."""
    return {category: int(peak.by_category.get(category, 0) * part) for category in categories}


def _passing(peak: Peak, part: Fraction = _WHOLE) -> dict[str, int]:
    """Return a part of what exists because of the batch: activations, and temporaries of forward and backward."""
    temporaries = ("workspace",) if peak.phase in ("forward", "backward") else ()
    return _held(peak, "activation", *temporaries, part=part)


def _temporaries(peak: Peak) -> dict[str, int]:
    """Return the temporaries of an update, if the peak is there."""
    return _held(peak, "workspace", "cached") if peak.phase == "optimizer" else {}


def _change_loss(case: Case, peak: Peak) -> Iterator[Change]:
    """Yield losses that do not hold the logits of all tokens at once."""
    if case.plan.loss != "plain" or "vocab_size" not in {**case.job.model.config, **_text_part(case)}:
        return
    losses = ("chunked", "liger", "fused") if case.job.method == "full" else ("fused", "liger", "chunked")
    possible = (Change(options={"loss": loss}, limits=_passing(peak)) for loss in losses)
    yield from itertools.islice((change for change in possible if apply(change, case) is not None), 1)


def _text_part(case: Case) -> Mapping[str, Any]:
    part = case.job.model.config.get("text_config")
    return part if isinstance(part, Mapping) else {}


def _change_attention(case: Case, peak: Peak) -> Iterator[Change]:
    """Yield an attention that holds no scores where the present one holds them."""
    sparing = find_sparing_attention(case) or ("auto" if case.plan.attention in ("eager", "math") else None)
    if sparing is not None:
        yield Change(options={"attention": sparing}, limits=_passing(peak))


def _change_activations(case: Case, peak: Peak) -> Iterator[Change]:
    """Yield ways to keep less of the layers for backward on the card."""
    plan, kept = case.plan, _held(peak, "activation")
    if plan.checkpointing == "none":
        yield Change(options={"checkpointing": "selective"}, limits=kept)
    if plan.checkpointing in ("none", "selective", "attention", "attention-module") or plan.checkpoint_interval:
        yield Change(options={"checkpointing": "full"}, limits=kept)
    if plan.activation_offload == "none":
        places = (Change(options={"activation_offload": where}, limits=kept) for where in ("cpu-streamed", "cpu"))
        yield from itertools.islice((change for change in places if apply(change, case) is not None), 1)
    free = case.cluster.gpus // (plan.tp * plan.pp * plan.cp)
    if plan.cp == 1 and free >= 2:
        options: dict[str, Any] = {"cp": 2}
        if case.job.global_batch_tokens is None:  # half as many ranks have batches of their own
            options["grad_accum"] = 2 * case.job.grad_accum
        yield Change(options=options, limits=_passing(peak, _HALF))


def resize_batch(case: Case, micro_batch: int, peak: Peak) -> Change:
    """Return a smaller micro-batch, which divides the present one, with the same global batch."""
    job = case.job
    parts = job.micro_batch // micro_batch
    options: dict[str, Any] = {"micro_batch": micro_batch}
    if job.global_batch_tokens is None:
        options["grad_accum"] = job.grad_accum * parts
    return Change(options=options, limits=_passing(peak, Fraction(parts - 1, parts)))


def _shrink_batch(case: Case, peak: Peak) -> Iterator[Change]:
    """Yield smaller micro-batches with the same global batch, then shorter sequences."""
    job = case.job
    smallest = job.micro_batch // (job.micro_batch & -job.micro_batch)  # without its factors of two
    if smallest < job.micro_batch:
        yield from (resize_batch(case, size, peak) for size in dict.fromkeys((job.micro_batch // 2, smallest)))
    if job.micro_batch == 1 and job.seq_len // 2 >= SHORTEST and not job.lengths:
        shorter: dict[str, Any] = {"seq_len": job.seq_len // 2}
        yield Change(options=shorter, limits=_passing(peak, _HALF), changes_mathematics=True)


def _change_optimizer(case: Case, peak: Peak) -> Iterator[Change]:
    """Yield optimizers with smaller temporaries or states, and updates within backward."""
    plan, temporaries = case.plan, _temporaries(peak)
    if plan.optimizer in _LISTED and temporaries:
        yield Change(options={"optimizer": "adamw-fused"}, limits=temporaries)
    if not plan.optimizer_in_backward and case.job.grad_accum == 1:
        yield Change(options={"optimizer_in_backward": True}, limits=_held(peak, "gradient") | temporaries)
    if plan.optimizer in WHOLE_MOMENTS:
        narrow = "adamw-8bit-ao" if plan.shard in SHARDING and plan.engine != "deepspeed" else "adamw-8bit"
        limits = _held(peak, "optimizer_state", part=Fraction(3, 4)) | temporaries
        yield Change(options={"optimizer": narrow}, limits=limits, changes_mathematics=True)


def _divide_states(case: Case, peak: Peak) -> Iterator[Change]:
    """Yield shardings of the states, and averaging that frees whole gradients."""
    plan, gpus = case.plan, case.cluster.gpus
    if plan.shard in ("none", "ddp", "zero1", "zero2") and gpus > 1:
        divided = {"zero1": ("optimizer_state",), "zero2": ("optimizer_state", "gradient")}
        divided["zero3"] = ("optimizer_state", "gradient", "parameter")
        before = list(divided).index(plan.shard) + 1 if plan.shard in divided else 0
        for shard in list(divided)[before:]:
            limits = _held(peak, *divided[shard], "workspace", "cached", part=Fraction(gpus - 1, gpus))
            yield Change(options={"shard": shard}, limits=limits)
    if plan.shard in SHARDING and not plan.accum_sync and case.with_accumulation().job.grad_accum > 1:
        yield Change(options={"accum_sync": True}, limits=_held(peak, "gradient"))


def _offload_states(case: Case, peak: Peak) -> Iterator[Change]:
    """Yield optimizer states, or weights and states, in the host's memory."""
    plan, temporaries = case.plan, _temporaries(peak)
    if plan.optimizer_offload == "none" and plan.param_offload == "none":
        limits = _held(peak, "optimizer_state", "gradient") | temporaries
        yield Change(options={"optimizer_offload": "cpu"}, limits=limits)
    if plan.param_offload == "none":
        sharded = {} if plan.shard in SHARDING else {"shard": "zero3"}
        limits = _held(peak, *_STATES) | temporaries
        yield Change(options={**sharded, "param_offload": "cpu"}, limits=limits)


def _change_method(case: Case, peak: Peak) -> Iterator[Change]:
    """Yield what trains fewer or narrower weights."""
    plan, method, temporaries = case.plan, case.job.method, _temporaries(peak)
    if method == "full":
        limits = _held(peak, "gradient", "optimizer_state") | _held(peak, "parameter", part=_HALF) | temporaries
        yield Change(options={"method": "lora"}, limits=limits, changes_mathematics=True)
    if method in ("full", "lora"):
        yield Change(
            options={"method": "qlora"}, limits=_held(peak, *_STATES) | temporaries, changes_mathematics=True
        )
    if plan.precision == "bf16-mixed" and plan.weights_dtype is None and method == "full":
        limits = _held(peak, *_STATES, *temporaries, part=_HALF)
        yield Change(options={"precision": "bf16-true"}, limits=limits, changes_mathematics=True)


def _change_allocator(case: Case, peak: Peak) -> Iterator[Change]:
    if case.plan.allocator == "default":
        yield Change(options={"allocator": "expandable"}, limits=_held(peak, "cached"))
