"""All that a run knows before its first step: its plan, data and numbers of steps, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from tonnage.case import Case
from tonnage.cluster import CPU
from tonnage.errors import UsageError
from tonnage.mesh import make_mesh
from tonnage.model import ModelRef
from tonnage.planner import plan_file
from tonnage.step import heads
from tonnage.train import applying, checks, data, labels, networks, packing, schedules, tokens
from tonnage.trainers import cases
from tonnage.units import pluralise

if TYPE_CHECKING:
    from pathlib import Path

    from tonnage.cluster import Cluster
    from tonnage.job import Job
    from tonnage.plans import Plan
    from tonnage.train.networks import Source
    from tonnage.train.packing import Sequences
    from tonnage.train.settings import Settings
    from tonnage.train.tokens import Tokenizer

USUAL_RATES: Final = {"random": 3e-4, "full": 2e-5, "adapters": 2e-4}
"""Learning rates by default: from random weights, of all given weights, and of adapters."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run before its first step."""

    settings: Settings
    """The options."""
    job: Job
    """The batches of the plan file."""
    plan: Plan
    """The techniques of the plan file."""
    cluster: Cluster
    """The GPUs of the plan file."""
    replicas: int
    """Ranks that read batches of their own."""
    source: Source
    """Where the network comes from."""
    tokenizer: Tokenizer
    """Makes the tokens."""
    training: Sequences
    """Sequences to train on."""
    evaluation: Sequences | None
    """Sequences to evaluate on; None: no evaluation."""
    lengths: schedules.Lengths
    """Numbers of steps."""
    last_row: int | None
    """Row of the stream of all epochs before which the run ends; None: its steps decide."""
    rate: float
    """Largest learning rate."""
    remarks: tuple[str, ...]
    """Remarks for the user about the data."""

    @property
    def rows_a_step(self) -> int:
        """Return the sequences of a step of all ranks."""
        return self.job.micro_batch * self.job.grad_accum * self.replicas

    @property
    def on_cpu(self) -> bool:
        """Return True if the run computes on the CPU."""
        return self.cluster.device.id == CPU

    def describe(self) -> str:
        """Return a line about the run."""
        batch = f"{pluralise(self.rows_a_step, 'sequence')} of {self.job.seq_len:,} tokens a step"
        held = "" if self.evaluation is None else f", {len(self.evaluation):,} to evaluate on"
        return (
            f"{pluralise(self.lengths.total, 'step')}, {batch}, {len(self.training):,} to train on{held}; "
            f"{self.source.description}, {self.tokenizer.description}; {self.settings.schedule} schedule, "
            f"learning rate {self.rate:g}"
        )


def prepare(settings: Settings, ranks: int) -> Setup:
    """Return the run of these settings.  Raises UsageError and UnreadableFile for what cannot be run."""
    plan, job, cluster = applying.read_plan(settings.plan, None)
    assert cluster is not None
    checks.count_ranks(plan, cluster.gpus)
    checks.check_device(cluster, applying.choose_kind(cluster))
    checks.check_supported(job, plan)
    replicas = make_mesh(plan, ranks, cluster.gpus_per_node).data_parallel
    job = job.on_ranks(replicas)
    source = networks.find(settings.model)
    networks.check_model(plan_file.read(settings.plan).model, source.config)
    if source.folder is None and job.method != "full":
        raise UsageError(
            f"method {job.method} adds adapters to given weights, and {settings.model} has none; give a folder with "
            "weights, or a plan with method full."
        )
    if job.method == "full" and plan.optimizer_in_backward and job.grad_accum > 1:
        raise UsageError("optimizer-in-backward updates the weights in each micro-batch; plan with grad-accum 1.")
    _check_case(settings.model, source, job, plan, cluster)
    tokenizer = tokens.load(settings.tokenizer, source.home, source.vocabulary)
    training, remarks = _read(settings.data, tokenizer, job)
    evaluation = None
    if settings.eval_data is not None:
        evaluation, others = _read(settings.eval_data, tokenizer, job)
        remarks += others
    elif settings.eval_every is not None:
        if len(training) < 2:
            raise UsageError("The data is a single sequence, of which none can be held out; give --eval-data.")
        training, evaluation = packing.hold_out(training, settings.eval_share, settings.seed)
    rows = job.micro_batch * job.grad_accum * replicas
    total, last_row = _count_steps(settings, len(training), rows)
    lengths = schedules.make_lengths(total, settings.warmup_steps, settings.decay_steps)
    if lengths.warmup > total:
        remarks.append(f"the run of {total} steps ends within its warm-up of {lengths.warmup}: --lr is never reached")
    kind = "random" if source.folder is None else "full" if job.method == "full" else "adapters"
    return Setup(
        settings=settings,
        job=job,
        plan=plan,
        cluster=cluster,
        replicas=replicas,
        source=source,
        tokenizer=tokenizer,
        training=training,
        evaluation=evaluation,
        lengths=lengths,
        last_row=last_row,
        rate=USUAL_RATES[kind] if settings.lr is None else settings.lr,
        remarks=tuple(remarks),
    )


def _check_case(model: str, source: Source, job: Job, plan: Plan, cluster: Cluster) -> None:
    """Raise UsageError for a network that is not trained by its own next tokens, or not under this plan."""
    task = heads.head(source.config).task
    if task not in labels.SHIFTING:
        kind = source.config.get("model_type")
        raise UsageError(
            f"tonnage train trains causal language models, and {kind} is trained as {task}; call tonnage.apply in a "
            "loop that makes its labels."
        )
    if job.seq_len < 2:
        raise UsageError("seq_len is 1, and a token is predicted from the one before; plan with at least 2.")
    network = ModelRef(name=model, kind="config", config=source.config)
    cases.check(Case(replace(job, model=network), plan, cluster, is_carried_out=True))


def _read(path: Path, tokenizer: Tokenizer, job: Job) -> tuple[Sequences, list[str]]:
    """Return the sequences of a file or folder, and remarks about it."""
    corpus = data.read(path, tokenizer, job.seq_len)
    return packing.make(corpus.documents, job.seq_len, packs=job.packing is not None), corpus.remarks()


def _count_steps(settings: Settings, sequences: int, rows: int) -> tuple[int, int | None]:
    """Return the steps of the run, and the row at which its epochs end."""
    if settings.epochs is None and settings.max_steps is not None:
        return settings.max_steps, None
    last_row = max(1, round((settings.epochs or 1) * sequences))
    steps = math.ceil(last_row / rows)
    return (steps if settings.max_steps is None else min(steps, settings.max_steps)), last_row
