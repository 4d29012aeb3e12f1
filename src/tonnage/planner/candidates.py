"""List the candidates of a question: every combination of layout, techniques and micro-batch that it leaves open.

    for candidate in list_candidates(question):              # nothing on the host
    for candidate in list_candidates(question, offload=True):   # at least one offload

Free choices are always made; values that change the mathematics, or that no exported trainer runs, only if allowed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, Final

from tonnage.case import Case
from tonnage.cluster import Cluster
from tonnage.errors import CannotEstimate, UsageError
from tonnage.job import Job
from tonnage.mesh import SHARDING, divisors, make_mesh
from tonnage.options import replace_checked, spell_option
from tonnage.planner.pricing import price_candidate
from tonnage.planner.question import Question
from tonnage.planner.search_space import (
    AXES,
    CHANGES,
    FILES,
    FREE,
    FREE_OPTIONS,
    KERNELS,
    LOSSES,
    OFFLOADS,
    ORDER,
    WHOLE_HEAD,
)
from tonnage.planner.solution import Candidate
from tonnage.plans import Plan, Precision
from tonnage.shallow.depths import layers_of
from tonnage.techniques.technique import Refusal
from tonnage.timing.kinds import read_shape
from tonnage.timing.scores import find_sparing_attention
from tonnage.timing.work import Work
from tonnage.trainers.cases import check

MOST_SEQUENCES: Final = 64
"""The largest micro-batch; beyond it no operation gets faster."""

_MANY: Final = 16
"""Sequences for which the card and not the host decides how long a step takes."""

LEAST_TOKENS: Final = 1024
"""The smallest part of a sequence per rank; below it ring attention only waits."""

REPLICATED: Final = ("none", "ddp")
"""Values of `shard` if it may not be chosen: several ranks keep copies, or each would train its own network."""

_INTERDEPENDENT: Final = ("shard", "accum_sync", "optimizer_in_backward", "optimizer_offload", "param_offload")
"""Options whose possible values depend on each other."""


def list_candidates(
    question: Question, *, offload: bool = False, files: bool = False, ends: bool = False
) -> Iterator[Candidate]:
    """Yield every combination that the question leaves open.

    `offload`: those that use the host's memory, instead of those that do not.  `files`: of these, those that use
    files.  `ends`: only the smallest and the largest micro-batch of each plan.  Combinations that do not divide
    heads, layers or the global batch are left out; the techniques' own checks are run later, on promising ones.
    """
    batch, keeps_sync = question.sequences, question.is_stated("accum_sync")
    for method in question.methods or (question.job.method,):
        base = replace(question.job.with_method(method), global_batch_tokens=None)
        jobs: dict[tuple[int, int], Job] = {}  # few differ, and making one checks it
        batches: dict[int, list[tuple[int, int]]] = {}  # by the number of data-parallel ranks
        layers = layers_of(base) if _may_interleave(question) else 0
        for plan in _list_plans(question, base, offload, files):
            try:
                layout = make_mesh(plan, question.cluster.gpus, question.cluster.gpus_per_node)
            except UsageError:
                continue
            if plan.shard == "hsdp" and 1 in (layout.dp_replicate, layout.dp_shard):
                continue  # equal to zero3 or ddp
            ranks = layout.data_parallel
            if ranks not in batches:
                batches[ranks] = list(_list_batches(question, batch, ranks))
            sizes = batches[ranks]
            interleaved = _interleave(plan, layers)
            for micro_batch, accumulation in dict.fromkeys((sizes[0], sizes[-1])) if ends and sizes else sizes:
                if accumulation < plan.pp or (plan.optimizer_in_backward and accumulation > 1):
                    continue
                if plan.accum_sync and not keeps_sync and accumulation == 1:
                    continue  # equal to the plan without it
                if plan.accum_sync and ranks * plan.cp == 1 and plan.param_offload == "none":
                    continue
                size = micro_batch, accumulation
                job = jobs.get(size) or jobs.setdefault(
                    size, replace(base, micro_batch=micro_batch, grad_accum=accumulation)
                )
                yield Candidate(job=job, plan=plan)
                if interleaved is not None and accumulation % plan.pp == 0:  # whole rounds
                    yield Candidate(job=job, plan=interleaved)


def _may_interleave(question: Question) -> bool:
    """Return whether each rank of a pipeline may have several stages."""
    return question.is_open("pp_schedule") and question.is_allowed("pp_schedule", "interleaved")


def _interleave(plan: Plan, layers: int) -> Plan | None:
    """Return the plan with several stages a rank; None without a pipeline or if the layers do not divide."""
    if plan.pp == 1 or not layers or layers % (plan.pp * plan.pp_stages):
        return None
    return replace_checked(plan, {"pp_schedule": "interleaved"})


def free_choices(job: Job, plan: Plan, cluster: Cluster) -> dict[str, str]:
    """Return FREE, and an attention that keeps no scores where torch's own choice would keep them."""
    sparing = find_sparing_attention(Case(job, replace(plan, attention="auto"), cluster))
    return {**FREE} if sparing is None else {**FREE, "attention": sparing}


def with_free_choices(question: Question) -> Plan:
    """Return the question's plan with every free choice that it leaves open."""
    plan = question.plan
    if not question.is_stated("precision"):
        plan = replace(plan, precision=default_precision(question.cluster))
    chosen: dict[str, Any] = {
        name: value
        for name, value in free_choices(question.job, plan, question.cluster).items()
        if question.is_open(name) and question.is_allowed(name, value)
    }
    return _with_faster_attention(question, _drop_refused(question, replace(plan, **chosen)))


def _with_faster_attention(question: Question, plan: Plan) -> Plan:
    """Return the plan with the fastest attention, if its trainer has a choice of its own instead of torch's.

    It is the fastest for many sequences at once: for few the card waits for launches with any.
    """
    from tonnage.trainers import engine_of

    job = replace(question.job, global_batch_tokens=None, micro_batch=_MANY, grad_accum=1)
    cluster = _one_gpu(question.cluster)
    alone = replace(plan, shard="none", tp=1, pp=1, cp=1, ep=1)
    if not question.is_open("attention") or Work.of(job, alone, cluster).attention in ("auto", plan.attention):
        return plan
    words = (word for word in question.keep_supported("attention", KERNELS) if question.is_allowed("attention", word))
    plans = (replace(alone, attention=word) for word in words)
    possible = [alone, *(one for one in plans if not engine_of(one).refusals(Case(job, one, cluster)))]
    priced = [price_candidate(Candidate(job=job, plan=one), cluster) for one in possible]
    if any(one.timing is None for one in priced):
        return plan
    fastest = min(priced, key=lambda one: one.seconds_per_token)  # of equal ones the trainer's own
    return replace(plan, attention=fastest.candidate.plan.attention)


def _drop_refused(question: Question, plan: Plan) -> Plan:
    """Return the plan without the free choices that its engine or model refuses."""
    from tonnage.trainers import engine_of

    job = replace(question.job, global_batch_tokens=None)
    while True:
        refusals = engine_of(plan).refusals(Case(job, plan, question.cluster))
        refused = {refusal.technique.partition("=")[0] for refusal in refusals}
        gone: dict[str, Any] = {
            name: getattr(question.plan, name)
            for name in FREE_OPTIONS
            if spell_option(name) in refused and getattr(plan, name) != getattr(question.plan, name)
        }
        if not gone:
            return plan
        plan = replace(plan, **gone)


def _list_plans(question: Question, job: Job, offload: bool, files: bool) -> Iterator[Plan]:
    plain = with_free_choices(question)
    values = {
        **_layout_values(question, job),
        **_order_values(question, offload, files),
        **_change_values(question),
        **_loss_values(question, replace(plain, shard="none")),
    }
    stated = [name for name in _INTERDEPENDENT if question.is_stated(name)]
    fixed = {name: getattr(plain, name) for name in (*AXES, *stated)}
    free = {name for name in _INTERDEPENDENT if name in values}
    for chosen in itertools.product(*values.values()):
        changes = dict(zip(values, chosen, strict=True))
        if offload:
            used = {changes.get(name, "none") for name in OFFLOADS}
            if used == {"none"} or (files and FILES not in used):
                continue
        if _is_sensible(question, {**fixed, **changes}, free):
            yield replace_checked(plain, changes)


def _is_sensible(question: Question, chosen: Mapping[str, Any], free: Set[str]) -> bool:
    """Return whether the chosen values go together.

    Stated values, which are not among the `free` options, are not judged.
    """
    cluster = question.cluster
    shard, synced = chosen.get("shard"), chosen.get("accum_sync")
    weights, states = (chosen.get(name, "none") != "none" for name in ("param_offload", "optimizer_offload"))
    data = cluster.gpus // (chosen["tp"] * chosen["pp"] * chosen["cp"])
    if data < 1 or (shard == "hsdp" and cluster.nodes == 1):
        return False
    if chosen.get("loss") in WHOLE_HEAD and chosen["tp"] * chosen["cp"] > 1:
        return False
    if shard is not None and not _has_use(question, shard, data * chosen["cp"], weights, states):
        return False
    if weights and shard not in SHARDING and free & {"shard", "param_offload"}:
        return False
    if synced and shard not in SHARDING and "accum_sync" in free:
        return False  # whole gradients are kept anyway
    if weights and chosen.get("optimizer_in_backward") and free & {"param_offload", "optimizer_in_backward"}:
        return False  # gradients move to the host anyway
    if weights and states and free & {"param_offload", "optimizer_offload"}:
        return False  # the states move with the weights
    if chosen["pp"] > 1:  # torch's pipeline keeps whole layers, and gradients, until its last micro-batch
        return not ((shard in ("hsdp", "zero3") and "shard" in free) or (synced and "accum_sync" in free))
    return True


def _has_use(question: Question, shard: str, ranks: int, weights: bool, states: bool) -> bool:
    """Return whether a sharding does something on this many ranks, and leaves them one network.

    On a single rank FSDP2 moves offloaded weights to the host, and DeepSpeed also optimizer states.
    """
    if shard == "none":
        return ranks == 1
    moves = weights or (states and question.plan.engine == "deepspeed" and shard != "ddp")
    return ranks > 1 or moves or question.is_stated("shard")


def _layout_values(question: Question, job: Job) -> dict[str, tuple[int, ...]]:
    """Return the degrees of parallelism that divide heads, layers, sequence and experts."""
    cluster = question.cluster
    try:
        shape = read_shape(job.model.config)
    except CannotEstimate:  # its heads and layers are not known
        return {}
    heads = [size for size in divisors(cluster.gpus_per_node) if not (shape.heads % size or shape.kv_heads % size)]
    possible = {
        "tp": heads,
        "pp": [size for size in divisors(cluster.gpus) if shape.layers % size == 0],
        "cp": [size for size in divisors(cluster.gpus) if job.seq_len // size >= LEAST_TOKENS],
        "ep": [size for size in divisors(cluster.gpus) if shape.experts % size == 0] if shape.experts else [1],
    }
    return {
        name: tuple(size for size in question.keep_supported(name, sizes) if question.is_allowed(name, size))
        for name, sizes in possible.items()
        if question.is_open(name) and len(sizes) > 1
    }


def _order_values(question: Question, offload: bool, files: bool) -> dict[str, tuple[Any, ...]]:
    """Return the open values of the options in ORDER."""
    values_by_name = {}
    for name in ORDER:
        closed = not question.is_open(name)
        if question.is_stated(name) or (closed and name != "shard") or (name in OFFLOADS and not offload):
            continue
        more = (FILES,) if files and name in OFFLOADS else ()
        values = REPLICATED if closed else (*question.list_values(name), *more)
        values_by_name[name] = tuple(value for value in values if question.is_allowed(name, value))
    return values_by_name


def _loss_values(question: Question, plain: Plan) -> dict[str, tuple[str, ...]]:
    """Return the losses that the engine and the network accept, and for which nothing has to be installed."""
    if not question.is_open("loss"):
        return {}
    supported = (loss for loss in question.keep_supported("loss", LOSSES) if question.is_allowed("loss", loss))
    plans = {loss: replace_checked(plain, {"loss": loss}) for loss in supported}
    return {"loss": tuple(loss for loss, plan in plans.items() if find_loss_refusal(question, plan) is None)}


def find_loss_refusal(question: Question, plan: Plan) -> Refusal | None:
    """Return why an engine or a network refuses a loss, whatever the rest of the plan; None if neither does."""
    from tonnage.trainers import engine_of

    job = replace(question.job, global_batch_tokens=None)
    refusals = engine_of(plan).refusals(Case(job, plan, _one_gpu(question.cluster)))
    return next((refusal for refusal in refusals if refusal.technique.startswith("loss")), None)


def _one_gpu(cluster: Cluster) -> Cluster:
    """Return one card of a cluster, on which no layout can be refused."""
    return replace(cluster, gpus_per_node=1, nodes=1)


def _change_values(question: Question) -> dict[str, tuple[str, ...]]:
    """Return the allowed values that change the mathematics, after the one that does not."""
    plain = with_free_choices(question)
    return {
        name: (getattr(plain, name), *(value for value in CHANGES[name] if question.is_allowed(name, value)))
        for name in question.allow
        if name in CHANGES and not question.is_stated(name)
    }


def _list_batches(question: Question, sequences: int, ranks: int) -> Iterator[tuple[int, int]]:
    """Yield the pairs of micro-batch and accumulation that make the global batch on these data-parallel ranks."""
    if sequences % ranks:
        return
    each = sequences // ranks
    for micro_batch in _list_micro_batches(question, each):
        if each % micro_batch == 0 and question.is_allowed("micro_batch", micro_batch):
            yield micro_batch, each // micro_batch


def _list_micro_batches(question: Question, most: int) -> Sequence[int]:
    """Return the sizes of micro-batches to consider: a single one if it is given or not open."""
    if question.only_micro_batch is not None:
        return (question.only_micro_batch,)
    if not question.is_open("micro_batch") or {"micro_batch", "global_batch_tokens"} <= set(question.stated):
        return (question.job.micro_batch,)
    return range(1, min(most, MOST_SEQUENCES) + 1)


def find_refusal(candidate: Candidate, cluster: Cluster) -> UsageError | None:
    """Return why a candidate's techniques refuse its job; None if they accept it."""
    try:
        check(Case(candidate.job, candidate.plan, cluster))
    except UsageError as error:
        return error
    return None


def check_precision(question: Question) -> None:
    """Raise UsageError if the user asks for bf16 on a card without it, where torch would be far slower."""
    lacking = question.cluster.device.without_bf16
    if lacking and question.is_stated("precision") and question.plan.precision.startswith("bf16"):
        raise UsageError(f"{lacking}; choose --precision fp16-mixed, or leave it out.")


def default_precision(cluster: Cluster) -> Precision:
    """Return bf16-mixed, or fp16-mixed with a scaled loss for cards before compute capability 8.0."""
    return "fp16-mixed" if cluster.device.without_bf16 else "bf16-mixed"
