"""Requests for memory that could not be served, and whether the program went on after the last one."""

import traceback
from typing import Any

from .marks import Marks
from .networks import Networks
from .outcome import frames


class Shortage:
    """The failed requests of one process."""

    def __init__(self, marks: Marks, networks: Networks) -> None:
        self.ooms: list[dict[str, Any]] = []
        """Step, phase and module of each failed request, and its size."""
        self.marks: list[int] = []
        """Number of the current mark at each failed request."""
        self.is_overcome = True
        """True if the program has done something since memory last ran out.

        It has if a step was made, or a backward pass, or, in a program that makes none, a forward pass.
        """
        self._marks, self._networks = marks, networks
        self._stack: list[str] = []

    def add(self, device: int, requested: int, total: int, free: int) -> None:
        """Note a request that could not be served; the arguments are those of torch's observer of such events."""
        self.marks.append(self._marks.latest())
        self.ooms.append({**self._marks.describe_latest(), "requested_bytes": requested})
        self._networks.find_whole()
        self._stack = frames(traceback.extract_stack())
        self.is_overcome = False

    def outcome(self) -> dict[str, Any]:
        """Return the outcome of a program that ends by itself and has done nothing since memory ran out, else {}."""
        if self.is_overcome:
            return {}
        requested = self.ooms[-1]["requested_bytes"] / 2**20
        message = f"CUDA out of memory. Tried to allocate {requested:.2f} MiB."
        return {"kind": "oom", "message": message, "caught": True, "stack": self._stack, **self.ooms[-1]}
