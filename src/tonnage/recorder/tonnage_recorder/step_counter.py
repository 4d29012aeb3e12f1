"""When a step is complete in a program with several optimizers: once each of them has stepped.

Examples are a generator and its critics, or an actor, its critics and a temperature.  The memory that they need
together (all states, gradients that one leaves while another works) is there only after all of them have stepped.  An
optimizer that steps after thousands of steps only, or never, is not waited for any longer.
"""

import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from .tensors import elements

PATIENCE = 8
"""Steps of the other optimizers after which one is not waited for any longer; critics step five times for a
generator's step (WGAN)."""


class StepCounter:
    """The optimizers of a program, and which of them have stepped in this step.

    `is_here` returns whether a parameter is on the device that is watched.
    """

    def __init__(self, is_here: Callable[[Any], bool]) -> None:
        self._is_here = is_here
        self._trained: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._later: weakref.WeakSet[Any] = weakref.WeakSet()
        self._latest: weakref.WeakSet[Any] = weakref.WeakSet()
        self._ever: weakref.WeakSet[Any] = weakref.WeakSet()
        self._now: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._turns = 0
        self._most_elements = self._made = 0
        self._is_any_counted = False
        self._given_up: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, optimizer: Any) -> None:
        """Add a new optimizer; if others have stepped before it was made, it belongs to the next step.

        One whose class has no step of its own updates weights otherwise (LOMO in backward): nobody waits for it.
        """
        if not _can_step(optimizer):
            return
        (self._later if self._turns else self._known).add(optimizer)
        self._trained[optimizer] = {id(parameter) for parameter in _parameters(optimizer) if parameter.requires_grad}
        self._made += 1
        self._most_elements = max(self._most_elements, count_elements(optimizer))

    def is_new(self, optimizer: Any) -> bool:
        """Return whether this optimizer has never stepped."""
        return optimizer not in self._ever

    def is_empty(self) -> bool:
        """Return whether no optimizer could make a step."""
        return not self._known and not self._later

    def count(self, optimizer: Any) -> None:
        """Count a step of this optimizer."""
        self._turns += 1
        self._is_any_counted = True
        self._ever.add(optimizer)
        self._now[optimizer] = self._now.get(optimizer, 0) + 1

    def is_unfinished(self) -> bool:
        """Return whether some optimizer has yet to step in this step."""
        if len(self._now) == len(self._known):
            return False
        late = [each for each in list(self._known) if each not in self._now and each not in self._given_up]
        if late and max(self._now.values(), default=0) >= PATIENCE:
            self._given_up.update(late)
            return False
        return bool(self._own_parameters(late))

    def begin_step(self) -> None:
        """Begin the next step."""
        self._turns = 0
        self._now.clear()
        self._known.update(self._later)
        self._latest, self._later = self._later, weakref.WeakSet()

    def signature(self) -> tuple[int, int]:
        """Return what differs where other weights are trained: the optimizers made so far, and what they train."""
        live = [*self._known, *self._later]
        return self._made, sum(elements(p) for each in live for p in _parameters(each) if p.requires_grad)

    def idle_elements(self) -> int:
        """Return the most elements that an optimizer was made for, if none of all has stepped; else 0."""
        return 0 if self._is_any_counted else self._most_elements

    def sizes_never_stepped(self, updating: Any = None) -> list[int]:
        """Return the number of elements that each optimizer would train alone, for those that never stepped.

        The one that is `updating` is in its first step, which has not ended; what was made after the last step is for
        steps that nobody asked for.
        """
        waited = [each for each in list(self._known) if each not in self._latest]
        late = [each for each in waited if each not in self._ever and each is not updating]
        return [sum(p.numel() for p in own) for own in self._own_parameters(late)]

    def _own_parameters(self, late: Iterable[Any]) -> list[list[Any]]:
        """Return, for each optimizer, the parameters that it alone would train here.

        Optimizers without any are left out, such as one that was made again over the same parameters.  What is frozen
        now counts if it was trainable when its optimizer was made: a generator is frozen while its critic steps.
        """
        parameters = []
        for optimizer in late:
            others = [each for each in list(self._ever) if each is not optimizer]
            trained = {id(parameter) for other in others for parameter in _parameters(other)}
            made_for = self._trained.get(optimizer, ())
            own = [
                parameter
                for parameter in _parameters(optimizer)
                if (parameter.requires_grad or id(parameter) in made_for)
                and id(parameter) not in trained
                and self._is_here(parameter)
            ]
            if own:
                parameters.append(own)
        return parameters


def count_elements(optimizer: Any) -> int:
    """Return the number of elements that an optimizer was made for."""
    return sum(map(elements, _parameters(optimizer)))


def _parameters(optimizer: Any) -> Iterable[Any]:
    return (parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"])


def _can_step(optimizer: Any) -> bool:
    """Return whether its class has a `step`; torch wraps the one of each class, also where it is inherited."""
    bases = [base for base in type(optimizer).__mro__ if base.__module__ != "torch.optim.optimizer"]
    steps = [inspect.unwrap(base.__dict__["step"]) for base in bases if "step" in base.__dict__]
    return any(getattr(step, "__module__", "") != "torch.optim.optimizer" for step in steps)
