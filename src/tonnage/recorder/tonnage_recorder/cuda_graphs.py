"""Contents of CUDA graphs: replaying one runs its backward and its optimizers' steps again, past every hook."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

MOST_WARM_UPS = 16
"""Steps on another stream than the default one that are taken for warm-ups of a capture: torch's guide says three,
and eleven with DDP.  A program that trains on such a stream has no capture to wait for."""


class Content:
    """Backward pass and optimizer steps that ran while a graph was captured."""

    def __init__(self) -> None:
        self.backward = False
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()


class Graphs:
    """The graphs that were captured with a backward or a step inside, and the one that is being captured."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, Content] = weakref.WeakKeyDictionary()
        self._now: Content | None = None

    def met_backward(self) -> None:
        """Note that a backward begins: a graph that is being captured holds it."""
        if self._now is not None:
            self._now.backward = True

    def met_step(self, optimizer: Any) -> None:
        """Note that an optimizer made its step: a graph that is being captured holds it."""
        if self._now is not None:
            self._now.optimizers.add(optimizer)

    def hook(self, torch: Any, replays: Callable[[Content], Callable[[], None]]) -> Callable[[], None]:
        """Hook captures and replays; return the function that takes the hooks away.

        `replays` is called before a graph with such a content is replayed, and the function that it returns after it.
        """
        kind = torch.cuda.CUDAGraph
        begin, end, replay = kind.capture_begin, kind.capture_end, kind.replay

        @functools.wraps(begin)
        def begun(graph: Any, *args: Any, **kwargs: Any) -> None:
            self._now = Content()
            begin(graph, *args, **kwargs)

        @functools.wraps(end)
        def ended(graph: Any) -> None:
            content, self._now = self._now, None
            end(graph)
            if content is not None and (content.backward or content.optimizers):
                self._known[graph] = content

        @functools.wraps(replay)
        def replayed(graph: Any) -> None:
            content = self._known.get(graph)
            after = replays(content) if content is not None else _nothing
            replay(graph)
            after()

        kind.capture_begin, kind.capture_end, kind.replay = begun, ended, replayed

        def unhook() -> None:
            kind.capture_begin, kind.capture_end, kind.replay = begin, end, replay

        return unhook


def _nothing() -> None:
    return None
