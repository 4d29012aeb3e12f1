"""A script's command line with other values of its flags, as its own argument parser names them.

    set_value(["python", "train.py", "--bf16", "True"], "--bf16", None, options)    ->    ["python", "train.py"]

`options` are the parser's options by flag, each with its dest, action, nargs and default, as the script was seen to
make them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

OWN_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "per_device_train_batch_size": (
        *("batch_size", "train_batch_size", "micro_batch_size", "micro_batch", "per_device_batch_size"),
        *("per_gpu_batch_size", "per_gpu_train_batch_size", "batch", "bs", "mbs"),
    ),
    "gradient_accumulation_steps": (
        *("gradient_accumulation", "grad_accumulation_steps", "grad_accumulation", "grad_accum_steps", "grad_accum"),
        *("accumulation_steps", "accum_steps", "accumulate_grad_batches", "accumulation", "accumulate"),
        *("accum", "ga_steps"),
    ),
    "gradient_checkpointing": (
        *("grad_checkpointing", "activation_checkpointing", "checkpointing", "grad_ckpt"),
        *("use_gradient_checkpointing", "use_checkpointing"),
    ),
    "optim": ("optimizer",),
}
"""Names of settings of TrainingArguments in scripts with a parser of their own."""


def find_flag(name: str, options: Mapping[str, Any], command: Sequence[str] = (), present: Any = None) -> str | None:
    """Return the flag that sets a setting; None if there is none.

    It is the parser's own of this name, or one that is usual for it and has the `present` value of the setting.
    """
    flag = _find_named(name, options, command)
    if flag is not None or present is None:
        return flag
    usual = (_find_named(own, options, command) for own in OWN_NAMES.get(name, ()))
    return next((each for each in usual if each is not None and _read_value(each, options, command) == present), None)


def _find_named(name: str, options: Mapping[str, Any], command: Sequence[str]) -> str | None:
    """Return the flag of this name: the one in the command, else the parser's first."""
    flags = [option for option, known in options.items() if known["dest"] == name and option.startswith("--")]
    positive = [option for option in flags if not option.startswith("--no")] or flags
    used = [option for option in positive if any(_is_option(word, option) for word in command)]
    return next(iter(used or positive), None)


def _read_value(flag: str, options: Mapping[str, Any], command: Sequence[str]) -> Any:
    """Return the value of a flag in a command: its default if it is not there."""
    known = options[flag]
    default = known.get("default")
    position = _find_position(flag, command)
    if position is None:
        return default
    if known["action"] in ("storetrue", "storefalse"):
        return known["action"] == "storetrue"
    word = command[position].partition("=")[2] or next(iter(command[position + 1 :]), "")
    return int(word) if word.isdecimal() else word


def can_set(flag: str | None, value: Any, options: Mapping[str, Any], command: Sequence[str]) -> bool:
    """Return True if a flag can give this value to its setting."""
    if flag is None:
        return False
    action = options[flag]["action"]
    if action == "storetrue":
        return value is True or (value in (False, None) and _find_position(flag, command) is not None)
    if action == "storefalse":
        return value is False
    return action == "store" and (value is not None or _find_position(flag, command) is not None)


def set_value(command: Sequence[str], flag: str, value: Any, options: Mapping[str, Any]) -> list[str]:
    """Return the command with another value of a flag, in its place or at the end; None removes the flag."""
    words = _remove_flag(list(command), flag, options[flag])
    if value is None:
        return words
    action = options[flag]["action"]
    if action in ("storetrue", "storefalse"):
        return [*words, flag] if (action == "storetrue") == value else words
    if value is True and options[flag]["nargs"] == "?":  # the flag alone is true for every parser, a text may not be
        return [*words, flag]
    position = _find_position(flag, command)
    added = [flag, _spell_value(value)]
    return [*words, *added] if position is None else [*words[:position], *added, *words[position:]]


def _spell_value(value: Any) -> str:
    """Return a value as a command line has it; a dict or a list is written as JSON."""
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _is_option(word: str, option: str) -> bool:
    """Return True if a word of the command is the option, with or without its value."""
    return word == option or word.startswith(f"{option}=")


def _find_position(option: str, command: Sequence[str]) -> int | None:
    """Return the position of an option in the command, or None."""
    return next((position for position, word in enumerate(command) if _is_option(word, option)), None)


def _remove_flag(command: list[str], option: str, known: Mapping[str, Any]) -> list[str]:
    """Return the command without a flag and its value, wherever they stand."""
    while (position := _find_position(option, command)) is not None:
        end = position + 1
        has_value = command[position] == option and end < len(command) and not command[end].startswith("--")
        if has_value and known["action"] == "store" and known["nargs"] in (None, "?", 1):
            end += 1
        command = command[:position] + command[end:]
    return command
