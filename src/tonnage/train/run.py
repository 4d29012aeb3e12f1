"""`tonnage train`: a complete run of a plan, from files of text to a folder that transformers loads.

The rows that a step reads, the random numbers that it draws and its learning rate are functions of the seed and of
the numbers of steps and rows that are done.  A resumed run therefore does what it would have done without the stop.
"""

from __future__ import annotations

import gc
import math
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from transformers.utils import logging

from tonnage.errors import OutOfDeviceMemory, TrialFailed, UnreadableFile, UnwritableFile, UsageError
from tonnage.files import make_folder
from tonnage.train import applying, checkpoints, checks, fragmentation, networks, packing, run_file, schedules, states
from tonnage.train import setup as setups
from tonnage.train.guard import Guard
from tonnage.train.metrics import Line, Metrics
from tonnage.train.prediction import Estimation, Predicted
from tonnage.train.progress import Pace, Progress, describe, draw_curve
from tonnage.units import pluralise

if TYPE_CHECKING:
    from tonnage.train.settings import Settings
    from tonnage.train.setup import Setup
    from tonnage.train.trainable import StepResult, Trainable

CHECKPOINTS: Final = "checkpoints"
"""Folder of the checkpoints, in that of the run."""

FINAL: Final = "final"
"""Folder of the trained network, in that of the run."""

_MOST_RETURNS: Final = 3
"""Times that a run goes back to one checkpoint before it gives up."""

_GHOST: Final = "GHOST_DEVICES"
"""Variable of processes whose GPU computes nothing: no estimate is made beside them, and no loss is judged."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a run."""

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
    best_loss: float | None = None
    """Lowest loss of an evaluation at which a checkpoint was saved."""
    best: str | None = None
    """Name of that checkpoint."""


def train(settings: Settings) -> Outcome:
    """Train as the settings say, and return what came of it.  Raises TonnageError."""
    logging.disable_progress_bar()
    rank, ranks = checks.started_as()
    progress = Progress(shows=rank == 0)
    try:
        if rank == 0:
            _check_out(settings)
        setup = setups.prepare(settings, ranks)
        for line in (setup.describe(), *setup.remarks):
            progress.remark(line)
        if rank == 0:
            _begin_folder(setup, progress)
        return _run(setup, rank, progress)
    finally:
        progress.close()
        if dist.is_initialized():
            gc.collect()  # what is sharded refers to groups of ranks, and to itself
            dist.destroy_process_group()


def _run(setup: Setup, rank: int, progress: Progress) -> Outcome:
    run = _Run(setup, rank, progress)
    with run.stops_on_signals(), run.names_lost_ranks():
        outcome = run.run()
    if checkpoints.count_ranks() > 1:
        dist.barrier()  # no rank leaves while another one writes
    return outcome


def _check_out(settings: Settings) -> None:
    """Raise UsageError for a folder that is in use, or that has nothing to resume."""
    out = settings.out
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file; name a folder.")
    has_run = (out / run_file.FILE).is_file()
    names = [path.name for path in out.iterdir()] if out.is_dir() else []
    is_used = any(not name.startswith(".") and name != run_file.FILE for name in names)  # by more than a first step's
    if is_used and not settings.resume:
        way_out = ", or continue its run with --resume" if has_run else "; no run of tonnage train is in it"
        raise UsageError(f"--out {out} is in use; name another folder{way_out}.")
    if settings.resume and not has_run:
        raise UsageError(f"--out {out} has no run to resume; leave --resume out.")


def _begin_folder(setup: Setup, progress: Progress) -> None:
    """Make the folder of a new run, or check that a resumed one is the same run.  Raises UsageError."""
    out = setup.settings.out
    is_written = _GHOST not in os.environ  # a dry-run leaves no trace, which would stop the next one
    if setup.settings.resume:
        if remark := run_file.check(setup, out):
            progress.remark(remark)
        if is_written:
            checkpoints.remove_partial(out / CHECKPOINTS)
    elif is_written:
        make_folder(out)
        run_file.write(setup, out)


class _Run:
    """A run from its first step to its end."""

    def __init__(self, setup: Setup, rank: int, progress: Progress) -> None:
        self._setup, self._rank, self._progress = setup, rank, progress
        self._settings = setup.settings
        self._pace = Pace()
        self._state = _State()
        self._guard = Guard(sigmas=self._settings.spike_sigmas)
        self._checkpoints = self._settings.out / CHECKPOINTS
        self._returns = Counter[Path]()
        self._is_stopped = False
        self._is_warned = False
        self._evaluated: float | None = None

    def run(self) -> Outcome:
        """Build the network, train it, and save it."""
        predicts = self._rank == 0 and not self._setup.on_cpu and _GHOST not in os.environ
        estimation = Estimation(self._settings.plan, self._settings.model) if predicts else None
        try:
            with self._names_shortage("before the first step"):
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
        if self._settings.resume:
            self._resume()
        logs = self._settings.logs
        self._metrics = Metrics(self._settings.out, done=self._state.step, logs=logs) if self._writes else None
        begin = time.perf_counter()
        while self._state.step < self._setup.lengths.total:
            self._take_step()
            is_stopped = self._agree_to_stop()
            is_end = self._state.step == self._setup.lengths.total
            if is_end:
                self._check_weights()
            is_good = not self._guard.bad_in_a_row and not self._guard.is_back  # else there is nothing new to save
            is_due = is_good and self._state.step % self._settings.save_every == 0
            if is_stopped or is_end or is_due:
                self._save()
            if is_stopped:
                return self._outcome(time.perf_counter() - begin, None)
        final = self._save_final()
        self._show_curve()
        return self._outcome(time.perf_counter() - begin, final)

    @contextmanager
    def stops_on_signals(self) -> Iterator[None]:
        """Let SIGTERM and SIGINT end the run after a step, with a checkpoint."""
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def names_lost_ranks(self) -> Iterator[None]:
        """Raise TrialFailed if an exchange fails because another rank has ended."""
        try:
            yield
        except RuntimeError as error:
            if checkpoints.count_ranks() == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            raise TrialFailed(
                f"Another rank has ended or cannot be reached, as rank {self._rank} saw in step "
                f"{self._state.step + 1}; its own message says why.  Continue with --resume."
            ) from error

    def _stop(self, number: int, frame: object) -> None:
        """Remember that the run is to end after this step; the second signal ends it at once."""
        if self._is_stopped:
            raise KeyboardInterrupt
        self._is_stopped = True

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

    @property
    def _writes(self) -> bool:
        """Return True on the rank that writes what is not saved by all; a dry-run writes nothing."""
        return self._rank == 0 and _GHOST not in os.environ

    @property
    def _device(self) -> torch.device:
        return self._trainable.ready.step.world.device

    @property
    def _replica(self) -> int:
        """Return which of the ranks with batches of their own this is."""
        world = self._trainable.ready.step.world
        return dist.get_rank(world.group("dp_replicate", "dp_shard")) if world.axes.data_parallel > 1 else 0

    def _agree_to_stop(self) -> bool:
        """Return True if any rank was told to stop."""
        return checkpoints.is_any_rank(self._trainable.ready, self._is_stopped)

    def _last_checkpoint(self) -> Path | None:
        """Return the newest whole checkpoint as the first rank finds it."""
        name = None
        if self._rank == 0:
            path = checkpoints.last_whole(self._checkpoints, self._progress.remark)
            name = None if path is None else path.name
        if checkpoints.count_ranks() > 1:
            names = [name]
            dist.broadcast_object_list(names, device=self._device, group=self._trainable.ready.group)
            name = names[0]
        return None if name is None else self._checkpoints / name

    def _resume(self) -> None:
        """Continue from the last checkpoint; without one the run begins anew."""
        last = self._last_checkpoint()
        if last is None and (damaged := checkpoints.list_checkpoints(self._checkpoints)):
            raise UnreadableFile(
                f"{self._checkpoints} has no whole checkpoint ({pluralise(len(damaged), 'damaged one')}); delete it "
                "to begin anew."
            )
        if last is None:
            self._progress.remark("no checkpoint was finished; the run begins anew")
            return
        extra, total = self._trainable.resume(last), self._setup.lengths.total
        try:
            self._state = _State(**extra["state"])
            self._guard.load(extra["guard"])
        except (KeyError, TypeError, ValueError) as error:
            raise UnreadableFile(f"{last} was not saved by tonnage train ({type(error).__name__}).") from error
        if self._state.step > total:
            raise UsageError(f"The run has done {self._state.step} steps, more than {total}; raise --max-steps.")
        if self._writes:
            run_file.write(self._setup, self._settings.out)
        self._progress.remark(f"resumed {last}")

    def _save(self) -> None:
        """Save a checkpoint, and delete those that are not kept."""
        state = self._state
        path = self._checkpoints / f"step-{state.step}"
        if self._evaluated is not None and (state.best_loss is None or self._evaluated < state.best_loss):
            state.best_loss, state.best = self._evaluated, path.name
        if self._writes and path.exists():  # it is damaged, else the run had continued from it
            shutil.rmtree(path)
        with self._names_shortage(f"at the save after step {state.step}"):
            self._trainable.save(path, {"state": asdict(state), "guard": self._guard.state()})
        if self._writes:
            best = None if state.best is None else self._checkpoints / state.best
            checkpoints.keep(self._checkpoints, last=self._settings.keep, best=best)

    def _go_back(self) -> None:
        """Load the last checkpoint, and go on with the data after the bad steps.  Raises TrialFailed."""
        last = self._last_checkpoint()
        step = self._state.step
        if last is None:
            raise TrialFailed(
                f"{self._guard.bad_in_a_row} steps in a row, up to step {step}, were left out, and there is no "
                "checkpoint to go back to; choose a lower --lr, a longer --warmup-steps or a smaller --save-every."
            )
        self._returns[last] += 1
        if self._returns[last] > _MOST_RETURNS:
            raise TrialFailed(
                f"The run went back to {last} {_MOST_RETURNS} times and its steps are bad again at step {step}; "
                "choose a lower --lr, or --spike-sigmas 0 if such losses are right."
            )
        self._trainable.resume(last)
        self._guard.went_back()
        self._progress.remark(f"went back to the weights of {last} after step {step}; the data goes on")

    def _take_step(self) -> None:
        """Do a step with what follows it: evaluation, metrics, progress."""
        setup, state = self._setup, self._state
        start = time.perf_counter()
        self._set_rates(schedules.SCHEDULES[self._settings.schedule](state.step, setup.lengths))
        torch.manual_seed(packing.mix(self._settings.seed, state.step, self._replica))
        end = state.rows + setup.rows_a_step
        rows = self._rows(state.rows, end if setup.last_row is None else min(end, setup.last_row))
        batches = self._batches(setup.training, rows, setup.job.grad_accum)
        with self._names_shortage(f"in step {state.step + 1}"):
            result = self._trainable.step(batches, None if _GHOST in os.environ else self._accepts)
        seconds = time.perf_counter() - start
        state.step, state.rows = state.step + 1, end
        state.skipped += result.skipped
        state.loss = result.loss if math.isfinite(result.loss) else None
        self._evaluated = self._evaluate()
        self._report(self._line(result, seconds))
        plan = setup.plan
        is_updated = plan.optimizer_in_backward and plan.clip_grad_norm is None
        if self._guard.must_go_back or (self._guard.bad_in_a_row and is_updated):
            self._go_back()

    def _check_weights(self) -> None:
        """Raise TrialFailed if the trained weights give no number as loss, as after a learning rate too high."""
        setup, state = self._setup, self._state
        if bad := self._guard.bad_in_a_row:
            self._progress.remark(
                f"the run ends with {pluralise(bad, 'step')} left out; if weights that diverged are at fault and not "
                "the data, the trained network is of no use"
            )
        if _GHOST in os.environ or self._evaluated is not None:  # an evaluation at the end is None or a number
            return
        rows = self._rows(0, min(setup.rows_a_step, setup.last_row or setup.rows_a_step))
        with self._names_shortage(f"in the evaluation after step {state.step}"):
            evaluation = self._trainable.evaluate(self._batches(setup.training, rows, setup.job.grad_accum))
        if evaluation.tokens and not math.isfinite(evaluation.loss):
            raise TrialFailed(
                f"The run diverged: under the weights after step {state.step} the loss of the first step's batch is "
                "no number, so they are not saved; choose a lower --lr or a longer --warmup-steps, and train into a "
                "new folder."
            )

    @contextmanager
    def _names_shortage(self, moment: str) -> Iterator[None]:
        """Raise OutOfDeviceMemory with the moment if memory runs out."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            first_line = str(error).partition("\n")[0].partition(" GPU ")[0].rstrip(". ")
            raise OutOfDeviceMemory(
                f"Out of memory {moment} on rank {self._rank}: {first_line}; plan with a larger --headroom or a "
                "smaller --micro-batch, and train into a new folder."
            ) from error

    def _accepts(self, loss: float, gradient_norm: float | None) -> bool:
        """Ask the guard; under a loss scaler gradients may overflow, and it leaves such steps out itself."""
        is_scaled = self._trainable.ready.scaler is not None
        return self._guard.accepts(loss, None if is_scaled else gradient_norm)

    def _set_rates(self, factor: float) -> None:
        for optimizer, rates in zip(self._trainable.optimizers, self._rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                states.set_hyperparameter(group, "lr", rate * factor)

    def _rows(self, begin: int, end: int) -> list[int]:
        return packing.rows_of_step(begin, end, len(self._setup.training), self._settings.seed)

    def _batches(self, sequences: packing.Sequences, rows: list[int], micro_batches: int) -> list[packing.Batch]:
        """Return this rank's micro-batches of these rows."""
        setup = self._setup
        size = setup.job.micro_batch
        shares = packing.share_rows(
            rows, size=size, micro_batches=micro_batches, ranks=setup.replicas, rank=self._replica
        )
        return [sequences.batch(share, size) for share in shares]

    def _evaluate(self) -> float | None:
        """Return the loss on the evaluation's sequences, if it is time for it or the run ends."""
        setup, state, every = self._setup, self._state, self._settings.eval_every
        is_due = every is not None and state.step % every == 0
        is_end = state.step == setup.lengths.total
        if setup.evaluation is None or not (is_due or is_end):
            return None
        rows = list(range(len(setup.evaluation)))
        micro_batches = math.ceil(len(rows) / (setup.job.micro_batch * setup.replicas))
        with self._names_shortage(f"in the evaluation after step {state.step}"):
            evaluation = self._trainable.evaluate(self._batches(setup.evaluation, rows, micro_batches))
        state.evaluation_loss = evaluation.loss if math.isfinite(evaluation.loss) else None
        return state.evaluation_loss

    def _line(self, result: StepResult, seconds: float) -> Line:
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
            evaluation_loss=self._evaluated,
        )

    def _report(self, line: Line) -> None:
        """Write a step's metrics and show them, on the first rank."""
        if self._rank != 0:
            return
        if self._metrics is not None:
            self._metrics.write(line)
        total = self._setup.lengths.total
        seconds_left = self._pace.seconds_left(line.step, total, line.step_seconds)
        capacity = None if self._setup.on_cpu else torch.cuda.mem_get_info()[1]
        text = describe(line, total=total, seconds_left=seconds_left, capacity_bytes=capacity)
        self._progress.show(text, always=line.step in (1, total) or line.evaluation_loss is not None)
        if line.skipped:
            norm = line.gradient_norm
            why = "its loss is no number"
            if line.loss is not None:
                why = f"loss {line.loss:.4f}, limit {self._guard.limit:.4f}"
            why = f"norm of the gradients {norm}" if norm is not None and not math.isfinite(norm) else why
            self._progress.remark(f"step {line.step} was left out: {'no labels' if not line.tokens else why}")
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
        try:
            with self._names_shortage("at the save of the trained network"):
                self._trainable.save_pretrained(draft)
            if self._rank == 0:
                self._setup.tokenizer.save(draft)
                shutil.rmtree(final, ignore_errors=True)
                draft.rename(final)
        except (OSError, UnwritableFile) as error:
            shutil.rmtree(draft, ignore_errors=True)
            reason = str(getattr(error, "strerror", None) or error).rstrip(".")
            raise UnwritableFile(
                f"{final} is not written: {reason}.  Make room, and continue with --resume."
            ) from error
        return final

    def _show_curve(self) -> None:
        """Show the losses of all steps of the run as a curve, those before a resume included."""
        losses = [] if self._metrics is None else self._metrics.read_losses()
        if (curve := draw_curve(losses)) is not None:
            self._progress.remark(f"loss  {losses[0]:.4f} {curve} {losses[-1]:.4f}")

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
