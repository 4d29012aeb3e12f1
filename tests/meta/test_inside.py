"""Memory inside products and attention, against sizes from ghosts of several versions of torch."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tonnage.catalog.devices import find_device
from tonnage.meta import splits
from tonnage.meta.workspaces import Workspaces

aten = torch.ops.aten
A100 = find_device("a100-80gb")
SMALL, LARGE, LT = 8_519_680, 33_554_432, 1_048_576


class Held:
    """Records the sizes that would be held."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.sizes: list[int] = []

    def hold(self, size_bytes: int) -> None:
        self.sizes.append(size_bytes)


@pytest.mark.parametrize(
    ("version", "capability", "held", "passing"),
    [
        ("2.8.0", (7, 5), [SMALL], [0, LT, LT]),
        ("2.9.1", (7, 5), [SMALL, LT], [0, 0, 0]),
        ("2.11.0", (9, 0), [LARGE, LT], [0, 0, 0]),
        ("2.11.0", (10, 0), [SMALL, LT], [0, 0, 0]),
        ("2.12.0", (10, 0), [LARGE], [0, 0, 0]),
        ("2.13.0+cpu", (7, 5), [SMALL], [0, 0, 0]),
        ("2.15.0", (9, 0), [], [LARGE, LT, LT]),
    ],
)
def test_workspaces_by_version(
    version: str, capability: tuple[int, int], held: list[int], passing: list[int]
) -> None:
    """A product without a bias, then two with one."""
    matrix, bias = torch.empty(64, 64), torch.empty(64)
    workspaces, recorder = Workspaces(capability, version), Held()
    calls: list[tuple[Any, Any]] = [(aten.mm.default, (matrix, matrix))]
    calls += [(aten.addmm.default, (bias, matrix, matrix))] * 2
    taken = [workspaces.take(recorder, op, args, {}) for op, args in calls]  # type: ignore[arg-type]
    assert [sum(sizes) for sizes in taken] == passing
    assert recorder.sizes == held


def test_a_bias_for_one_column_is_no_work_for_lt() -> None:
    workspaces = Workspaces((8, 0), "2.8.0")
    args = torch.empty(1), torch.empty(4, 64), torch.empty(64, 1)
    assert workspaces.take(Held(), aten.addmm.default, args, {}) == ()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "version", "sizes"),
    [
        ((1, 1, 1000, 96), "2.13.0", (32_000, 3_072_000)),
        ((1, 8, 512, 32), "2.13.0", (32_768, 1_048_576)),
        ((1, 1, 128, 160), "2.13.0", (1024, 196_608)),
        ((1, 1, 128, 160), "2.10.0", (1024, 163_840)),
        ((2, 16, 8192, 128), "2.13.0", ()),
    ],
)
def test_keys_are_divided_where_heads_are_few(shape: tuple[int, ...], version: str, sizes: tuple[int, ...]) -> None:
    query = SimpleNamespace(shape=shape, device=torch.device("cuda"))
    assert splits.forward((query, query, query), {}, A100, version) == sizes
    assert splits.forward((query, query, query, 0.1), {}, A100, version) == ()
