"""The cyclic collector is disabled inside the block and restored after it."""

import gc
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tonnage.trace.gc_paused import gc_paused


@pytest.fixture(params=[True, False])
def enabled(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_collector_is_restored_after_an_error(enabled: bool) -> None:
    with suppress(ValueError), gc_paused():
        assert not gc.isenabled()
        raise ValueError("an error inside the block")
    assert gc.isenabled() == enabled
