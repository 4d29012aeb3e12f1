"""Makes the modules beside this file (such as `estimates`) importable from every test; no Trace comes from before."""

from collections.abc import Iterator

import pytest

from tonnage import shelf


@pytest.fixture(scope="session", autouse=True)
def _own_shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What this process estimates is run, not remembered from an earlier session."""
    folder = tmp_path_factory.mktemp("shelf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shelf, "folder", lambda: folder)
        yield
