"""Imports in a process that must never touch the GPU, because it forks.

CUDA cannot be used in forks of a process that has initialised it: torch refuses.  Some libraries query the card while
they are imported (bitsandbytes to choose its binary, torchao and torch's triton check to choose kernels), and peft
imports both where they are installed.  Here they get the facts of an ordinary card and nothing is initialised; later
queries, in the fork, are answered by the fork's own card.  An import that needs more than that is undone.

Functions that a library compiles while it is imported are compiled when they are first called, as torch.compile does
anyway: bitsandbytes has some for which Inductor would be imported, a second of processor time, and no GPU calls them.
"""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

import torch

CAPABILITY: Final = (8, 0)
"""Capability of the card during an import: new enough for triton (7.0), without the extras of later cards."""

CARD: Final = SimpleNamespace(
    name="", major=CAPABILITY[0], minor=CAPABILITY[1], gcnArchName="", multi_processor_count=1, total_memory=0
)
"""The other properties of that card: none for which a library would choose a kernel."""


class NeedsCard(BaseException):
    """An import needs CUDA initialised.  Not an Exception, so that no library takes it for a missing feature."""


def try_import(name: str) -> bool:
    """Import a module if it is installed and needs no card; return whether it was imported.

    A failed import leaves nothing behind but torch's own modules: some of them register operators and cannot be
    imported twice, so that the fork would report these instead of the real error.
    """
    if name in sys.modules:
        return True
    if importlib.util.find_spec(name.partition(".")[0]) is None:  # of a dotted name it would import the parents
        return False
    before = set(sys.modules)
    try:
        with _answer_for_card():
            importlib.import_module(name)
    except (NeedsCard, Exception):  # a broken module raises its error where it is used, in the fork
        for added in set(sys.modules) - before:
            if added.partition(".")[0] != "torch":
                del sys.modules[added]
        return False
    return True


@contextmanager
def _answer_for_card() -> Iterator[None]:
    """Answer queries of the card without one; whatever would initialise CUDA raises NeedsCard.

    The functions get other code and keep their identity: a module that is imported meanwhile may keep references to
    them (torch.compile has a table of devices that does), which are those of the real functions afterwards.
    """
    answers: dict[str, Callable[..., Any]] = {
        "get_device_properties": _properties,  # get_device_capability asks it
        "current_device": _first,
        "_lazy_init": _refuse,
    }
    compile_now, torch.compile = torch.compile, _compile_later
    original_code = {function: function.__code__ for function in (getattr(torch.cuda, name) for name in answers)}
    for function, answer in zip(original_code, answers.values(), strict=True):
        function.__code__ = answer.__code__
    try:
        yield
    finally:
        torch.compile = compile_now
        for function, code in original_code.items():
            function.__code__ = code
        _forget_answers()


def _compile_later(model: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """Return a function that is compiled by its first call; without a function, what makes one of another."""
    if model is None:
        return functools.partial(_compile_later, **options)
    compiled: list[Callable[..., Any]] = []

    @functools.wraps(model)
    def call(*arguments: Any, **named: Any) -> Any:
        if not compiled:
            compiled.append(torch.compile(model, **options))
        return compiled[0](*arguments, **named)

    return call


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
    """Clear the properties of cards that torch.compile keeps."""
    interface = sys.modules.get("torch._dynamo.device_interface")
    getattr(interface, "caching_worker_device_properties", {}).clear()
