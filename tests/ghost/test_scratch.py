"""Folders that go with whoever made them, at the latest when another one is made."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tonnage.ghost.scratch import LOCK, scratch

if sys.platform != "linux":
    pytest.skip("only where ghosts run", allow_module_level=True)

MADE = """
import pathlib, subprocess, sys, time
from tonnage.ghost.scratch import scratch
with scratch("made-", pathlib.Path(sys.argv[1])) as folder:
    (folder / "large").write_text("bytes")
    if sys.argv[2] == "with a child":
        subprocess.Popen([sys.executable, "-c", "print(1, flush=True); input()", str(folder)], stdin=sys.stdin)
    else:
        print(1, flush=True)
    time.sleep(600)
"""


def killed(place: Path, how: str = "alone") -> "subprocess.Popen[str]":
    """A process that was killed while it had a folder in `place`."""
    process = subprocess.Popen(
        [sys.executable, "-c", MADE, str(place), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    process.kill()
    process.wait()
    process.stdout.close()
    return process


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def test_it_is_gone_afterwards(tmp_path: Path) -> None:
    with scratch("made-", tmp_path) as folder:
        assert folder.parent == tmp_path
        assert names(folder) == [LOCK]
    assert names(tmp_path) == []


def test_what_a_killed_process_left_is_removed_and_what_others_have_is_not(tmp_path: Path) -> None:
    (tmp_path / "made-by-hand").mkdir()
    killed(tmp_path).stdin.close()  # type: ignore[union-attr]
    (left,) = set(names(tmp_path)) - {"made-by-hand"}
    with scratch("other-", tmp_path) as another:
        assert left in names(tmp_path), "of another kind"
        with scratch("made-", tmp_path) as first, scratch("made-", tmp_path) as second:
            assert names(tmp_path) == sorted(["made-by-hand", another.name, first.name, second.name])


def test_what_a_living_process_was_told_of_stays(tmp_path: Path) -> None:
    process = killed(tmp_path, "with a child")
    (left,) = names(tmp_path)
    with scratch("made-", tmp_path):
        assert left in names(tmp_path)
    assert process.stdin is not None
    process.stdin.close()  # which its child waits for
    while str(tmp_path / left).encode() in _command_lines():
        pass
    with scratch("made-", tmp_path):
        assert left not in names(tmp_path)


def _command_lines() -> bytes:
    found = b""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += path.read_bytes()
        except OSError:
            continue
    return found


def test_a_link_to_a_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / LOCK).touch()
    os.symlink(tmp_path / "kept", tmp_path / "made-link")
    with scratch("made-", tmp_path):
        pass
    assert names(tmp_path) == ["kept", "made-link"]
    assert names(tmp_path / "kept") == [LOCK]
