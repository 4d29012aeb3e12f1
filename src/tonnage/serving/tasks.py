"""The two tasks, and which options belong to which."""

from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

from tonnage.errors import UsageError
from tonnage.options import spell_option, unknown_word

Task = Literal["train", "serve"]
TASKS: Final[tuple[str, ...]] = get_args(Task)
"""Words of `--task`."""

SHARED: Final = ("tp", "pp", "ep", "engine", "lengths")
"""Options of training plans that an engine has too."""

_IN_TRAINING: Final = {
    "max_len": "--seq-len",
    "max_batched_tokens": "--global-batch-tokens",
    "max_seqs": "--micro-batch",
    "gpu_memory_utilization": "--headroom (percent of each GPU to leave free; in tonnage plan)",
    "quantization": "--quant, with --method qlora",
    "dp": "--shard ddp",
}
"""Options of training that are the nearest to those of an engine."""


_IN_SERVING: Final = {
    "seq_len": "--max-len",
    "micro_batch": "--max-seqs",
    "global_batch_tokens": "--max-batched-tokens",
    "quant": "--quantization",
}
"""Options of an engine that are the nearest to those of training."""


def is_given(value: object) -> bool:
    """Return True unless a value stands for an option that was not given."""
    return value is not None and value is not False and value != ()


def check_task(task: str, serving: Mapping[str, Any], training: Mapping[str, Any]) -> None:
    """Raise UsageError for an unknown task, or an option that the other task has.

    `serving` and `training` are the options by the names of their parameters.
    """
    if task not in TASKS:
        raise unknown_word("task", task, TASKS)
    kind, others = ("an inference engine", serving) if task == "train" else ("training", training)
    wrong = next((name for name, value in others.items() if is_given(value) and name not in SHARED), None)
    if wrong is None:
        return
    if task == "serve":
        meant = _IN_SERVING.get(wrong)
        instead = f"with --task serve {'leave it out' if meant is None else f'give {meant}'}"
    else:
        meant = _IN_TRAINING.get(wrong)
        instead = f"add --task serve, or {'leave it out' if meant is None else f'for training give {meant}'}"
    raise UsageError(f"--{spell_option(wrong)} is for {kind}; {instead}.")
