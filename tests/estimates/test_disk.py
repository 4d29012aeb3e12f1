"""What is kept on disk is measured, limited and removed."""

import os
from pathlib import Path

import pytest

from tonnage.errors import UnwritableFile
from tonnage.estimates import cache, disk


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two builds of torch, three traces of 100 bytes (a the oldest), and a kernel."""
    monkeypatch.setenv("TONNAGE_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "folder", lambda: tmp_path / "traces")
    for name, size in (
        ("torch-2.13.0-cp311/torch/lib.so", 1000),
        ("torch-2.12.0-cp311/torch/lib.so", 500),
        *((f"traces/{letter}.trace", 100) for letter in "abc"),
        ("compiled/triton/x/kernel.cubin", 30),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
    return tmp_path


def sizes() -> dict[str, tuple[int, int]]:
    return {part.name: (part.entries, part.bytes) for part in disk.list_parts()}


def test_each_part_is_measured(folder: Path):
    assert sizes() == {"torch": (2, 1500), "traces": (3, 300), "compiled": (1, 30)}
    assert [part.limit_bytes for part in disk.list_parts()] == [None, cache.MOST_BYTES, None]


@pytest.mark.parametrize(
    ("names", "freed", "left"),
    [
        (("traces",), 300, ["compiled", "torch-2.12.0-cp311", "torch-2.13.0-cp311"]),
        (("torch",), 1500, ["compiled", "traces"]),
        (("traces", "compiled"), 330, ["torch-2.12.0-cp311", "torch-2.13.0-cp311"]),
        (tuple(disk.PARTS), 1830, []),
    ],
)
def test_parts_are_removed(folder: Path, names: tuple[str, ...], freed: int, left: list[str]):
    assert disk.clear(names) == freed
    assert sorted(path.name for path in folder.iterdir()) == left
    assert disk.clear(names) == 0


def test_a_limit_removes_what_was_not_used_for_longest(folder: Path):
    for age, letter in enumerate("cba"):
        os.utime(folder / "traces" / f"{letter}.trace", (1000 - age, 1000 - age))
    cache.set_limit(200)
    assert sorted(path.name for path in (folder / "traces").iterdir()) == ["b.trace", "c.trace"]
    assert cache.limit_bytes() == 200
    (folder / "limit").write_text("much")
    assert cache.limit_bytes() == cache.MOST_BYTES


def test_an_empty_cache_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TONNAGE_CACHE", str(tmp_path / "none"))
    monkeypatch.setattr(cache, "folder", lambda: tmp_path / "none" / "traces")
    assert sizes() == dict.fromkeys(disk.PARTS, (0, 0))
    assert disk.clear(tuple(disk.PARTS)) == 0
    cache.set_limit(10)
    assert cache.limit_bytes() == 10


def test_a_cache_that_cannot_be_made_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TONNAGE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UnwritableFile, match="cannot be made"):
        cache.set_limit(10)
