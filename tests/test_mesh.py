"""Ranks are laid out along the axes of the mesh that a plan asks for."""

import pytest

from tonnage.errors import UsageError
from tonnage.mesh import Mesh, make_mesh
from tonnage.plans import Plan


def test_single_rank() -> None:
    assert make_mesh(Plan(), 1, 1) == Mesh()
    assert Mesh().of_mesh("none") == ("dp_shard",)


def test_mesh_has_the_axis_of_its_sharding_even_with_one_rank() -> None:
    layout = Mesh(pp=2, tp=2)
    assert layout.of_mesh("none") == ("pp", "tp")
    assert layout.of_mesh("zero3") == ("pp", "dp_shard", "tp")
    assert layout.of_mesh("ddp") == ("pp", "dp_replicate", "tp")
    assert Mesh(dp_replicate=2, dp_shard=4).of_mesh("hsdp") == ("dp_replicate", "dp_shard")


@pytest.mark.parametrize(
    ("plan", "ranks", "expected"),
    [
        ({"shard": "zero3"}, 16, Mesh(dp_shard=16)),
        ({"shard": "ddp"}, 16, Mesh(dp_replicate=16)),
        ({}, 16, Mesh(dp_replicate=16)),
        ({"shard": "hsdp"}, 32, Mesh(dp_replicate=4, dp_shard=8)),
        ({"shard": "hsdp", "tp": 2}, 32, Mesh(dp_replicate=4, dp_shard=4, tp=2)),
        ({"shard": "hsdp", "tp": 8}, 32, Mesh(dp_replicate=4, dp_shard=1, tp=8)),
        ({"shard": "zero3", "tp": 8, "pp": 4, "cp": 2}, 1024, Mesh(pp=4, dp_shard=16, cp=2, tp=8)),
        ({"shard": "zero2", "ep": 8}, 16, Mesh(dp_shard=16, ep=8)),
        ({"shard": "zero2", "ep": 8, "cp": 4}, 16, Mesh(dp_shard=4, cp=4, ep=8)),
        ({"shard": "zero1", "ep": 8, "engine": "megatron"}, 16, Mesh(dp_replicate=16, ep=8)),
    ],
)
def test_layouts(plan: dict[str, object], ranks: int, expected: Mesh) -> None:
    layout = make_mesh(Plan(**plan), ranks, 8)  # type: ignore[arg-type]
    assert layout == expected
    assert layout.ranks == ranks


def test_coordinates_count_from_the_innermost_axis() -> None:
    """Rank 45 of 2 x 1 x 4 x 2 x 4: 45 = 1 x 32 + 1 x 8 + 1 x 4 + 1."""
    layout = Mesh(pp=2, dp_shard=4, cp=2, tp=4)
    assert [layout.place(45, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")] == [1, 0, 1, 1, 1]


def test_one_rank_of_each_differing_pipeline_stage() -> None:
    assert Mesh(dp_shard=8, tp=4).different == (0,)
    assert Mesh(pp=2, tp=4).different == (0, 4)
    assert Mesh(pp=8, dp_replicate=2, tp=4).different == (0, 8, 56)


@pytest.mark.parametrize(
    ("plan", "ranks", "per_node", "message"),
    [
        ({"tp": 8, "pp": 4}, 16, 8, "needs a multiple of 32 GPUs, and there are 16"),
        ({"tp": 3}, 6, 8, "possible: 1, 2, 4, 8"),
        ({"tp": 16}, 16, 8, "must divide the 8 GPUs of a machine"),
        ({"shard": "zero3", "ep": 3}, 8, 8, r"ep 3 must divide the 8 ranks .* possible: 1, 2, 4, 8\."),
        ({"ep": 8}, 8, 8, "ep 8 must divide the 1 ranks .* under shard zero3 all data-parallel ranks"),
        ({"ep": 2}, 8, 8, "the 1 ranks"),
        ({"ep": 3, "engine": "megatron"}, 8, 8, r"the 8 data-parallel ranks, .* possible: 1, 2, 4, 8\."),
    ],
)
def test_impossible_layout_says_what_is_possible(
    plan: dict[str, object], ranks: int, per_node: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        make_mesh(Plan(**plan), ranks, per_node)  # type: ignore[arg-type]
