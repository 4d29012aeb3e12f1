"""The cache folder: where it is, for whom it is made, and when nothing in it is executed."""

import os
import sys
from pathlib import Path

import pytest

from tonnage.errors import GhostUnavailable, UsageError
from tonnage.estimates import cache, history
from tonnage.ghost import environment as ghost_environment
from tonnage.ghost import wheel
from tonnage.ghost.cache_folder import cache_folder, check_executed, check_private, make_private
from tonnage.ghost.wheel import Torch

STRANGER = 65534

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with an unpacked torch that every user may read, and that only this one may write."""
    place = tmp_path / "home" / "cache"
    monkeypatch.setenv("TONNAGE_CACHE", str(place))
    package = place / f"torch-2.13.0-cp{sys.version_info[0]}{sys.version_info[1]}" / "torch"
    (package / "lib").mkdir(parents=True)
    (package / "lib" / "libtorch_cuda.so").touch()
    (package / "version.py").write_text("cuda: Optional[str] = '13.0'\n")
    (package / "__init__.py").touch()
    (package / "link.py").symlink_to("__init__.py")
    for path in (tmp_path / "home", *(tmp_path / "home").rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)
    return package.parent


def test_only_absolute_paths_name_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TONNAGE_CACHE", raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    for relative in (".cache", "./.cache", "cache/of/repository", "", "~/.cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert cache_folder() == Path("/home/me/.cache/tonnage")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "tonnage"
    monkeypatch.setenv("TONNAGE_CACHE", "/elsewhere")
    assert cache_folder() == Path("/elsewhere")
    monkeypatch.setenv("TONNAGE_CACHE", "cache")
    with pytest.raises(UsageError, match="TONNAGE_CACHE is 'cache', which is relative"):
        cache_folder()


@pytest.mark.parametrize("home", [".", "work", "~"])
def test_a_relative_home_is_no_place_for_a_cache(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TONNAGE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", home)
    with pytest.raises(UsageError, match="set TONNAGE_CACHE"):
        cache_folder()


def test_folders_are_made_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TONNAGE_CACHE", str(tmp_path / "deep" / "cache"))
    old = os.umask(0o002)
    try:
        make_private(cache_folder() / "traces")
    finally:
        os.umask(old)
    made = [tmp_path / "deep", tmp_path / "deep" / "cache", tmp_path / "deep" / "cache" / "traces"]
    assert [path.stat().st_mode & 0o777 for path in made] == [0o700] * 3


def test_a_folder_that_others_may_read_is_used(folder: Path) -> None:
    check_executed(folder)
    check_executed(folder.with_name("torch-of-tomorrow"))


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o1777])
@pytest.mark.parametrize(
    "place", [".", "torch", "torch/lib", "torch/__init__.py", "torch/lib/libtorch_cuda.so", "..", "../.."]
)
def test_what_others_can_write_is_not_executed(folder: Path, place: str, mode: int) -> None:
    path = (folder / place).resolve()
    path.chmod(mode)
    if mode & 0o1000 and place == "../..":
        check_executed(folder)  # nobody else can rename what is in a sticky folder
        return
    with pytest.raises(GhostUnavailable, match=rf"^Others can write in {path} .*set TONNAGE_CACHE.*chmod -R go-w"):
        check_executed(folder)


def test_what_others_cannot_enter_they_cannot_write(folder: Path) -> None:
    (folder / "torch" / "__init__.py").chmod(0o666)
    folder.chmod(0o700)
    check_executed(folder)


@as_root
@pytest.mark.parametrize("place", [".", "torch", "torch/__init__.py", "torch/link.py", "..", "../.."])
def test_what_belongs_to_another_user_is_not_executed(folder: Path, place: str) -> None:
    path = folder / place if place == "torch/link.py" else (folder / place).resolve()
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
    if place == "torch/link.py":
        check_executed(folder)  # it still leads into the folder
        return
    with pytest.raises(GhostUnavailable, match=rf"^{path} belongs to the user {STRANGER}.*set TONNAGE_CACHE"):
        check_executed(folder)


def test_a_link_leads_to_a_folder_that_is_checked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TONNAGE_CACHE", str(tmp_path / "linked"))
    (tmp_path / "linked").symlink_to(folder.parent)
    check_executed(tmp_path / "linked" / folder.name)
    folder.parent.chmod(0o777)
    with pytest.raises(GhostUnavailable, match="Others can write"):
        check_private(tmp_path / "linked" / "traces")


def test_a_link_out_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "torch" / "cuda").symlink_to(tmp_path)
    with pytest.raises(GhostUnavailable, match=r"torch/cuda leads out of the cache"):
        check_executed(folder)


def test_every_way_into_the_cache_is_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch that is imported, the kernels that are unpickled, the traces and measurements that are believed."""
    monkeypatch.setattr(cache, "folder", lambda: cache_folder() / "traces")
    monkeypatch.setattr(history, "file", lambda: cache_folder() / "history.sqlite")
    monkeypatch.setattr(wheel, "_inspect", lambda python: {"version": "2.13.0", "folder": None, "python": [3, 11]})
    monkeypatch.setattr(ghost_environment, "libraries", lambda cuda_major: folder)
    torch = Torch(version="2.13.0", cuda_major=13, path=None, python=sys.executable)
    place = wheel.place("2.13.0", [3, 11])
    if not place.exists():
        folder.rename(place)
        monkeypatch.setattr(ghost_environment, "libraries", lambda cuda_major: place)
    assert wheel.find(sys.executable).path == place
    ghost_environment.environment(torch=torch, inherit={})
    compiled = cache_folder() / "compiled"
    assert compiled.stat().st_mode & 0o777 == 0o700
    assert cache.find("key") is None
    cache_folder().chmod(0o775)
    for way in (
        lambda: wheel.find(sys.executable),
        lambda: ghost_environment.environment(torch=torch, inherit={}),
        lambda: cache.find("key"),
        lambda: cache.set_limit(5),
        lambda: history._connection().__enter__(),
    ):
        with pytest.raises(GhostUnavailable, match="Others can write"):
            way()


def test_kernels_in_a_folder_that_others_can_write_are_not_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ghost_environment, "libraries", lambda cuda_major: folder)
    torch = Torch(version="2.13.0", cuda_major=13, path=None, python=sys.executable)
    pickles = cache_folder() / "compiled" / "inductor" / "fxgraph"
    pickles.mkdir(parents=True)
    for path in (pickles, pickles.parent, pickles.parent.parent):
        path.chmod(0o755)
    pickles.chmod(0o777)
    with pytest.raises(GhostUnavailable, match="fxgraph"):
        ghost_environment.environment(torch=torch, inherit={})
    pickles.chmod(0o755)
    ghost_environment.environment(torch=torch, inherit={})
    assert (cache_folder() / "compiled").stat().st_mode & 0o777 == 0o700


def test_a_worker_has_no_relative_folder_for_extensions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ghost_environment, "libraries", lambda cuda_major: folder)
    monkeypatch.setenv("XDG_CACHE_HOME", ".cache")
    monkeypatch.setenv("XDG_DATA_HOME", "/home/me/data")
    torch = Torch(version="2.13.0", cuda_major=13, path=None, python=sys.executable)
    variables = ghost_environment.forking(torch)
    assert "XDG_CACHE_HOME" not in variables
    assert variables["XDG_DATA_HOME"] == "/home/me/data"
