"""A trial of a user's script on real devices: its steps are timed, then it evaluates and saves once, and ends.

TONNAGE_TRIAL is a JSON object: `folder` (each rank writes RANK.json there), `steps` (timed steps at most), `warm`
(steps before them), `fewest` and `steady` (timed steps whose spread is so small end the timing), `batches` (of the
evaluation), `launched` (a launcher starts the ranks, and is none itself).

A Trainer also makes a pass over its longest rows, evaluates a few batches if it has rows for that, and saves into
its `output_dir`, which TONNAGE_SETTINGS puts into a folder of the trial.  A loop of the script's own ends after its
steps.
"""

import atexit
import contextlib
import copy
import json
import os
import statistics
import sys
import time
from types import ModuleType, TracebackType
from typing import Any

from . import outcome
from .imports import after_import, expect
from .script import Script
from .step_counter import StepCounter

_MAY_IMPORT_TORCH = ("transformers.trainer", "transformers.training_args", "accelerate.accelerator")

_MOST_ROWS = 10_000
"""Rows that are looked at to find the longest."""


def install() -> None:
    """Watch this process, if it is a rank of the script."""
    settings = json.loads(os.environ["TONNAGE_TRIAL"])
    if settings["launched"] and "RANK" not in os.environ:
        return
    expect(*_MAY_IMPORT_TORCH)
    trial = ScriptTrial(settings)
    trial.script.listen()
    trial.hear_uncaught()
    after_import("torch", trial.hear_optimizers)
    after_import("transformers.trainer", trial.hear_trainer)
    atexit.register(trial.end)


class ScriptTrial:
    """The times and the end of one process."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.script = Script()
        self.moment = "load"
        self.steps = 0
        self.tokens = 0
        self._begun = 0.0
        self._seconds: list[float] = []
        self._tokens: list[int] = []
        self._process = os.getpid()
        self._facts: dict[str, Any] | None = None
        self._has_trainer = False
        self._optimizers = StepCounter(lambda parameter: True)

    def hear_uncaught(self) -> None:
        """Write the outcome of an uncaught exception."""
        shown = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            told = outcome.describe(error)
            is_memory = outcome.ran_out(error) or isinstance(error, MemoryError)
            self.write("out_of_memory" if is_memory else "failed", f"{told['error']}: {told['message'][:300]}")
            shown(kind, error, trace)

        sys.excepthook = hook

    def hear_optimizers(self, torch: ModuleType) -> None:
        """Count the steps of a loop's optimizers."""
        from torch.optim import optimizer

        made = optimizer.Optimizer.__init__

        def init(own: Any, *args: Any, **kwargs: Any) -> None:
            made(own, *args, **kwargs)
            self._optimizers.add(own)
            self.moment = f"step {self.steps + 1}"

        def stepped(own: Any, *_: Any) -> None:
            if self._has_trainer or os.getpid() != self._process:
                return
            self._optimizers.count(own)
            if not self._optimizers.is_unfinished():
                self._optimizers.begin_step()
                self.add_step()
                if self.is_over():
                    self.write("finished")
                    _leave()

        optimizer.Optimizer.__init__ = init  # type: ignore[method-assign]
        optimizer.register_optimizer_step_post_hook(stepped)

    def hear_trainer(self, module: ModuleType) -> None:
        """Time the steps of a Trainer, then have it evaluate and save."""
        kind = module.Trainer
        made, trained = kind.__init__, kind.training_step

        def init(trainer: Any, *args: Any, **kwargs: Any) -> None:
            made(trainer, *args, **kwargs)
            self._has_trainer = True
            trainer.add_callback(_make_callback(module, trainer, self))

        def training_step(trainer: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.tokens += _count(inputs)
            return trained(trainer, model, inputs, *args, **kwargs)

        kind.__init__, kind.training_step = init, training_step

    def keep_facts(self) -> None:
        """Keep what is known of the script before an evaluation, whose batches are not those of training."""
        self._facts = copy.deepcopy(self.script.facts)

    def begin(self) -> None:
        """Begin to time the next step."""
        self.moment = f"step {self.steps + 1}"
        self._begun = time.perf_counter()

    def add_step(self) -> None:
        """Add the step that was just made."""
        _wait()
        now = time.perf_counter()
        self.steps += 1
        if self.steps > self.settings["warm"]:
            self._seconds.append(now - self._begun)
            self._tokens.append(self.tokens)
        self.tokens = 0
        self.begin()

    def is_over(self) -> bool:
        """Return whether the steps are steady, or as many as wanted; several ranks make as many each."""
        fewest, most = self.settings["fewest"], self.settings["steps"]
        last = self._seconds[-fewest:]
        is_steady = len(last) == fewest and max(last) - min(last) <= self.settings["steady"] * statistics.median(last)
        return len(self._seconds) >= most or (is_steady and _ranks() == 1)

    def end(self) -> None:
        """Write the outcome of a script that ended by itself."""
        if self._seconds:
            self.write("finished")
        elif self.steps:
            self.write("failed", f"it made {self.steps} optimizer steps, too few to time any")

    def write(self, ended: str, message: str = "") -> None:
        """Write the outcome, once."""
        path = os.path.join(self.settings["folder"], f"{os.environ.get('RANK', '0')}.json")
        if os.getpid() != self._process or os.path.exists(path):
            return
        document = {"ended": ended, "moment": self.moment, "message": message, **_memory()}
        if ended == "finished":
            median = statistics.median(self._seconds)
            document["step_seconds"] = median
            document["spread"] = (max(self._seconds) - min(self._seconds)) / 2 / median
            if sum(self._tokens):
                document["tokens_per_second"] = statistics.mean(self._tokens) / median
        facts = {
            "recorded": {**(self._facts or self.script.facts), "processes": _ranks()},
            "allocator_settings": os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")),
            "torch_version": getattr(sys.modules.get("torch"), "__version__", None),
        }
        draft = f"{path}.part"
        with open(draft, "w") as file:
            json.dump({"outcome": document, "ranks": _ranks(), "facts": facts}, file, default=str)
        os.replace(draft, path)


def _make_callback(module: Any, trainer: Any, trial: ScriptTrial) -> Any:
    """Return a callback that ends a Trainer after its timed steps, a pass over long rows, evaluation and save."""

    class TrialCallback(module.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            _limit_evaluation(trainer, trial.settings["batches"])

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            trial.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **__: Any) -> None:
            trial.add_step()
            control.should_save = control.should_evaluate = False
            if trial.is_over() or state.global_step >= state.max_steps:
                trial.moment = "longest rows"
                _pass_longest(trainer)
                trial.keep_facts()
                control.should_evaluate = getattr(trainer, "eval_dataset", None) is not None
                control.should_save = True
                trial.moment = "evaluation" if control.should_evaluate else "save"

        def on_evaluate(self, *_: Any, **__: Any) -> None:
            trial.moment = "save"

        def on_save(self, *_: Any, **__: Any) -> None:
            trial.write("finished")
            _leave()

    return TrialCallback()


class _Enough(Exception):
    """Ends an evaluation early."""


class _Metrics(dict[str, float]):
    """Metrics of an evaluation that was cut short: each is 0."""

    def __missing__(self, name: str) -> float:
        return 0.0


def _limit_evaluation(trainer: Any, most: int) -> None:
    """Let the Trainer evaluate this number of batches only."""
    evaluate, predict = trainer.evaluate, trainer.prediction_step
    left = [most]

    def prediction_step(*args: Any, **kwargs: Any) -> Any:
        if not left[0]:
            raise _Enough
        left[0] -= 1
        return predict(*args, **kwargs)

    def evaluate_few(*args: Any, **kwargs: Any) -> Any:
        left[0] = most
        try:
            return evaluate(*args, **kwargs)
        except _Enough:
            trainer.control = trainer.callback_handler.on_evaluate(trainer.args, trainer.state, trainer.control, {})
            return _Metrics()

    trainer.evaluate, trainer.prediction_step = evaluate_few, prediction_step


def _pass_longest(trainer: Any) -> None:
    """Make one forward and backward of a micro-batch of the longest rows, if rows differ in length."""
    loader = trainer.get_train_dataloader()
    rows: Any = getattr(loader, "dataset", None)
    if (
        getattr(trainer, "is_deepspeed_enabled", False)
        or not hasattr(rows, "__getitem__")
        or not hasattr(rows, "__len__")
    ):
        return
    lengths = [_length(rows[index]) for index in range(min(len(rows), _MOST_ROWS))]
    if len(set(lengths)) < 2:
        return
    longest = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    longest = longest[: trainer.args.per_device_train_batch_size]
    batch = loader.collate_fn([rows[index] for index in longest])
    trainer.model_wrapped.train()
    trainer.training_step(trainer.model_wrapped, batch)
    trainer.model_wrapped.zero_grad(set_to_none=True)
    _wait()


def _length(row: Any) -> int:
    words = row.get("input_ids") if hasattr(row, "get") else None
    return len(words) if words is not None else 0


def _count(inputs: Any) -> int:
    """Return the number of tokens of a micro-batch, padding included."""
    words: Any = inputs.get("input_ids") if hasattr(inputs, "get") else None
    return int(words.numel()) if hasattr(words, "numel") else 0


def _ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _cuda() -> Any:
    """Return torch.cuda if this process uses a GPU."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_available() and cuda.is_initialized() else None


def _wait() -> None:
    cuda = _cuda()
    if cuda is not None:
        cuda.synchronize()


def _memory() -> dict[str, int]:
    cuda = _cuda()
    if cuda is None:
        return {}
    return {
        "allocated_bytes": cuda.max_memory_allocated(),
        "reserved_bytes": cuda.max_memory_reserved(),
        "capacity_bytes": cuda.mem_get_info()[1],
    }


def _leave() -> None:
    """End the process at once: ranks whose peers failed would wait for them."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)
