"""Imports in a process that must never touch the GPU, because it forks.

A process that has initialised CUDA cannot hand it on: torch refuses in every fork.  Some libraries ask for the card
while they are imported (bitsandbytes to choose its binary, torchao and torch's triton check to choose kernels), and
peft imports both where they are installed.  Here they are told of an ordinary card and nothing is initialised; what
they ask later, in the fork, the fork's own card answers.  An import that wants more than that is undone.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

import torch

CAPABILITY: Final = (8, 0)
"""What is said to whoever asks during an import: new enough for triton (7.0), none of the later cards' extras."""

CARD: Final = SimpleNamespace(
    name="", major=CAPABILITY[0], minor=CAPABILITY[1], gcnArchName="", multi_processor_count=1, total_memory=0
)
"""The rest of it: nothing that a library would choose a kernel for."""


class NeedsCard(BaseException):
    """An import wants CUDA initialised.  Not an Exception, so that no library takes it for a missing feature."""


def imported(name: str) -> bool:
    """Import a module if it is installed and can do without a card; else False, with nothing of it left behind.

    But for torch's own modules: some of them register operators and cannot be imported twice, so that the fork would
    hear of these and not of what is broken.
    """
    if name in sys.modules:
        return True
    if importlib.util.find_spec(name.partition(".")[0]) is None:  # of a dotted name it would import the parents
        return False
    before = set(sys.modules)
    try:
        with _card_is_told():
            importlib.import_module(name)
    except (NeedsCard, Exception):  # what is broken says so where it is used, in the fork
        for added in set(sys.modules) - before:
            if added.partition(".")[0] != "torch":
                del sys.modules[added]
        return False
    return True


@contextmanager
def _card_is_told() -> Iterator[None]:
    """Answer questions about the card without one; whatever would initialise CUDA raises NeedsCard.

    The functions are given other code and stay who they are: what is imported meanwhile may keep them (torch.compile
    has a table of devices that does), and has the real ones afterwards.
    """
    answers: dict[str, Callable[..., Any]] = {
        "get_device_properties": _properties,  # get_device_capability asks it
        "current_device": _first,
        "_lazy_init": _refuse,
    }
    kept = {function: function.__code__ for function in (getattr(torch.cuda, name) for name in answers)}
    for function, answer in zip(kept, answers.values(), strict=True):
        function.__code__ = answer.__code__
    try:
        yield
    finally:
        for function, code in kept.items():
            function.__code__ = code
        _forget_answers()


# The code of these runs among torch.cuda's names, so that they import what they need.


def _properties(device: Any = None) -> SimpleNamespace:
    from tonnage.workers.preload import CARD

    return CARD


def _first() -> int:
    return 0


def _refuse() -> None:
    from tonnage.workers.preload import NeedsCard

    raise NeedsCard


def _forget_answers() -> None:
    """torch.compile keeps the properties of cards that it has asked for."""
    interface = sys.modules.get("torch._dynamo.device_interface")
    getattr(interface, "caching_worker_device_properties", {}).clear()
