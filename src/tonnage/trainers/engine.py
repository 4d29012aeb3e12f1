"""The interface of every engine: who runs the step, and which options of Job and Plan it has settings for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass
from typing import TYPE_CHECKING, Any, Final

from tonnage.options import is_accepted, options, spell_option
from tonnage.techniques import select_techniques
from tonnage.techniques.technique import Refusal, first_of, nothing_against
from tonnage.trainers.not_run import find_not_run
from tonnage.trainers.packages import find_version

if TYPE_CHECKING:
    from tonnage.case import Case
    from tonnage.cluster import Cluster
    from tonnage.job import Job
    from tonnage.plans import Plan
    from tonnage.step.world import World

ANY: Final = ("*",)
"""The entry of an option all of whose values an engine has settings for."""

SHAPES: Final = dict.fromkeys(("seq_len", "micro_batch", "grad_accum", "allocator", "engine"), ANY)
"""Options that every engine has: the batch, and what is set before its process starts."""

IMAGES: Final = dict.fromkeys(("images", "image_size"), ANY)
"""Options of rows that hold images."""

FILES: Final = {"save_checkpoint": ANY, "resume": ANY}
"""Options of checkpoints, in whole files or in files of parts."""

ROWS: Final = dict.fromkeys(("packing", "lengths"), ANY)
"""Options of rows that a user brings along, for engines that take any rows."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A trainer: when it can run a job under a plan, and how."""

    name: str
    """The value of the option `engine`."""
    packages: tuple[str, ...] = ()
    """Distributions that it needs, its own first."""
    expresses: Mapping[str, tuple[str, ...]] | None = None
    """For each option of Job and Plan the values that it has settings for (`ANY`: all); an option that is not listed
    must keep its default.  None: every value for which there is a technique."""
    accepts: Callable[[Case], Refusal | None] = nothing_against
    """Returns whatever else stands against a case; imports neither torch nor the trainer."""
    own_defaults: Callable[[Job], Mapping[str, Any]] = lambda job: {}
    """Returns what it does for options that a user leaves out and whose defaults it cannot do."""
    imports: tuple[str, ...] = ()
    """Modules that a worker imports once, before it forks."""
    assumes: Callable[[Job, Plan], tuple[str, ...]] = lambda job, plan: ()
    """Returns what differs from the installed trainer in how the job is run, a sentence each."""
    run: Callable[[Job, Plan, World, int], object]
    """Builds what a user of the trainer would build, lets it run this many optimizer steps, and returns what was
    built: it has to live until its trace is written."""

    def refusals(self, case: Case) -> tuple[Refusal, ...]:
        """Return why this engine cannot run the case; empty if it can."""
        refusals = (*self._without_gpu(case), *self.unexpressed(case.job, case.plan), *self.missing())
        if refusals:
            return refusals
        refusal = self.accepts(case)
        return () if refusal is None else (refusal,)

    def missing(self) -> Iterator[Refusal]:
        """Yield a refusal for each package that it needs and that is not installed."""
        for package in self.packages:
            if find_version(package) is None:
                yield Refusal(
                    technique=f"engine={self.name}",
                    reason=f"the package {package} is not installed",
                    instead=f"pip install {package}",
                )

    def has_setting(self, option: str, value: Any, default: Any) -> bool:
        """Return whether it has a setting for this value of an option."""
        return self.expresses is None or has_setting(self.expresses.get(option), value, default)

    def _without_gpu(self, case: Case) -> Iterator[Refusal]:
        from tonnage.cluster import CPU

        if self.expresses is not None and case.cluster.device.id == CPU and not case.is_carried_out:
            yield Refusal(
                technique=f"engine={self.name}",
                reason="its code runs on a ghost GPU only",
                instead="choose a GPU, or engine tonnage",
            )

    def unexpressed(self, job: Job, plan: Plan) -> Iterator[Refusal]:
        """Yield a refusal for each option that it has no setting for."""
        if self.expresses is None:
            return
        for owner in (job, plan):
            for item, option in options(type(owner)):
                value = getattr(owner, item.name)
                if not self.has_setting(item.name, value, item.default):
                    yield self._without_words(item, value, option.possible)

    def _without_words(self, item: Field[Any], value: Any, possible: tuple[str, ...]) -> Refusal:
        from tonnage.trainers import engines_with_setting

        option, known = item.name, (self.expresses or {}).get(item.name, ())
        choices = [word for word in possible if word in known]
        way_out = (
            f"choose {spell_option(option)} {' or '.join(choices)}"
            if choices
            else f"leave {spell_option(option)} out"
        )
        setting = find_not_run(self.name, option, value)
        reason = (
            f"tonnage does not run that ({setting})" if setting else f"the engine {self.name} has no setting for it"
        )
        shown = ",".join(value) if isinstance(value, tuple) else "on" if value is True else value
        return Refusal(
            technique=f"{spell_option(option)}={shown}",
            reason=reason,
            instead=f"{way_out}, or engine {' or '.join(engines_with_setting(option, value, item.default))}",
        )


def has_setting(known: tuple[str, ...] | None, value: Any, default: Any) -> bool:
    """Return whether a value of an option is among the known ones; None: only its default is."""
    return bool(value == default) if known is None else known == ANY or is_accepted(str(value), known)


def refuse_undivided(plan: Plan, cluster: Cluster, instead: str = "choose shard ddp or zero3") -> Refusal | None:
    """Return the refusal of shard none on several GPUs, where a trainer always divides or replicates."""
    if plan.shard != "none" or cluster.gpus == 1:
        return None
    return Refusal(
        technique=f"engine={plan.engine}",
        reason=f"on {cluster.gpus} GPUs it always divides or replicates",
        instead=instead,
    )


def refuse_by_techniques(case: Case, own: tuple[str, ...] = ("optimizer", "loss")) -> Refusal | None:
    """Return the first refusal of the plan's techniques; for the options `own` the engine has its own code."""
    techniques = (technique for technique in select_techniques(case.job, case.plan) if technique.option not in own)
    return first_of(technique.accepts(case) for technique in techniques)
