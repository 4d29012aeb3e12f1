"""Values that print as their report.

A value does not know its views: `tonnage.api` sets them, so that `print(estimate)` is the page of the command line
and a notebook shows the web page's content.  `repr` is one line.
"""

from collections.abc import Callable
from typing import Any, ClassVar


class Viewed:
    """Base class of values with a report as text and as HTML."""

    terminal_view: ClassVar[Callable[[Any], str] | None] = None
    """Renders a value as the page of a terminal, without colours; None: not set, and `str` is `repr`."""
    notebook_view: ClassVar[Callable[[Any], str] | None] = None
    """Renders a value as HTML for notebooks; None: not set, and notebooks show `repr`."""

    def summary(self) -> str:
        """Return the answer in one line, for `repr`."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.summary()}>"

    def __str__(self) -> str:
        view = type(self).terminal_view
        return repr(self) if view is None else view(self)

    def _repr_html_(self) -> str | None:
        view = type(self).notebook_view
        return None if view is None else view(self)
