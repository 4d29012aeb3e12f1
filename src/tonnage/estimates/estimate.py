"""The answer: how much memory a step needs on each rank, whether it fits, and what the numbers are based on."""

from __future__ import annotations

import shlex
import textwrap
import zipfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from tonnage.errors import UnreadableFile
from tonnage.estimates.amounts import check_amounts
from tonnage.estimates.viewed import Viewed
from tonnage.trace import members
from tonnage.units import format_gib

SCHEMA_VERSION: Final = 1

_MOST_BYTES: Final = 16 * 2**20
"""Bytes of the largest document that is read from a saved file."""

_DERIVED: Final = ("schema_version", "needed_bytes")
"""Entries of the document that are not fields of the Estimate."""

CATEGORIES: Final = (
    "parameter",
    "gradient",
    "optimizer_state",
    "kv_cache",
    "activation",
    "workspace",
    "communication",
    "cached",
    "runtime",
)
"""Categories of a process's bytes.  `cached`: reserved by the allocator but not allocated at the peak
(fragmentation and slack); `runtime`: CUDA context, loaded kernels, NCCL: everything outside the allocator.
"""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The highest use of one rank's GPU, and what the bytes are for at the moment of the allocated peak."""

    allocated_bytes: int
    """Most bytes in blocks allocated by the caching allocator (`torch.cuda.max_memory_allocated`)."""
    reserved_bytes: int
    """Most bytes the caching allocator held from the driver (`torch.cuda.max_memory_reserved`)."""
    process_bytes: int
    """Reserved bytes plus those outside the allocator, as nvidia-smi shows them."""
    low_bytes: int
    """Lower end of the interval for process_bytes."""
    high_bytes: int
    """Upper end of the interval for process_bytes."""
    phase: str
    """The phase of the allocated peak."""
    layer: str
    """The module that was running then; empty if none."""
    step: int
    """The optimizer step (from 1) in which the allocated peak first occurs."""
    by_category: dict[str, int]
    """Bytes by category at the peak; sums to process_bytes."""


@dataclass(frozen=True, kw_only=True)
class PhasePeak:
    """The highest use within one phase, over all recorded steps."""

    name: str
    """`load`, `forward`, `backward`, `optimizer`, `evaluate`, `generate`, `save`, `resume` or `other`."""
    allocated_bytes: int
    """Most bytes allocated while the phase ran."""
    reserved_bytes: int
    """Most bytes reserved while the phase ran."""


@dataclass(frozen=True, kw_only=True)
class StepPeak:
    """The highest use within one optimizer step, and from its end to the next one."""

    step: int
    """From 1; the first includes loading."""
    allocated_bytes: int
    """Most bytes allocated."""
    reserved_bytes: int
    """Most bytes reserved."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """Memory of the host: of this rank's process, and of all ranks of the fullest machine."""

    peak_bytes: int | None
    """Most bytes that the rank's process would need on a real machine; None if unknown."""
    pinned_bytes: int
    """Most page-locked bytes of the rank."""
    low_bytes: int | None = None
    """Lower end of the interval for peak_bytes, which differs from run to run; None if unknown."""
    high_bytes: int | None = None
    """Upper end of the interval for peak_bytes."""
    managed_bytes: int = 0
    """Most bytes of managed memory (paged optimizers), which a GPU pages in as it uses it and pages out when it
    is full; not in any figure of the GPU.
    """
    machine_bytes: int | None = None
    """Most bytes of all ranks of a machine together; None if unknown."""
    limit_bytes: int | None = None
    """Host memory of a machine, as stated or as machines with this card usually have; None if unknown."""
    fits: bool = True
    """False if a machine needs more than it has; True where one of the two is unknown."""
    by_category: dict[str, int] = field(default_factory=dict)
    """Bytes of the machine by category (`host_memory.CATEGORIES`); sums to machine_bytes."""

    def with_machine(self, needed_bytes: int | None, by_category: dict[str, int], limit_bytes: int | None) -> Host:
        """Return the same rank's memory beside another need and limit of its machine."""
        return replace(
            self,
            machine_bytes=needed_bytes,
            by_category=by_category,
            limit_bytes=limit_bytes,
            fits=needed_bytes is None or limit_bytes is None or needed_bytes <= limit_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """PyTorch's out-of-memory error, and where it happened."""

    message: str
    """PyTorch's own message."""
    phase: str
    """The phase in which it happened."""
    layer: str
    """The module that was running; empty if none."""
    step: int
    """The optimizer step (from 1) that could not be finished."""
    stack: tuple[str, ...]
    """The Python stack, outermost first, one `file:line function` for each frame."""


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """The basis of the numbers."""

    run: tuple[str, ...] = ()
    """Parts that really ran."""
    modelled: tuple[str, ...] = ()
    """Parts that are constants or formulas, with their source."""
    assumed: tuple[str, ...] = ()
    """Values that could not be known, and what was assumed."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One point of the memory curve."""

    mark: int
    """Index of the Trace's mark."""
    phase: str
    """The phase then."""
    allocated_bytes: int
    """Most bytes allocated between this mark and the next."""
    reserved_bytes: int
    """Most bytes reserved between this mark and the next."""
    step: int = 0
    """Optimizer steps completed before."""


_LONGEST_SUBJECT: Final = 60
"""Characters of a command in the one line that `repr` prints."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A change of a case that was run, and what it leads to."""

    change: dict[str, Any]
    """The options that change, by name, with their new values; `gpu` for other cards."""
    command: str
    """A command that gives this answer: the user's own with the change in it."""
    fits: bool
    """True if the changed case fits."""
    peak_bytes: int
    """Peak of the changed case's process; where it does not fit, on a card without a limit."""
    gain_bytes: int
    """Bytes less than the case as it was needs."""
    step_seconds: float | None
    """Seconds of a step with the change; None if unknown."""
    changes_mathematics: bool
    """True if training computes something else, or sees other data in a step."""
    kv_cache_tokens: int | None = None
    """Tokens of an inference engine's KV cache with the change; None for training, or if it does not start."""
    host_bytes: int | None = None
    """Host memory that a machine of the changed case needs; None if unknown."""
    is_tight: bool = False
    """True if it fits, but the upper end of its interval does not."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Estimate(Viewed):
    """The needs of one rank of a Job under a Plan on a Cluster; `ranks` lists each rank that was run."""

    source: str
    """`ghost`, `meta` or `real`."""
    versions: dict[str, str]
    """Versions of everything that decides allocations: torch, cuda, transformers, tonnage."""
    model: dict[str, Any]
    """name, source, parameters, trainable_parameters."""
    job: dict[str, Any]
    """The Job's fields, or the command of a dry-run."""
    plan: dict[str, Any]
    """The Plan's fields; empty for a dry-run, in which the script decides."""
    cluster: dict[str, Any]
    """gpu, gpus, nodes, capacity_bytes, and the like."""
    fits: bool
    """True if the steps ran to their end within the GPU's capacity, and within the memory of the host."""
    rank: int
    """The rank these numbers belong to: the one with the highest process peak."""
    peak: Peak
    """The highest use."""
    phases: tuple[PhasePeak, ...]
    """The highest use by phase, in order of first appearance."""
    host: Host
    """Host memory."""
    time: dict[str, Any]
    """step_seconds, tokens_per_second_per_gpu, mfu, bound_by; each null until it is priced.

    uncorrected_step_seconds is there only if trials on this machine corrected the others (`estimates.history`).
    """
    coverage: Coverage
    """The basis of the numbers."""
    oom: OutOfMemory | None = None
    """Set if the GPU was full."""
    curve: tuple[Moment, ...] = ()
    """The memory over the recorded steps, thinned for drawing."""
    steps: tuple[StepPeak, ...] = ()
    """The highest use by optimizer step."""
    ranks: tuple[dict[str, Any], ...] = field(default_factory=tuple)
    """rank, fits (its GPU), peaks, and host (host memory by category, or null) of every rank that was run."""
    cards: tuple[dict[str, Any], ...] = field(default_factory=tuple)
    """Each GPU that a dry-run used: index, peak_bytes (of all its processes together, with contexts and NCCL's
    buffers) and its processes: process, rank, name, held_bytes (then), peak_bytes.
    """
    notes: tuple[str, ...] = ()
    """Sentences that a reader should not miss, such as `no optimizer step was seen`."""
    needed: Peak | None = None
    """The peak of all steps on a card without a limit; None if they fit, or were not run there."""
    needed_seconds: float | None = None
    """Seconds of a step on a card without a limit; None if unknown or `needed` is None."""
    serving: dict[str, Any] | None = None
    """The answer about an inference engine that was run (`tonnage.serving.answer`); None for training."""
    advice: tuple[Advice, ...] = ()
    """Changes that were tried where the steps do not fit, or only barely; best first."""

    @property
    def needed_bytes(self) -> int | None:
        """Return the process's peak on a card without a limit; None if it fits or is unknown."""
        return None if self.needed is None else self.needed.process_bytes

    @property
    def others_bytes(self) -> int:
        """Return the memory that other processes of a dry-run held on this rank's card at the card's peak."""
        own_candidates = [
            (abs(_whole(process, "peak_bytes") - self.peak.process_bytes), card_index, index)
            for card_index, card in enumerate(self.cards)
            for index, process in enumerate(card.get("processes", ()))
            if process.get("rank") == self.rank
        ]
        if not own_candidates:
            return 0
        _, card_index, own = min(own_candidates)  # processes of one rank (a trainer and its server) differ in peaks
        processes = self.cards[card_index]["processes"]
        return sum(_whole(process, "held_bytes") for index, process in enumerate(processes) if index != own)

    @property
    def is_tight(self) -> bool:
        """Return True if it fits on the GPU, but the upper end of its interval does not."""
        capacity = _whole(self.cluster, "capacity_bytes")
        return self.fits_card and 0 < capacity < self.peak.high_bytes + self.others_bytes

    @property
    def wants_advice(self) -> bool:
        """Return True if it does not fit on the GPU or in the host's memory, or only barely on the GPU.

        An engine takes what it is told to take; it wants advice only if it does not start.
        """
        return not self.fits or (self.is_tight and self.serving is None)

    def to_json(self) -> dict[str, Any]:
        """Return the document that `--json` prints (schema_version 1)."""
        document = asdict(self)
        return {"schema_version": SCHEMA_VERSION, **document, "needed_bytes": self.needed_bytes}

    @staticmethod
    def from_json(document: dict[str, Any]) -> Estimate:
        """Return the Estimate that `to_json` wrote.  Raises UnreadableFile."""
        try:
            version = document.get("schema_version")
            if version is None:
                raise UnreadableFile("It is no estimate of tonnage: it has no schema_version.")
            if version != SCHEMA_VERSION:
                raise UnreadableFile(
                    f"The estimate has schema_version {version!r}; this tonnage reads {SCHEMA_VERSION}."
                )
            values = {name: value for name, value in document.items() if name not in _DERIVED}
            oom = values.get("oom")
            values |= {
                "peak": Peak(**values["peak"]),
                "phases": tuple(PhasePeak(**phase) for phase in values["phases"]),
                "host": Host(**values["host"]),
                "coverage": Coverage(**{name: tuple(items) for name, items in values["coverage"].items()}),
                "oom": OutOfMemory(**{**oom, "stack": tuple(oom["stack"])}) if oom else None,
                "curve": tuple(Moment(**moment) for moment in values.get("curve", ())),
                "steps": tuple(StepPeak(**step) for step in values.get("steps", ())),
                "ranks": tuple(values.get("ranks", ())),
                "cards": tuple(_card(card) for card in values.get("cards", ())),
                "notes": tuple(values.get("notes", ())),
                "needed": Peak(**values["needed"]) if values.get("needed") else None,
                "advice": tuple(Advice(**advice) for advice in values.get("advice", ())),
            }
            return Estimate(**values)
        except members.DAMAGED as error:
            raise UnreadableFile(f"The estimate is damaged: {_describe_damage(error)}; save it again.") from error

    def verdict(self) -> str:
        """Return one sentence: fits or not, with the numbers that decide."""
        if self.serving is not None:
            return "starts" if self.serving["starts"] else f"does not start: {self.serving['error']}"
        capacity = self.cluster.get("capacity_bytes")
        need = format_gib(self.peak.process_bytes)
        where = f"of {format_gib(capacity)}" if capacity else ""
        if not self.fits_card:
            whole = "" if self.needed is None else f"needs {format_gib(self.needed.process_bytes)} in all; "
            phase = self.oom.phase if self.oom else self.peak.phase
            return f"does not fit: {whole}out of memory in {phase} ({need} {where})"
        if not self.host.fits:
            return f"does not fit in host memory: {self._host_words()}; on the GPU {need} {where}".rstrip()
        return f"fits: {need} {where}".rstrip()

    @property
    def fits_card(self) -> bool:
        """Return True if the steps ran to their end within the GPU's capacity, whatever the host has."""
        if self.fits or self.host.fits:
            return self.fits
        return self.oom is None and all(rank.get("fits", True) for rank in self.ranks)

    def with_host(self, host: Host) -> Estimate:
        """Return the same estimate with another memory of the host, on which its verdict depends too."""
        return replace(self, host=host, fits=self.fits_card and host.fits)

    def _host_words(self) -> str:
        need, limit = (format_gib(size or 0) for size in (self.host.machine_bytes, self.host.limit_bytes))
        return f"a machine needs {need} and has {limit}"

    def summary(self) -> str:
        """Return the subject and the verdict in one line."""
        command = self.job.get("command")
        subject = shlex.join(map(str, command)) if isinstance(command, list | tuple) else self.model.get("name")
        gpus = self.cluster.get("gpus") or 1
        cards = f"{gpus} x {self.cluster.get('gpu')}" if gpus != 1 else self.cluster.get("gpu")
        return f"{textwrap.shorten(str(subject), _LONGEST_SUBJECT, placeholder='...')} on {cards}: {self.verdict()}"


def _whole(values: dict[str, Any], name: str) -> int:
    """Return a number from untyped fields; 0 where it is absent, negative or of another type."""
    value = values.get(name)
    return value if type(value) is int and value >= 0 else 0


def _describe_damage(error: Exception) -> str:
    """Return what is wrong with a document."""
    if isinstance(error, KeyError):
        return f"it has no {error.args[0]}"
    return "its fields are not those that tonnage writes"


def _card(values: dict[str, Any]) -> dict[str, Any]:
    """Return one of a dry-run's GPUs from JSON.  Raises TypeError, ValueError or KeyError if it has no processes."""
    return {**values, "processes": [dict(process) for process in values["processes"]]}


def capacity_bytes(estimate: Estimate) -> int | None:
    """Return the capacity of one card as its driver reports it; None where unknown."""
    return whole(estimate.cluster, "capacity_bytes") or None


def whole(values: dict[str, Any], name: str) -> int | None:
    """Return a number from untyped fields; None when it is absent, negative or of another type."""
    value = values.get(name)
    return value if type(value) is int and value >= 0 else None


def shown_peak(estimate: Estimate) -> Peak:
    """Return the peak to draw: of the whole step if it is known, else of what ran."""
    return estimate.needed or estimate.peak


def load(path: Path) -> Estimate:
    """Return the Estimate of a file written by `--save`.  Raises UnreadableFile; never executes anything."""
    try:
        with zipfile.ZipFile(path) as archive:
            members.check(archive, path)
            document = members.read_document(archive, "estimate.json", _MOST_BYTES)
            check_amounts(document)
            return Estimate.from_json(document)
    except (OSError, KeyError, ValueError, zipfile.BadZipFile, EOFError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]  # zipfile's message may hold bytes of the file
        raise UnreadableFile(f"{path} is not a file that tonnage saved ({reason}).") from error
