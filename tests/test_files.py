"""Files are written whole or not at all, also while another process writes the same one."""

import os
import stat
import threading
from pathlib import Path

import pytest

from tonnage.errors import UnwritableFile, UsageError
from tonnage.files import check_outputs, check_replaceable, open_replacing, write_text


def test_failed_write_leaves_the_old_file_and_no_draft(tmp_path: Path) -> None:
    target = tmp_path / "plan.toml"
    target.write_text("old")

    def fails() -> None:
        with open_replacing(target) as file:
            file.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert [path.name for path in tmp_path.iterdir()] == ["plan.toml"]
    assert target.read_text() == "old"


def test_concurrent_writers_each_write_the_whole_file(tmp_path: Path) -> None:
    target, both = tmp_path / "trace", threading.Barrier(2)

    def write(text: str) -> None:
        with open_replacing(target) as file:
            file.write(text[:100].encode())
            both.wait()
            file.write(text[100:].encode())

    threads = [threading.Thread(target=write, args=(letter * 100_000,)) for letter in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert target.read_text() in ("a" * 100_000, "b" * 100_000)
    assert len(list(tmp_path.iterdir())) == 1


def test_draft_of_a_killed_process_does_not_block_a_write(tmp_path: Path) -> None:
    for number in (os.getpid(), 1):
        (tmp_path / f".page.html.{number}.part").touch()
    write_text(tmp_path / "page.html", "whole")
    assert (tmp_path / "page.html").read_text() == "whole"


def test_replaced_file_keeps_its_permissions(tmp_path: Path) -> None:
    target, other = tmp_path / "mine", tmp_path / "new"
    target.touch(mode=0o600)
    for path in (target, other):
        write_text(path, "text")
    (tmp_path / "as usual").touch()
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (target, other, tmp_path / "as usual")]
    assert modes[0] == 0o600
    assert modes[1] == modes[2]


def test_name_of_255_bytes_can_be_written(tmp_path: Path) -> None:
    write_text(tmp_path / ("n" * 255), "text")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["text"]


def test_missing_folder_is_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(UnwritableFile, match="nothing was changed"):
        write_text(tmp_path / "no" / "file", "text")


def test_two_answers_cannot_share_a_file(tmp_path: Path) -> None:
    check_outputs(tmp_path / "a", None, tmp_path / "b", None)
    with pytest.raises(UsageError, match=r"Two answers would be written to .*/a; name another file for one of them"):
        check_outputs(tmp_path / "a", tmp_path / "sub" / ".." / "a")
    check_outputs(Path("/dev/null"), Path("/dev/null"))


def test_existing_file_is_replaced_only_with_force(tmp_path: Path) -> None:
    target = tmp_path / "train.py"
    check_replaceable(None, target, force=False)
    target.touch()
    with pytest.raises(UsageError, match=r"train\.py exists; name another file, or add --force"):
        check_replaceable(None, target, force=False)
    check_replaceable(target, force=True)
    check_replaceable(Path("/dev/null"), force=False)
