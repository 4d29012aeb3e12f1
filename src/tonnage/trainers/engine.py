"""The interface of every engine: who runs the step, and which options of Job and Plan it has words for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass
from typing import TYPE_CHECKING, Any, Final

from tonnage.options import listed, options, spelled
from tonnage.techniques.technique import Refusal, nothing_against

if TYPE_CHECKING:
    from tonnage.case import Case
    from tonnage.cluster import Cluster
    from tonnage.job import Job
    from tonnage.plans import Plan
    from tonnage.step.world import World

ANY: Final = ("*",)
"""What an engine lists for an option all of whose values it has words for."""

SHAPES: Final = dict.fromkeys(("seq_len", "micro_batch", "grad_accum", "allocator", "engine"), ANY)
"""Options that every engine has words for: the batch, and what is set before its process starts."""


IMAGES: Final = dict.fromkeys(("images", "image_size"), ANY)
"""Options of the rows, for engines whose rows may hold images."""

FILES: Final = {"save_checkpoint": ANY, "resume": ANY}
"""Options of checkpoints, in whole files or in files of parts."""

ROWS: Final = dict.fromkeys(("packing", "lengths"), ANY)
"""Options of the rows that a user brings along, for engines that take any."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A trainer: when it can run a job as the plan says, and how."""

    name: str
    """The value of the option `engine`."""
    packages: tuple[str, ...] = ()
    """Distributions that it needs, its own first."""
    expresses: Mapping[str, tuple[str, ...]] | None = None
    """For each option of Job and Plan the values that it has words for (`ANY`: all); an option that is not listed
    must keep its default.  None: whatever techniques there are."""
    accepts: Callable[[Case], Refusal | None] = nothing_against
    """What else stands against it; imports neither torch nor the trainer."""
    unsaid: Callable[[Job], Mapping[str, Any]] = lambda job: {}
    """What it does where a user says nothing of an option whose default it cannot do."""
    imports: tuple[str, ...] = ()
    """Modules that a worker imports once, before it forks."""
    assumes: Callable[[Job, Plan], tuple[str, ...]] = lambda job, plan: ()
    """What a reader should know of a job that it runs otherwise than as installed, a sentence each."""
    run: Callable[[Job, Plan, World, int], object]
    """Build what a user of the trainer would build, let it run this many optimizer steps, and return what was built:
    it has to live until its trace is written."""

    def refusals(self, case: Case) -> tuple[Refusal, ...]:
        """Why this engine cannot run the job as the plan says; empty if it can."""
        answers = (*self._without_card(case.cluster), *self._unexpressed(case.job, case.plan), *self.missing())
        if answers:
            return answers
        answer = self.accepts(case)
        return () if answer is None else (answer,)

    def missing(self) -> Iterator[Refusal]:
        """What it needs and is not installed."""
        for package in self.packages:
            if installed(package) is None:
                yield Refusal(
                    technique=f"engine={self.name}",
                    reason=f"the package {package} is not installed",
                    instead=f"pip install {package}",
                )

    def has_words(self, option: str, value: Any, default: Any) -> bool:
        """Whether it can be told this value of an option."""
        return self.expresses is None or has_words(self.expresses.get(option), value, default)

    def _without_card(self, cluster: Cluster) -> Iterator[Refusal]:
        from tonnage.cluster import CPU

        if self.expresses is not None and cluster.device.id == CPU:
            yield Refusal(
                technique=f"engine={self.name}",
                reason="its code runs on a ghost GPU only",
                instead="choose a GPU, or engine tonnage",
            )

    def _unexpressed(self, job: Job, plan: Plan) -> Iterator[Refusal]:
        if self.expresses is None:
            return
        for value in (job, plan):
            for item, option in options(type(value)):
                chosen = getattr(value, item.name)
                if not self.has_words(item.name, chosen, item.default):
                    yield self._without_words(item, chosen, option.possible)

    def _without_words(self, item: Field[Any], chosen: Any, possible: tuple[str, ...]) -> Refusal:
        from tonnage.trainers import with_words

        option, known = item.name, (self.expresses or {}).get(item.name, ())
        choices = [word for word in possible if word in known]
        way_out = f"choose {spelled(option)} {' or '.join(choices)}" if choices else f"leave {spelled(option)} out"
        said = ",".join(chosen) if isinstance(chosen, tuple) else "on" if chosen is True else chosen
        return Refusal(
            technique=f"{spelled(option)}={said}",
            reason=f"the engine {self.name} has no setting for it",
            instead=f"{way_out}, or engine {' or '.join(with_words(option, chosen, item.default))}",
        )


def has_words(known: tuple[str, ...] | None, value: Any, default: Any) -> bool:
    """Whether a value of an option is among those that somebody has words for; None: only its default."""
    return bool(value == default) if known is None else known == ANY or listed(str(value), known)


def installed(package: str) -> str | None:
    """The version of a distribution; None where it is not installed.  Imports nothing of it."""
    from importlib.metadata import PackageNotFoundError, version  # a tenth of a second that --help need not pay

    try:
        return version(package)
    except PackageNotFoundError:
        return None
