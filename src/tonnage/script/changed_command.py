"""A script's command line with other settings, by its own flags, its launcher's, variables or lines of its code."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tonnage.script import launchers
from tonnage.script.command import set_value
from tonnage.script.facts import Facts
from tonnage.script.setting_changes import Change, Setting, has_value

_LOOPS_CODE: Final = {
    "mixed_precision": "Accelerator(mixed_precision={!r})",
    "gradient_accumulation_steps": "Accelerator(gradient_accumulation_steps={!r})",
    "fused": "torch.optim.AdamW(..., fused={!r})",
}
"""Code of each setting of a loop with an Accelerator."""


@dataclass(frozen=True, kw_only=True)
class ChangedCommand:
    """A command line with the settings of some changes."""

    command: tuple[str, ...]
    """The words."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables to set for it."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Settings to write into the script's own code; a run puts them into the objects that the script makes."""
    in_code: tuple[str, ...] = ()
    """The same settings as lines of code."""
    settings: tuple[Setting, ...] = ()
    """All settings that were changed."""
    is_loop: bool = False
    """True if the script has a loop of its own around an Accelerator."""

    @property
    def variables(self) -> dict[str, str]:
        """Return the variables of a run, with the settings that are put into the script's objects."""
        put_in = {**self.arguments, "of": "loop"} if self.is_loop else dict(self.arguments)
        return {**self.environment, **({"TONNAGE_SETTINGS": json.dumps(put_in)} if self.arguments else {})}

    @property
    def line(self) -> str:
        """Return the shell command with the variables in front."""
        return write_line(self.command, self.environment)

    def list_not_taken(self, after: Facts) -> Iterator[str]:
        """Yield a sentence about each setting that the script's own objects do not have in a run with them."""
        for setting in self.settings:
            if setting.where == "environment":
                if str(setting.after) not in after.allocator_settings:
                    yield f"{setting} did not reach the process, which has {after.allocator_settings!r}."
            elif not has_value(after.settings.get(setting.name), setting.after):
                yield (
                    f"{setting.name} was given as {setting.after}, but the script set it to "
                    f"{after.settings.get(setting.name)}."
                )


def change_command(command: Sequence[str], facts: Facts, changes: Sequence[Change]) -> ChangedCommand:
    """Return the command with the settings of the changes."""
    settings = tuple(setting for change in changes for setting in change.settings)
    words = list(command)
    for setting in settings:
        if setting.where == "flag" and setting.flag is not None:
            words = set_value(words, setting.flag, setting.after, facts.options)
        elif setting.where == "launcher":
            words = launchers.set_accelerate_flag(words, f"--{setting.name}", str(setting.after))
    arguments = {setting.name: setting.after for setting in settings if setting.where == "argument"}
    return ChangedCommand(
        command=tuple(words),
        environment={setting.name: str(setting.after) for setting in settings if setting.where == "environment"},
        arguments=arguments,
        in_code=tuple(_write_as_code(name, value, facts) for name, value in arguments.items()),
        settings=settings,
        is_loop=facts.is_loop,
    )


def write_line(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return a shell command with variables in front."""
    words = [*(f"{name}={value}" for name, value in environment.items()), *command]
    return shlex.join(["env", *words] if environment else words)


def _write_as_code(name: str, value: Any, facts: Facts) -> str:
    """Return the code of a setting that the script has no flag for."""
    if not facts.is_loop:
        return f"{facts.arguments}({name}={value!r})"
    if name == "gradient_checkpointing":
        return f"model.gradient_checkpointing_{'enable' if value else 'disable'}()"
    return _LOOPS_CODE[name].format(value)
