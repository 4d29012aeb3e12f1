"""When a step is complete in a program with several optimizers: once each of them has stepped.

A generator and its critics; an actor, its critics and a temperature.  What they need together (all states, gradients
that one leaves while another works) is there only after all of them have stepped.  One whose turn comes after
thousands of steps, or never, is waited for no more.
"""

import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

PATIENCE = 8
"""How often others step until one is waited for no more; critics step five times for a generator's step (WGAN)."""


class Rounds:
    """Which optimizers there are, and which of them have stepped in this step.

    `trains_here` tells whether a parameter is trained on the device that is watched.
    """

    def __init__(self, trains_here: Callable[[Any], bool]) -> None:
        self._trains_here = trains_here
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._later: weakref.WeakSet[Any] = weakref.WeakSet()
        self._ever: weakref.WeakSet[Any] = weakref.WeakSet()
        self._now: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._turns = 0
        self._given_up: weakref.WeakSet[Any] = weakref.WeakSet()

    def made(self, optimizer: Any) -> None:
        """There is one more optimizer; where others have stepped before it was made, it belongs to the next step.

        One whose class has no step of its own updates weights otherwise (LOMO in backward): nobody waits for it.
        """
        if not _can_step(optimizer):
            return
        (self._later if self._turns else self._known).add(optimizer)

    def first_time(self, optimizer: Any) -> bool:
        """Whether this one has never stepped before."""
        return optimizer not in self._ever

    def without_optimizers(self) -> bool:
        """Whether there is none that could make a step."""
        return not self._known and not self._later

    def stepped(self, optimizer: Any) -> None:
        """One of them has made a step."""
        self._turns += 1
        self._ever.add(optimizer)
        self._now[optimizer] = self._now.get(optimizer, 0) + 1

    def unfinished(self) -> bool:
        """Whether there is one whose turn is still to come in this step."""
        if len(self._now) == len(self._known):
            return False
        late = [each for each in list(self._known) if each not in self._now and each not in self._given_up]
        if late and max(self._now.values(), default=0) >= PATIENCE:
            self._given_up.update(late)
            return False
        return bool(self._with_parameters_of_their_own(late))

    def begin(self) -> None:
        """The next step begins."""
        self._turns = 0
        self._now.clear()
        self._known.update(self._later)
        self._later.clear()

    def never_stepped(self) -> list[int]:
        """Of each optimizer that has parameters of its own and never stepped, how many numbers these have."""
        late = [each for each in [*self._known, *self._later] if each not in self._ever]
        return [sum(p.numel() for p in own) for own in self._with_parameters_of_their_own(late)]

    def _with_parameters_of_their_own(self, late: Iterable[Any]) -> list[list[Any]]:
        """Of each of these the parameters that it alone would train here; one made again over the same has none."""
        found = []
        for optimizer in late:
            others = [each for each in list(self._ever) if each is not optimizer]
            trained = {id(parameter) for other in others for parameter in _parameters(other)}
            own = [p for p in _parameters(optimizer) if id(p) not in trained and self._trains_here(p)]
            if own:
                found.append(own)
        return found


def _parameters(optimizer: Any) -> Iterable[Any]:
    return (parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"])


def _can_step(optimizer: Any) -> bool:
    """Whether its class has a `step`; torch wraps the one of each class, also where it is inherited."""
    bases = [base for base in type(optimizer).__mro__ if base.__module__ != "torch.optim.optimizer"]
    steps = [inspect.unwrap(base.__dict__["step"]) for base in bases if "step" in base.__dict__]
    return any(getattr(step, "__module__", "") != "torch.optim.optimizer" for step in steps)
