"""Progress on standard error: a status line on a terminal, otherwise plain lines when a command takes long."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from tonnage.printable import filtered, make_printable, unfiltered

_PATIENCE_SECONDS: Final = 2.0


@contextmanager
def progress(*, moving: bool = True) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows its text as the current state; the display ends with the block.

    `moving` must be False where other programs write to standard error too and would break the status line.
    """
    if moving and sys.stderr.isatty():
        from rich.console import Console
        from rich.text import Text

        with Console(file=unfiltered(sys.stderr)).status("starting") as status, filtered():
            yield lambda text: status.update(Text(make_printable(text)))
    else:
        lines = _Lines()
        timer = threading.Timer(_PATIENCE_SECONDS, lines.begin)
        timer.daemon = True
        timer.start()
        try:
            yield lines.show
        finally:
            timer.cancel()


class _Lines:
    """Plain lines for logs: none for a command that ends within two seconds, then each new message once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_begun = False
        self._latest: str | None = None

    def begin(self) -> None:
        with self._lock:
            self._has_begun = True
            if self._latest is not None:
                print(self._latest, file=sys.stderr, flush=True)

    def show(self, text: str) -> None:
        with self._lock:
            if self._has_begun and text != self._latest:
                print(text, file=sys.stderr, flush=True)
            self._latest = text
