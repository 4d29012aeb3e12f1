"""Imports in a process that must never touch the GPU, because it forks.

A process that has initialised CUDA cannot hand it on: torch refuses in every fork.  Some libraries ask for the card
while they are imported (bitsandbytes to choose its binary, torchao and torch's triton check to choose kernels), and
peft imports both where they are installed.  Here they are told of an ordinary card and nothing is initialised; what
they ask later, in the fork, the fork's own card answers.  An import that wants more than that is undone.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

import torch

CAPABILITY: Final = (8, 0)
"""What is said to whoever asks during an import: new enough for triton (7.0), none of the later cards' extras."""


class _NeedsCard(BaseException):
    """An import wants CUDA initialised.  Not an Exception, so that no library takes it for a missing feature."""


def imported(name: str) -> bool:
    """Import a module if it is installed and can do without a card; else False, with nothing of it left behind."""
    if name in sys.modules:
        return True
    if importlib.util.find_spec(name.partition(".")[0]) is None:  # of a dotted name it would import the parents
        return False
    before = set(sys.modules)
    try:
        with _card_is_told():
            importlib.import_module(name)
    except (_NeedsCard, Exception):  # what is broken says so where it is used, in the fork
        for added in set(sys.modules) - before:
            del sys.modules[added]
        return False
    return True


@contextmanager
def _card_is_told() -> Iterator[None]:
    """Answer questions about the card without one; whatever would initialise CUDA raises _NeedsCard."""
    major, minor = CAPABILITY
    card = SimpleNamespace(name="", major=major, minor=minor, gcnArchName="", multi_processor_count=1, total_memory=0)
    answers: dict[str, Any] = {
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_properties": lambda device=None: card,
        "current_device": lambda: 0,
        "_lazy_init": _refuse,
    }
    kept = {name: getattr(torch.cuda, name) for name in answers}
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    try:
        yield
    finally:
        for name, original in kept.items():
            setattr(torch.cuda, name, original)
        _forget_answers()


def _refuse() -> None:
    raise _NeedsCard


def _forget_answers() -> None:
    """torch.compile keeps the properties of cards that it has asked for."""
    interface = sys.modules.get("torch._dynamo.device_interface")
    getattr(interface, "caching_worker_device_properties", {}).clear()
