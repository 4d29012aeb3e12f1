"""The collector is off for as long as that was wanted, and no longer."""

import gc
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tonnage.trace.gc_paused import uncollected


@pytest.fixture(params=[True, False])
def enabled(request: pytest.FixtureRequest) -> Iterator[bool]:
    was = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if was else gc.disable)()


def test_the_collector_is_left_as_it_was(enabled: bool) -> None:
    with suppress(ValueError), uncollected():
        assert not gc.isenabled()
        raise ValueError("also where something fails")
    assert gc.isenabled() == enabled
