"""What may be chosen: every combination of layout, techniques and micro-batch that a question leaves open.

A choice that costs nothing and changes no result is always made (`FREE`); one that changes the mathematics of
training is made only where the user allows it (`CHANGES`); everything else is open unless the user has said it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from tonnage.case import Case
from tonnage.cluster import Cluster
from tonnage.errors import CannotEstimate, UsageError
from tonnage.job import METHODS, Job
from tonnage.mesh import SHARDING, axes, divisors
from tonnage.options import listed, options, spelled, varied, words
from tonnage.planner.solution import Candidate
from tonnage.plans import HEADROOM, Plan
from tonnage.shallow.few import layers_of
from tonnage.timing.kinds import read_shape
from tonnage.timing.scores import sparing_attention
from tonnage.units import GIB, MIB, parse_count

MOST_HOST_BYTES: Final = 512 * GIB
"""No machine is taken to have more for each of its GPUs where it is not said how much it has: a DGX B200 has 2 TB
beside its eight and can have 4 (its user guide)."""

FREE: Final[Mapping[str, str]] = {"allocator": "expandable", "optimizer": "adamw-fused", "loss": "chunked"}
"""Chosen where nothing stands against it: less memory, the same result, hardly any time.

The loss in slices multiplies by the head twice, which is 1 to 8 % of a step (1.08 of a network of 1.2 billion
parameters on an H200, measurements/h200-2026-11-20.jsonl): plans with room for all logits get them in the end."""

FREE_OPTIONS: Final = (*FREE, "attention")
"""The same with what hangs on network and card (`free`): flex attention needs a compiler where training is done."""

ORDER: Final[Mapping[str, tuple[Any, ...]]] = {
    "shard": ("none", "ddp", "zero1", "zero2", "hsdp", "zero3"),
    "checkpointing": ("none", "every-4", "every-2", "selective", "full"),
    "accum_sync": (False, True),
    "optimizer_in_backward": (False, True),
    "activation_offload": ("none", "cpu-streamed", "cpu"),
    "optimizer_offload": ("none", "cpu"),
    "param_offload": ("none", "cpu"),
}
"""Values of the options that cost time, from the most memory to the least; of layers that run again see `values`."""

_INTERVALS: Final = ("every-4", "every-2")
"""Every N-th layer runs again: for trainers that cannot choose within layers."""

OFFLOADS: Final = ("activation_offload", "optimizer_offload", "param_offload")
"""Tried only where nothing fits without: the link to the host is slower than anything else."""

FILES: Final = "nvme"
"""Their value for files on a disk, tried only where the host's memory is known and not enough."""

AXES: Final = ("tp", "pp", "cp", "ep")

CHANGES: Final[Mapping[str, tuple[str, ...]]] = {
    "precision": ("bf16-true", "fp8"),
    "optimizer": ("adamw-8bit", "adamw-4bit", "adafactor", "muon"),
}
"""Values that change the mathematics of training; `allow` names the option."""

FAMILIES: Final = (*FREE_OPTIONS, *ORDER, *AXES, "pp_schedule", "precision", "micro_batch")
"""Options that `only` and `without` may name."""

_OPTIONS: Final = {spelled(item.name): option for kind in (Job, Plan) for item, option in options(kind)}
"""What is known of every option, by its name on the command line."""

MOST_SEQUENCES: Final = 64
"""Of a micro-batch: beyond, no operation gets faster."""

LEAST_TOKENS: Final = 1024
"""Of a rank's part of a sequence: below, ring attention only waits."""


def methods_named(text: str) -> tuple[str, ...]:
    """What a method's name says is to be compared: all for `any`, the words of `full,lora`; none for a single one."""
    if text == "any":
        return METHODS
    named = tuple(dict.fromkeys(words(text)))
    return named if len(named) > 1 else ()


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked: a job on a cluster, and what may be done to fit it."""

    job: Job
    """As the user gave it; micro-batch and accumulation say the global batch unless `global_batch_tokens` does."""
    plan: Plan
    """What the user said; every option with its default value is open, unless it is among `stated`."""
    cluster: Cluster
    """The GPUs."""
    stated: tuple[str, ...] = ()
    """Options that the user named, whatever their value: those of Plan are kept."""
    methods: tuple[str, ...] = ()
    """Methods to compare; empty: the job's."""
    only: tuple[str, ...] = ()
    """Options that may be chosen; empty: all."""
    without: tuple[str, ...] = ()
    """Options, or option=value, that may not."""
    allow: tuple[str, ...] = ()
    """Options whose values may change the mathematics of training."""
    only_micro_batch: int | None = None
    """The only micro-batch that is looked at; None: all."""
    headroom: float = HEADROOM
    """Part of the card that stays free."""
    host_memory_bytes: int | None = None
    """What a machine's host has for the processes of its GPUs; None: not known, see `host_limit_bytes`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "only", tuple(map(_technique, self.only)))
        object.__setattr__(self, "without", tuple(map(_left_out, self.without)))
        both = sorted(set(self.only) & set(self.without))
        if both:
            raise UsageError(f"{both[0]} is both in --only and in --without; leave it out of one.")
        for name in self.allow:
            if name not in CHANGES:
                raise UsageError(f"Nothing about {name!r} changes the mathematics; possible: {', '.join(CHANGES)}.")
        for name in self.methods:
            if name not in METHODS:
                raise UsageError(f"Unknown method {name!r}; possible: any, {', '.join(METHODS)}.")
        self._check_left_out()
        divided = replace(self.plan, shard="zero3") if self.is_open("shard") else self.plan  # which ep needs
        axes(divided, self.cluster.gpus, self.cluster.gpus_per_node)  # what the user said can be divided so
        if not 0 <= self.headroom < 1:
            raise UsageError(f"headroom is {self.headroom:.0%} of the card; it must be from 0 to below 100 %.")
        if self.host_memory_bytes is not None and self.host_memory_bytes < MIB:
            said = f"The host's memory is {self.host_memory_bytes} bytes, less than 1 MiB"
            raise UsageError(f"{said}; give its unit too, such as 256GiB.")

    def _check_left_out(self) -> None:
        """Raise UsageError for what the user both said and left out."""
        for word in self.without:
            name = word.partition("=")[0].replace("-", "_")
            if not self.said(name):
                continue
            value = getattr(self.plan, name)
            kind = str(value).partition("=")[0]
            if word in (spelled(name), _with_value(name, value), _with_value(name, kind)):
                said = "on" if value is True else "off" if value is False else value
                raise UsageError(f"{spelled(name)} is said to be {said}, and --without {word} leaves that out.")

    @property
    def budget_bytes(self) -> int:
        """What a process may use of the card."""
        return int(self.cluster.device.capacity_bytes * (1 - self.headroom))

    @property
    def host_limit_bytes(self) -> int:
        """More than this a machine's host is not to need."""
        if self.host_memory_bytes is not None:
            return self.host_memory_bytes
        return MOST_HOST_BYTES * self.cluster.gpus_per_node

    @property
    def places(self) -> tuple[dict[str, bool], ...]:
        """Where plans may put what they need not have on the card, the fastest place first: arguments of
        `candidates`."""
        places = {"offload": False}, {"offload": True}, {"offload": True, "files": True}
        return places if self.host_memory_bytes is not None else places[:2]

    @property
    def sequences(self) -> int:
        """Of one optimizer step on all GPUs.  Raises UsageError where the global batch is no whole number of them."""
        job = self.job
        if job.global_batch_tokens is None:
            return (
                job.micro_batch * job.grad_accum * self.cluster.gpus // (self.plan.tp * self.plan.pp * self.plan.cp)
            )
        return job.sequences_for(self.cluster.gpus)

    def said(self, name: str) -> bool:
        """Whether the user named an option of Plan, or gave it a value other than its default."""
        return hasattr(Plan, name) and bool(name in self.stated or getattr(self.plan, name) != getattr(Plan, name))

    def is_open(self, name: str) -> bool:
        """Whether an option may be chosen."""
        word = spelled(name)
        return not self.said(name) and (not self.only or word in self.only) and word not in self.without

    def is_undecided(self, name: str) -> bool:
        """Whether it may come to have several values: an open option, and `shard`, which follows from the layout
        where it is left out (`_ALIKE`)."""
        return self.is_open(name) or (name == "shard" and not self.said(name))

    def values(self, name: str) -> tuple[Any, ...]:
        """Of ORDER what an option may be that the engine has words for, whatever was said: some layers are
        checkpointed and others not only where a trainer has none for what within each of them."""
        known = self.expressed(name, ORDER[name])
        return tuple(one for one in known if one not in _INTERVALS or "selective" not in known)

    def expressed(self, name: str, values: Sequence[Any]) -> tuple[Any, ...]:
        """Those of an option's values that the engine has words for."""
        from tonnage.trainers import engine_of

        engine = engine_of(self.plan)
        return tuple(value for value in values if engine.has_words(name, value, getattr(Plan, name)))

    def may_be(self, name: str, value: Any) -> bool:
        """Whether `without` lets an option have a value."""
        return _with_value(name, value) not in self.without


def _technique(name: str) -> str:
    """A technique as the command line spells it, also from how plan.toml does.  Raises UsageError."""
    found = spelled(name.strip())
    if found.replace("-", "_") not in FAMILIES:
        possible = ", ".join(spelled(family) for family in FAMILIES)
        hint = " A value is said by its own option, or left out by --without." if "=" in name else ""
        raise UsageError(f"Unknown technique {name!r}; possible: {possible}.{hint}")
    return found


def _left_out(text: str) -> str:
    """A technique, or technique=value, in the spelling in which they are compared.  Raises UsageError."""
    name, equals, value = text.partition("=")
    word = _technique(name)
    return _with_value(word, _value(word, value.strip().strip("\"'"))) if equals else word


def _with_value(name: str, value: Any) -> str:
    """One value of a technique as `without` names it."""
    return f"{spelled(name)}={str(value).lower() if isinstance(value, bool) else value}"


def _value(word: str, text: str) -> str | int | bool:
    """What a text says of a technique's values.  Raises UsageError, with what is possible, where it has no such."""
    option = _OPTIONS[word]
    if option.kind == "number":
        with suppress(UsageError):
            return parse_count(text)
        possible: tuple[str, ...] = (f"whole numbers of at least {option.least}",)
    elif option.kind == "switch":
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        possible = ("true", "false")
    else:
        possible = option.possible
        kinds = {known.partition("=")[0] for known in possible}  # `budget` stands for all of `budget=SIZE`
        if text in kinds or listed(text, possible):
            return text
    raise UsageError(f"Unknown {word} {text!r} in --without; possible: {', '.join(possible)}.")


def candidates(
    question: Question, *, offload: bool = False, files: bool = False, ends: bool = False
) -> Iterator[Candidate]:
    """Every combination that the question leaves open: those that use the host's memory alone or those that do not;
    with `files` those that use files; with `ends` of a plan's micro-batches the smallest and the largest alone.

    Combinations that cannot be (heads that do not divide, a global batch that does not) are left out; whether the
    techniques themselves take the job is asked later, of those that are worth it.
    """
    batch, synced = question.sequences, question.said("accum_sync")
    for method in question.methods or (question.job.method,):
        base = replace(question.job, method=method, global_batch_tokens=None)
        jobs: dict[tuple[int, int], Job] = {}  # few differ, and each is checked when it is made
        batches: dict[int, list[tuple[int, int]]] = {}  # by the ranks that share them
        layers = layers_of(base) if _may_take_turns(question) else 0
        for plan in _plans(question, base, offload, files):
            try:
                layout = axes(plan, question.cluster.gpus, question.cluster.gpus_per_node)
            except UsageError:
                continue
            if plan.shard == "hsdp" and 1 in (layout.dp_replicate, layout.dp_shard):
                continue  # which is zero3, or ddp
            ranks = layout.data_parallel
            if ranks not in batches:
                batches[ranks] = list(_batches(question, batch, ranks))
            sizes = batches[ranks]
            interleaved = _interleaved(plan, layers)
            for micro_batch, accumulation in dict.fromkeys((sizes[0], sizes[-1])) if ends and sizes else sizes:
                if accumulation < plan.pp or (plan.optimizer_in_backward and accumulation > 1):
                    continue
                if plan.accum_sync and not synced and accumulation == 1:
                    continue  # which is the same without
                if plan.accum_sync and ranks * plan.cp == 1 and plan.param_offload == "none":
                    continue
                size = micro_batch, accumulation
                job = jobs.get(size) or jobs.setdefault(
                    size, replace(base, micro_batch=micro_batch, grad_accum=accumulation)
                )
                yield Candidate(job=job, plan=plan)
                if interleaved is not None and accumulation % plan.pp == 0:  # in whole rounds
                    yield Candidate(job=job, plan=interleaved)


def _may_take_turns(question: Question) -> bool:
    """Whether several stages of a pipeline may take turns on each rank."""
    return question.is_open("pp_schedule") and question.may_be("pp_schedule", "interleaved")


def _interleaved(plan: Plan, layers: int) -> Plan | None:
    """The plan with such stages; None where so many layers cannot be divided among them, or there is no pipeline."""
    if plan.pp == 1 or not layers or layers % (plan.pp * plan.pp_stages):
        return None
    return varied(plan, {"pp_schedule": "interleaved"})


def free(job: Job, plan: Plan, cluster: Cluster) -> dict[str, str]:
    """FREE, and an attention that keeps no scores where torch's own choice for a network and card keeps them."""
    sparing = sparing_attention(Case(job, replace(plan, attention="auto"), cluster))
    return {**FREE} if sparing is None else {**FREE, "attention": sparing}


def free_wins(question: Question) -> Plan:
    """The question's plan with everything that costs nothing."""
    plan = question.plan
    if not question.said("precision"):
        plan = replace(plan, precision=default_precision(question.cluster))
    chosen: dict[str, Any] = {
        name: value
        for name, value in free(question.job, plan, question.cluster).items()
        if question.is_open(name) and question.may_be(name, value)
    }
    return _expressible(question, replace(plan, **chosen))


def _expressible(question: Question, plan: Plan) -> Plan:
    """The plan without the free choices that its engine or model does not take."""
    from tonnage.trainers import engine_of

    while True:
        refused = {
            refusal.technique.partition("=")[0] for refusal in engine_of(plan).refusals(Case(*_one(question, plan)))
        }
        gone: dict[str, Any] = {
            name: getattr(question.plan, name)
            for name in FREE_OPTIONS
            if spelled(name) in refused and getattr(plan, name) != getattr(question.plan, name)
        }
        if not gone:
            return plan
        plan = replace(plan, **gone)


def _one(question: Question, plan: Plan) -> tuple[Job, Plan, Cluster]:
    return replace(question.job, global_batch_tokens=None), plan, question.cluster


def _plans(question: Question, job: Job, offload: bool, files: bool) -> Iterator[Plan]:
    plain = free_wins(question)
    values = {**_of_layout(question, job), **_of_order(question, offload, files), **_of_changes(question)}
    said = {name: getattr(plain, name) for name in (*AXES, *(name for name in _TOGETHER if question.said(name)))}
    free = {name for name in _TOGETHER if name in values}
    for chosen in itertools.product(*values.values()):
        changes = dict(zip(values, chosen, strict=True))
        if offload:
            used = {changes.get(name, "none") for name in OFFLOADS}
            if used == {"none"} or (files and FILES not in used):
                continue
        if _is_sensible(question, {**said, **changes}, free):
            yield varied(plain, changes)


_TOGETHER: Final = ("shard", "accum_sync", "optimizer_offload", "param_offload")
"""Options of which it hangs on the others what they can be."""


def _is_sensible(question: Question, chosen: Mapping[str, Any], free: Set[str]) -> bool:
    """Whether what is chosen goes together; what was said, and so is not among the `free` options, is not judged."""
    cluster = question.cluster
    shard, synced = chosen.get("shard"), chosen.get("accum_sync")
    weights, states = (chosen.get(name, "none") != "none" for name in ("param_offload", "optimizer_offload"))
    data = cluster.gpus // (chosen["tp"] * chosen["pp"] * chosen["cp"])
    if data < 1 or (shard == "hsdp" and cluster.nodes == 1):
        return False
    if shard is not None and not _divides(question, shard, data * chosen["cp"], weights, states):
        return False
    if weights and shard not in SHARDING and free & {"shard", "param_offload"}:
        return False
    if synced and shard not in SHARDING and "accum_sync" in free:
        return False  # whole gradients are kept in any case
    if weights and states and free & {"param_offload", "optimizer_offload"}:
        return False  # which go with the weights
    if chosen["pp"] > 1:  # torch's pipeline keeps layers whole, and gradients, until its last micro-batch
        return not ((shard in ("hsdp", "zero3") and "shard" in free) or (synced and "accum_sync" in free))
    return True


def _divides(question: Question, shard: str, ranks: int, weights: bool, states: bool) -> bool:
    """Whether a sharding has something to do on so many ranks that train one network, and leaves them one network.

    On a single one it moves weights to the host, where they are to rest there; DeepSpeed's so moves states.
    """
    if shard == "none":
        return ranks == 1
    moves = weights or (states and question.plan.engine == "deepspeed" and shard != "ddp")
    return ranks > 1 or moves or question.said("shard")


def _of_layout(question: Question, job: Job) -> dict[str, tuple[int, ...]]:
    """Sizes of the parallel dimensions that divide what they divide."""
    cluster = question.cluster
    try:
        shape = read_shape(job.model.config)
    except CannotEstimate:  # what divides its heads and layers is not known
        return {}
    heads = [size for size in divisors(cluster.gpus_per_node) if not (shape.heads % size or shape.kv_heads % size)]
    possible = {
        "tp": heads,
        "pp": [size for size in divisors(cluster.gpus) if shape.layers % size == 0],
        "cp": [size for size in divisors(cluster.gpus) if job.seq_len // size >= LEAST_TOKENS],
        "ep": [size for size in divisors(cluster.gpus) if shape.experts % size == 0] if shape.experts else [1],
    }
    return {
        name: tuple(size for size in question.expressed(name, sizes) if question.may_be(name, size))
        for name, sizes in possible.items()
        if question.is_open(name) and len(sizes) > 1
    }


def _of_order(question: Question, offload: bool, files: bool) -> dict[str, tuple[Any, ...]]:
    found = {}
    for name in ORDER:
        closed = not question.is_open(name)
        if question.said(name) or (closed and name != "shard") or (name in OFFLOADS and not offload):
            continue
        more = (FILES,) if files and name in OFFLOADS else ()
        values = _ALIKE if closed else (*question.values(name), *more)
        found[name] = tuple(value for value in values if question.may_be(name, value))
    return found


_ALIKE: Final = ("none", "ddp")
"""What `shard` is where it is not to be chosen: whole networks, which several ranks keep alike, or they would train
one each."""


def _of_changes(question: Question) -> dict[str, tuple[str, ...]]:
    """Values that the user allows although they change the mathematics, after the one that does not."""
    plain = free_wins(question)
    return {
        name: (getattr(plain, name), *(value for value in CHANGES[name] if question.may_be(name, value)))
        for name in question.allow
        if not question.said(name)
    }


def _batches(question: Question, sequences: int, ranks: int) -> Iterator[tuple[int, int]]:
    """Micro-batches and accumulation steps that make the global batch on so many data-parallel ranks."""
    if sequences % ranks:
        return
    each = sequences // ranks
    for micro_batch in _micro_batches(question, each):
        if each % micro_batch == 0 and question.may_be("micro_batch", micro_batch):
            yield micro_batch, each // micro_batch


def _micro_batches(question: Question, most: int) -> Sequence[int]:
    """Sizes that a micro-batch may have: the one that is wanted, or said where it is not to be chosen."""
    if question.only_micro_batch is not None:
        return (question.only_micro_batch,)
    if not question.is_open("micro_batch") or {"micro_batch", "global_batch_tokens"} <= set(question.stated):
        return (question.job.micro_batch,)
    return range(1, min(most, MOST_SEQUENCES) + 1)


def check_precision(question: Question) -> None:
    """Raise UsageError where the user wants bf16 of a card that does not compute in it: torch would, far slower."""
    lacking = question.cluster.device.without_bf16
    if lacking and question.said("precision") and question.plan.precision.startswith("bf16"):
        raise UsageError(f"{lacking}; choose --precision fp16-mixed, or leave it out.")


def default_precision(cluster: Cluster) -> str:
    """What the card computes in: bf16 from compute capability 8.0 on, before it fp16, with a scaled loss."""
    return "fp16-mixed" if cluster.device.without_bf16 else "bf16-mixed"
