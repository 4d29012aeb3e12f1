"""`tonnage train`: a complete run of a plan, from files of text to a folder that transformers loads.

The rows that a step reads, the random numbers that it draws and its learning rate are functions of the seed and of
the numbers of steps and rows that are done.  A resumed run therefore does what it would have done without the stop.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from transformers.utils import logging

from tonnage.errors import UnwritableFile, UsageError
from tonnage.train import applying, fragmentation, networks, packing, schedules
from tonnage.train import setup as setups
from tonnage.train.guard import Guard
from tonnage.train.metrics import FILE, Line, Metrics
from tonnage.train.prediction import Estimation, Predicted
from tonnage.train.progress import Progress, describe

if TYPE_CHECKING:
    from tonnage.train.settings import Settings
    from tonnage.train.setup import Setup
    from tonnage.train.trainable import StepResult, Trainable

FINAL: Final = "final"
"""Folder of the trained network, in that of the run."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run came to."""

    steps: int
    """Steps that are done, those of before a resume included."""
    loss: float | None
    """Loss of the last step."""
    evaluation_loss: float | None
    """Loss of the last evaluation."""
    skipped: int
    """Steps that changed no weight."""
    seconds: float
    """Seconds from the first step of this process to the end."""
    final: Path | None
    """Folder of the trained network; None if the run was interrupted."""
    is_first_rank: bool
    """True on the rank that prints."""

    def to_json(self) -> dict[str, Any]:
        """Return the document that `--json` prints."""
        values = {name: value for name, value in asdict(self).items() if name != "is_first_rank"}
        final = None if self.final is None else str(self.final)
        return {"schema_version": 1, "interrupted": self.final is None, **values, "final": final}


@dataclass(kw_only=True)
class _State:
    """Where a run is; saved with each checkpoint."""

    step: int = 0
    """Steps that are done."""
    rows: int = 0
    """Rows of the stream of all epochs that are read."""
    skipped: int = 0
    """Steps that changed no weight."""
    loss: float | None = None
    """Loss of the last step."""
    evaluation_loss: float | None = None
    """Loss of the last evaluation."""


def train(settings: Settings) -> Outcome:
    """Train as the settings say, and return what came of it.  Raises TonnageError."""
    logging.disable_progress_bar()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    progress = Progress(shows=rank == 0)
    try:
        if rank == 0:
            _check_out(settings)
        setup = setups.prepare(settings, ranks)
        for line in (setup.describe(), *setup.remarks):
            progress.remark(line)
        return _Run(setup, rank, progress).run()
    finally:
        progress.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _check_out(settings: Settings) -> None:
    """Raise UsageError for a folder that is in use, or that has nothing to resume."""
    out = settings.out
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file; name a folder.")
    is_used = out.is_dir() and any(out.iterdir())
    if is_used and not settings.resume:
        raise UsageError(f"--out {out} is in use; name another folder, or continue its run with --resume.")
    if settings.resume and not (out / FILE).is_file():
        raise UsageError(f"--out {out} has no run to resume; leave --resume out.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnwritableFile(f"The folder {out} cannot be created ({error.strerror or error}).") from error


class _Run:
    """A run from its first step to its end."""

    def __init__(self, setup: Setup, rank: int, progress: Progress) -> None:
        self._setup, self._rank, self._progress = setup, rank, progress
        self._settings = setup.settings
        self._state = _State()
        self._guard = Guard(sigmas=self._settings.spike_sigmas)
        self._is_stopped = False
        self._is_warned = False

    def run(self) -> Outcome:
        """Build the network, train it, and save it."""
        predicts = self._rank == 0 and not self._setup.on_cpu
        estimation = Estimation(self._settings.plan, self._settings.model) if predicts else None
        try:
            network = networks.build(self._setup.source, self._setup.job, self._setup.plan, self._settings.seed)
            self._trainable = self._apply(network)
            self._predicted = self._wait_for(estimation)
        except BaseException:
            if estimation is not None:
                estimation.end()
            raise
        self._rates = [
            [float(group["lr"]) for group in optimizer.param_groups] for optimizer in self._trainable.optimizers
        ]
        logs = self._settings.logs
        self._metrics = Metrics(self._settings.out, done=self._state.step, logs=logs) if self._rank == 0 else None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        begin = time.perf_counter()
        while self._state.step < self._setup.lengths.total:
            self._take_step(begin)
            if self._agree_to_stop():
                return self._outcome(time.perf_counter() - begin, None)
        final = self._save_final()
        return self._outcome(time.perf_counter() - begin, final)

    def _apply(self, network: Any) -> Trainable:
        settings = self._settings
        hyperparameters = {"lr": self._setup.rate}
        if settings.weight_decay is not None:
            hyperparameters["weight_decay"] = settings.weight_decay
        return applying.apply(settings.plan, network, hyperparameters)

    def _wait_for(self, estimation: Estimation | None) -> Predicted:
        if estimation is None:
            return Predicted()
        predicted, reason = estimation.wait()
        if reason:
            self._progress.remark(f"no prediction: {reason}")
        return predicted

    def _stop(self, number: int, frame: object) -> None:
        """Remember that the run is to end after this step; the second interrupt ends it at once."""
        if self._is_stopped:
            raise KeyboardInterrupt
        self._is_stopped = True

    def _agree_to_stop(self) -> bool:
        """Return True if any rank was told to stop."""
        if not dist.is_initialized():
            return self._is_stopped
        device = self._trainable.ready.step.world.device
        told = torch.tensor([float(self._is_stopped)], device=device)
        dist.all_reduce(told)
        return bool(told.item())

    def _take_step(self, begin: float) -> None:
        """Do a step with what follows it: evaluation, metrics, progress."""
        setup, state = self._setup, self._state
        start = time.perf_counter()
        self._set_rates(schedules.SCHEDULES[self._settings.schedule](state.step, setup.lengths))
        torch.manual_seed(self._settings.seed + 1_000_003 * (state.step * setup.ranks + self._rank))
        end = state.rows + setup.rows_a_step
        rows = self._rows(state.rows, end if setup.last_row is None else min(end, setup.last_row))
        result = self._trainable.step(self._batches(setup.training, rows, setup.job.grad_accum), self._accepts)
        seconds = time.perf_counter() - start
        state.step, state.rows = state.step + 1, end
        state.skipped += result.skipped
        state.loss = result.loss if math.isfinite(result.loss) else None
        evaluation_loss = self._evaluate()
        self._report(self._line(result, seconds, evaluation_loss), begin)

    def _accepts(self, loss: float, gradient_norm: float | None) -> bool:
        """Ask the guard; under a loss scaler gradients may overflow, and it leaves such steps out itself."""
        is_scaled = self._trainable.ready.scaler is not None
        return self._guard.accepts(loss, None if is_scaled else gradient_norm)

    def _set_rates(self, factor: float) -> None:
        for optimizer, rates in zip(self._trainable.optimizers, self._rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor

    def _rows(self, begin: int, end: int) -> list[int]:
        return packing.rows_of_step(begin, end, len(self._setup.training), self._settings.seed)

    def _batches(self, sequences: packing.Sequences, rows: list[int], micro_batches: int) -> list[packing.Batch]:
        """Return this rank's micro-batches of these rows."""
        setup = self._setup
        size = setup.job.micro_batch
        shares = packing.share_rows(rows, size=size, micro_batches=micro_batches, ranks=setup.ranks, rank=self._rank)
        return [sequences.batch(share, size) for share in shares]

    def _evaluate(self) -> float | None:
        """Return the loss on the evaluation's sequences, if it is time for it or the run ends."""
        setup, state, every = self._setup, self._state, self._settings.eval_every
        is_due = every is not None and state.step % every == 0
        is_end = state.step == setup.lengths.total
        if setup.evaluation is None or not (is_due or is_end):
            return None
        rows = list(range(len(setup.evaluation)))
        micro_batches = math.ceil(len(rows) / (setup.job.micro_batch * setup.ranks))
        evaluation = self._trainable.evaluate(self._batches(setup.evaluation, rows, micro_batches))
        state.evaluation_loss = evaluation.loss if math.isfinite(evaluation.loss) else None
        return state.evaluation_loss

    def _line(self, result: StepResult, seconds: float, evaluation_loss: float | None) -> Line:
        on_gpu = not self._setup.on_cpu
        return Line(
            step=self._state.step,
            loss=self._state.loss,
            tokens=result.tokens,
            learning_rate=result.learning_rate,
            gradient_norm=result.gradient_norm,
            skipped=result.skipped,
            step_seconds=seconds,
            tokens_per_second=result.tokens / seconds,
            mfu=self._predicted.mfu_at(seconds),
            allocated_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
            reserved_bytes=torch.cuda.max_memory_reserved() if on_gpu else None,
            predicted_allocated_bytes=self._predicted.allocated_bytes,
            predicted_reserved_bytes=self._predicted.reserved_bytes,
            evaluation_loss=evaluation_loss,
        )

    def _report(self, line: Line, begin: float) -> None:
        """Write a step's metrics and show them, on the first rank."""
        if self._metrics is None:
            return
        self._metrics.write(line)
        total = self._setup.lengths.total
        seconds_left = line.step_seconds * (total - line.step)
        capacity = None if self._setup.on_cpu else torch.cuda.mem_get_info()[1]
        text = describe(line, total=total, seconds_left=seconds_left, capacity_bytes=capacity)
        self._progress.show(text, always=line.step in (1, total) or line.evaluation_loss is not None)
        if line.skipped:
            self._progress.remark(f"step {line.step} was left out: loss {line.loss}, limit {self._guard.limit:.4f}")
        self._watch_memory(line, capacity)

    def _watch_memory(self, line: Line, capacity: int | None) -> None:
        """Remark fragmentation, once."""
        if capacity is None or self._is_warned or line.allocated_bytes is None or line.reserved_bytes is None:
            return
        remark = fragmentation.remark(
            allocated_bytes=line.allocated_bytes,
            reserved_bytes=line.reserved_bytes,
            capacity_bytes=capacity,
            retries=torch.cuda.memory_stats().get("num_alloc_retries", 0),
            expandable=self._setup.plan.allocator == "expandable",
        )
        if remark is not None:
            self._is_warned = True
            self._progress.remark(remark)

    def _save_final(self) -> Path:
        """Write the trained network and its tokenizer into their folder, whole or not at all."""
        final = self._settings.out / FINAL
        draft = final.with_name(f".{FINAL}.part")
        if self._rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
        self._trainable.save_pretrained(draft)
        if self._rank == 0:
            try:
                self._setup.tokenizer.save(draft)
                shutil.rmtree(final, ignore_errors=True)
                draft.rename(final)
            except OSError as error:
                raise UnwritableFile(f"{final} cannot be written ({error.strerror or error}).") from error
        return final

    def _outcome(self, seconds: float, final: Path | None) -> Outcome:
        state = self._state
        return Outcome(
            steps=state.step,
            loss=state.loss,
            evaluation_loss=state.evaluation_loss,
            skipped=state.skipped,
            seconds=seconds,
            final=final,
            is_first_rank=self._rank == 0,
        )
