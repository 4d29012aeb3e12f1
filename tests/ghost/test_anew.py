"""When a process may do another job."""

import sys
from typing import Any

import pytest

from tonnage.ghost.process import INSIDE

sys.path.append(str(INSIDE))
from tonnage_inside import anew, decided


class Native:
    """A ghost of which these functions were asked that it does not have."""

    def __init__(self, calls: dict[str, int], workspaces: dict[str, int]) -> None:
        self.unknown_calls = lambda: calls
        self.unknown_workspaces = lambda: workspaces


@pytest.mark.parametrize(
    ("native", "took", "possible"),
    [
        (Native({}, {}), [], True),
        (Native({"libcusolver.so.12:cusolverDnCreate": 1}, {}), [], False),
        (Native({}, {"modelled:cudnnBackend execution plan": 2}), [], False),
        (Native({}, {}), ["aten.embedding"], False),
    ],
    ids=["nothing is kept", "calls", "workspaces", "blocks"],
)
def test_what_torch_keeps_would_not_be_asked_for_again(
    native: Any, took: list[str], possible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decided, "_took", took)
    assert anew.is_possible(native) is possible
