"""Meshes of jobs that are over, beside those of the next."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tonnage.ghost.process import INSIDE

sys.path.append(str(INSIDE))
from tonnage_inside import meshes


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(DeviceMesh, "__init__", DeviceMesh.__init__)
    monkeypatch.setattr(meshes, "_made", [])
    monkeypatch.setattr(meshes, "_over", {})
    meshes._listen(device_mesh)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def job(*sizes: int) -> DeviceMesh:
    """What a job makes; the job before is over."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    return init_device_mesh("cpu", sizes, mesh_dim_names=("data", "tensor"))


def groups(mesh: DeviceMesh) -> list[Any]:
    return [mesh.get_group(name) for name in mesh.mesh_dim_names or ()]


@pytest.mark.usefixtures("listening")
def test_an_old_mesh_has_the_groups_of_the_new_one() -> None:
    old = job(4, 2)
    part, before = old["tensor"], groups(old)
    meshes.end()
    new = job(4, 2)
    assert groups(old) == groups(new) != before
    assert part == new["tensor"]
    assert part.get_group() is new.get_group("tensor")
    assert old["data"].get_group() is new.get_group("data")


@pytest.mark.usefixtures("listening")
def test_until_then_it_has_none() -> None:
    old = job(4, 2)
    part = old["tensor"]
    meshes.end()
    assert len({old, part}) == 2
    new = job(2, 4)
    assert groups(new)
    for mesh in (old, part):
        with pytest.raises((RuntimeError, AttributeError)):
            mesh.get_group(0)


@pytest.mark.usefixtures("listening")
def test_several_jobs_later_all_are_the_newest() -> None:
    kept = []
    for _ in range(3):
        kept.append(job(4, 2))
        meshes.end()
    other = job(2, 4)
    meshes.end()
    newest = job(4, 2)
    assert all(groups(mesh) == groups(newest) for mesh in kept)
    with pytest.raises((RuntimeError, AttributeError)):
        other.get_group(0)


@pytest.mark.usefixtures("listening")
def test_those_that_nobody_keeps_are_forgotten() -> None:
    for _ in range(3):
        job(4, 2)
        meshes.end()
    alive = [mesh for mesh in (reference() for reference in meshes._made) if mesh is not None]
    assert len(alive) <= 2
