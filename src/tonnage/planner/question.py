"""The question that a search answers: a job on a cluster, and which options the search may choose.

    Question(job=job, plan=Plan(tp=4), cluster=parse_cluster("8xh100-80gb"), without=("pp",))

Here tp is 4, pp stays as it is, and every other option is open.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from tonnage.cluster import Cluster
from tonnage.errors import UsageError
from tonnage.job import METHODS, Job
from tonnage.mesh import make_mesh
from tonnage.options import is_accepted, options, parse_words, spell_option, unknown_word
from tonnage.planner.search_space import ALLOWABLE, BUDGET, CHANGES, FAMILIES, ORDER
from tonnage.plans import HEADROOM, Plan
from tonnage.synonyms import find_option
from tonnage.units import parse_count

_OPTIONS: Final = {spell_option(item.name): option for kind in (Job, Plan) for item, option in options(kind)}
"""The description of every option, by its name on the command line."""


def parse_methods(text: str) -> tuple[str, ...]:
    """Return the methods to compare: all for `any`, the listed ones for `full,lora`, none for a single method."""
    if text == "any":
        return METHODS
    named = tuple(dict.fromkeys(parse_words(text)))
    return named if len(named) > 1 else ()


@dataclass(frozen=True, kw_only=True)
class Question:
    """A job on a cluster, and what the search may choose."""

    job: Job
    """The user's job; micro-batch and accumulation define the global batch unless `global_batch_tokens` does."""
    plan: Plan
    """The user's options; one that has its default value is open, unless it is in `stated`."""
    cluster: Cluster
    """The GPUs."""
    stated: tuple[str, ...] = ()
    """Options that the user named, whatever their value; those of Plan are kept."""
    methods: tuple[str, ...] = ()
    """Methods to compare; empty: the job's own."""
    only: tuple[str, ...] = ()
    """Options that may be chosen; empty: all."""
    without: tuple[str, ...] = ()
    """Options, or option=value, that may not be chosen."""
    allow: tuple[str, ...] = ()
    """Opt-ins (`search_space.ALLOWABLE`): options whose values change the mathematics of training, and `budget`."""
    only_micro_batch: int | None = None
    """The only micro-batch to consider; None: all."""
    headroom: float = HEADROOM
    """The part of the card that stays free."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "only", tuple(map(_parse_option, self.only)))
        object.__setattr__(self, "without", tuple(map(_parse_exclusion, self.without)))
        both = sorted(set(self.only) & set(self.without))
        if both:
            raise UsageError(f"{both[0]} is both in --only and in --without; leave it out of one.")
        for name in self.allow:
            if name not in ALLOWABLE:
                raise UsageError(
                    f"--allow does not know {name!r}; possible: {', '.join(CHANGES)} (values that change the "
                    f"mathematics of training), {BUDGET} (activation budgets, which no exported trainer can run)."
                )
        for name in self.methods:
            if name not in METHODS:
                raise UsageError(f"Unknown method {name!r}; possible: any, {', '.join(METHODS)}.")
        self._check_exclusions()
        divided = replace(self.plan, shard="zero3") if self.is_open("shard") else self.plan  # ep needs sharding
        make_mesh(
            divided, self.cluster.gpus, self.cluster.gpus_per_node
        )  # raises if the stated degrees do not divide
        if not 0 <= self.headroom < 1:
            raise UsageError(f"headroom is {self.headroom:.0%} of the card; it must be from 0 to below 100 %.")

    def _check_exclusions(self) -> None:
        """Raise UsageError for a value that the user both stated and excluded."""
        for word in self.without:
            name = word.partition("=")[0].replace("-", "_")
            if not self.is_stated(name):
                continue
            value = getattr(self.plan, name)
            kind = str(value).partition("=")[0]
            if word in (spell_option(name), _assignment(name, value), _assignment(name, kind)):
                shown = "on" if value is True else "off" if value is False else value
                raise UsageError(f"{spell_option(name)} is said to be {shown}, and --without {word} leaves that out.")

    @property
    def budget_bytes(self) -> int:
        """Return the bytes of the card that a process may use."""
        return int(self.cluster.device.capacity_bytes * (1 - self.headroom))

    @property
    def places(self) -> tuple[dict[str, bool], ...]:
        """Return where plans may keep data, the fastest place first: keyword arguments of `list_candidates`."""
        places = {"offload": False}, {"offload": True}, {"offload": True, "files": True}
        return places if self.cluster.host_memory_bytes is not None else places[:2]

    @property
    def sequences(self) -> int:
        """Return the sequences of one optimizer step on all GPUs.

        Raises UsageError if the global batch is not a whole number of sequences.
        """
        job = self.job
        if job.global_batch_tokens is None:
            return (
                job.micro_batch * job.grad_accum * self.cluster.gpus // (self.plan.tp * self.plan.pp * self.plan.cp)
            )
        return job.sequences_for(self.cluster.gpus)

    def is_stated(self, name: str) -> bool:
        """Return whether the user named an option of Plan or gave it a value other than its default."""
        return hasattr(Plan, name) and bool(name in self.stated or getattr(self.plan, name) != getattr(Plan, name))

    def is_open(self, name: str) -> bool:
        """Return whether the search may choose an option."""
        word = spell_option(name)
        return not self.is_stated(name) and (not self.only or word in self.only) and word not in self.without

    def is_undecided(self, name: str) -> bool:
        """Return whether an option may have several values among the candidates.

        That is an open option, and `shard`, which follows from the layout if excluded (`candidates.REPLICATED`).
        """
        return self.is_open(name) or (name == "shard" and not self.is_stated(name))

    def is_allowed(self, name: str, value: Any) -> bool:
        """Return whether `without` permits a value of an option."""
        return _assignment(name, value) not in self.without

    def has_budgets(self) -> bool:
        """Return whether the search may choose checkpointing under a budget of activations."""
        return BUDGET in self.allow and self.is_open("checkpointing") and self.is_allowed("checkpointing", "budget")

    def list_values(self, name: str) -> tuple[Any, ...]:
        """Return the values in ORDER that the engine supports, whatever was stated."""
        return self.keep_supported(name, ORDER[name])

    def keep_supported(self, name: str, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return those of an option's values that the engine supports."""
        from tonnage.trainers import engine_of

        engine = engine_of(self.plan)
        return tuple(value for value in values if engine.has_setting(name, value, getattr(Plan, name)))


def _parse_option(name: str) -> str:
    """Return an option as the command line spells it, also from plan.toml's spelling.  Raises UsageError."""
    word = spell_option(name.strip())
    if word.replace("-", "_") not in FAMILIES:
        possible = ", ".join(spell_option(family) for family in FAMILIES)
        hint = " A value is said by its own option, or left out by --without." if "=" in name else ""
        known = find_option(name)
        meant = "" if known is None else f"; here it is {known.option}"
        raise UsageError(f"Unknown technique {name!r}{meant}; possible: {possible}.{hint}")
    return word


def _parse_exclusion(text: str) -> str:
    """Return an option, or option=value, in the spelling in which they are compared.  Raises UsageError."""
    name, equals, value = text.partition("=")
    word = _parse_option(name)
    return _assignment(word, _parse_value(word, value.strip().strip("\"'"))) if equals else word


def _assignment(name: str, value: Any) -> str:
    """Return one value of an option as `without` names it."""
    return f"{spell_option(name)}={str(value).lower() if isinstance(value, bool) else value}"


def _parse_value(word: str, text: str) -> str | int | bool:
    """Return the value of an option.  Raises UsageError, with the possible values, for any other text."""
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
        kinds = {known.partition("=")[0] for known in possible}  # `budget` means every `budget=SIZE`
        if text in kinds or is_accepted(text, possible):
            return text
    raise unknown_word(word, text, possible, " in --without")
