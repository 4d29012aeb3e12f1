"""What is happening right now, on standard error: a moving line on a terminal, else a line when it takes long."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_PATIENCE_SECONDS: Final = 2.0


@contextmanager
def progress(*, moving: bool = True) -> Iterator[Callable[[str], None]]:
    """A function to be called with what comes next; the display ends with the block.

    Not `moving` where others write to standard error too, and would tear the line apart.
    """
    if moving and sys.stderr.isatty():
        from rich.console import Console
        from rich.text import Text

        with Console(stderr=True).status("starting") as status:
            yield lambda text: status.update(Text(text))
    else:
        lines = _Lines()
        timer = threading.Timer(_PATIENCE_SECONDS, lines.begin)
        timer.daemon = True
        timer.start()
        try:
            yield lines.say
        finally:
            timer.cancel()


class _Lines:
    """Plain lines for logs: nothing for what is over in two seconds, then each new message once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = False
        self._latest: str | None = None

    def begin(self) -> None:
        with self._lock:
            self._begun = True
            if self._latest is not None:
                print(self._latest, file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        with self._lock:
            if self._begun and text != self._latest:
                print(text, file=sys.stderr, flush=True)
            self._latest = text
