"""Files that are whole or not there, whoever else writes beside."""

import os
import stat
import threading
from pathlib import Path

import pytest

from tonnage.errors import UnwritableFile, UsageError
from tonnage.files import check_free, check_places, replacing, write_text


def test_nothing_is_left_of_what_failed(tmp_path: Path) -> None:
    place = tmp_path / "plan.toml"
    place.write_text("old")

    def fails() -> None:
        with replacing(place) as file:
            file.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert [path.name for path in tmp_path.iterdir()] == ["plan.toml"]
    assert place.read_text() == "old"


def test_two_who_write_the_same_file_each_write_it_whole(tmp_path: Path) -> None:
    place, both = tmp_path / "trace", threading.Barrier(2)

    def written(text: str) -> None:
        with replacing(place) as file:
            file.write(text[:100].encode())
            both.wait()
            file.write(text[100:].encode())

    threads = [threading.Thread(target=written, args=(letter * 100_000,)) for letter in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert place.read_text() in ("a" * 100_000, "b" * 100_000)
    assert len(list(tmp_path.iterdir())) == 1


def test_what_a_killed_process_has_left_is_in_nobodys_way(tmp_path: Path) -> None:
    for number in (os.getpid(), 1):
        (tmp_path / f".page.html.{number}.part").touch()
    write_text(tmp_path / "page.html", "whole")
    assert (tmp_path / "page.html").read_text() == "whole"


def test_who_may_read_a_file_stays_as_it_was(tmp_path: Path) -> None:
    place, other = tmp_path / "mine", tmp_path / "new"
    place.touch(mode=0o600)
    for path in (place, other):
        write_text(path, "text")
    (tmp_path / "as usual").touch()
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (place, other, tmp_path / "as usual")]
    assert modes[0] == 0o600
    assert modes[1] == modes[2]


def test_a_long_name_is_no_hindrance(tmp_path: Path) -> None:
    write_text(tmp_path / ("n" * 255), "text")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["text"]


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UnwritableFile, match="nothing was changed"):
        write_text(tmp_path / "no" / "file", "text")


def test_two_answers_are_not_put_into_one_file(tmp_path: Path) -> None:
    check_places(tmp_path / "a", None, tmp_path / "b", None)
    with pytest.raises(UsageError, match=r"Two answers are to go into .*/a; name another file for one of them"):
        check_places(tmp_path / "a", tmp_path / "sub" / ".." / "a")
    check_places(Path("/dev/null"), Path("/dev/null"))


def test_a_file_in_the_way_is_replaced_only_where_it_is_said(tmp_path: Path) -> None:
    place = tmp_path / "train.py"
    check_free(None, place, force=False)
    place.touch()
    with pytest.raises(UsageError, match=r"train\.py exists; name another file, or add --force"):
        check_free(None, place, force=False)
    check_free(place, force=True)
    check_free(Path("/dev/null"), force=False)
