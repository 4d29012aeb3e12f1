"""benchmarks/oracle: what counts as another value, and what as other words."""

import json
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
from benchmarks.oracle.comparing import (
    compare,
    differences,
    documents,
    normalised,
    parsed,
    stable,
    stable_log,
    stable_words,
    without_progress,
)
from benchmarks.oracle.questions import INPUTS, questions
from benchmarks.oracle.recording import check


def kinds(old: Any, new: Any) -> list[str]:
    return [one.kind for one in differences(old, new, "")]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"peak": 5}, {"peak": 5}, []),
        ({"peak": 5}, {"peak": 6}, ["VALUES"]),
        ({"peak": 5}, {"peak": 5.0}, ["VALUES"]),
        ({"fits": True}, {"fits": 1}, ["VALUES"]),
        ({"peak": 5}, {}, ["VALUES"]),
        ({}, {"peak": None}, ["VALUES"]),
        ([1, 2], [1], ["VALUES"]),
        ([1, 2], [2, 1], ["VALUES", "VALUES"]),
        (b"\x01", b"\x02", ["VALUES"]),
        ({"technique": "zero"}, {"technique": "hsdp"}, ["VALUES"]),
        ({"why": "needs 3 GPUs"}, {"why": "3 GPUs are needed"}, ["WORDING"]),
        ({"why": "needs 3 GPUs"}, {"why": "needs 4 GPUs"}, ["VALUES"]),
        ({"why": "from 3 to 4"}, {"why": "from 4 to 3"}, ["VALUES"]),
        ({"why": "from 3 to 4"}, {"why": "4, and 3 before"}, ["WORDING"]),
        ({"why": "8.0 is needed by bf16"}, {"why": "bf16 is 8.0: bf16"}, ["WORDING"]),
        ("peak 1,024\nfits\nsame", "peak 1,025\nit fits\nsame", ["VALUES"]),
        ("peak 1,024\nsame\nfits now", "peak 1,024\nsame\nit fits", ["WORDING"]),
        ("a  1.5 GiB", "a 1.5 GiB", ["WORDING"]),
    ],
)
def test_numbers_and_identifiers_are_values_and_the_rest_is_wording(old: Any, new: Any, expected: list[str]) -> None:
    assert kinds(old, new) == expected


def test_a_difference_says_where_it_is() -> None:
    (found,) = differences({"stdout 0": {"ranks": [{"peak": 1}]}}, {"stdout 0": {"ranks": [{"peak": 2}]}}, "")
    assert str(found) == "stdout 0.ranks[0].peak: 1 -> 2"


def test_progress_is_left_out_and_errors_and_tracebacks_are_not() -> None:
    traceback = 'Traceback (most recent call last):\n  File "x.py", line 3\nValueError: damaged'
    logged = "[rank1]:[W1128 22:45:57.149870976 reducer.cpp:1529] Warning: it is slow."
    text = f"starting the ghost\n{logged}\n{traceback}\nrunning 3 steps\nerror: exit code 1"
    assert without_progress(text) == f"{traceback}\nerror: exit code 1"
    ours = '  File "SOURCE/tonnage/watch.py", line 7, in step\n    return step()'
    with_ours = text.replace("\nValueError", f"\n{ours}\nValueError")
    assert ours in with_ours
    assert without_progress(with_ours) == without_progress(text)


def test_addresses_count_from_the_lowest_and_resident_bytes_are_left_out() -> None:
    told = {"blocks": [{"address": 2**46 + 512, "size": 2**40}, {"address": 2**46}], "host": {"peak_bytes": 7}}
    assert stable(told) == {
        "blocks": [{"address": 512, "size": 2**40}, {"address": 0}],
        "host": {"peak_bytes": "SOME"},
    }
    assert stable_words(struct.pack("<3Q", 2**46 + 512, 9, 2**46)) == struct.pack("<3Q", 512, 9, 0)
    assert stable({"processes": [{"process": 22121, "rank": 0}]}) == {"processes": [{"process": "SOME", "rank": 0}]}
    stack = normalised('{"stack": ["mine.py:3", "/src/tonnage/step.py:7 make"]}', {"/src": "SOURCE"})
    assert parsed(stack) == {"stack": ["mine.py:3"]}
    line = "host     358.4 MiB resident at most"
    assert normalised(f"process 358.4 MiB\n{line}", {}) == "process 358.4 MiB\nhost     SOME GiB resident at most"


def test_frames_of_our_own_code_are_left_out_of_reports() -> None:
    stack = "    ... 6 frames left out\n    tonnage/step/step.py:61 build\n    mine.py:3 main\ntonnage/a.py:7 b</pre>"
    assert normalised(stack, {}) == "    ... SOME frames left out\n    mine.py:3 main\n</pre>"


def test_long_values_are_shown_where_they_part() -> None:
    (found,) = differences("a " * 500 + "3", "a " * 500 + "4", "")
    assert found.new.startswith("...a a")
    assert found.new.endswith("a 4")


def test_records_of_a_log_are_told_by_what_they_do_in_which_stream() -> None:
    def log(stream: int, address: int, size: int) -> bytes:
        return b"".join(struct.pack("<32s4Q", b"kernel", one, size, address, 0) for one in (0, stream))

    assert stable_log(log(2**20, 2**46, 5)) == stable_log(log(2**21, 2**45, 5))
    assert stable_log(log(2**20, 2**46, 5)) != stable_log(log(2**20, 2**46, 6))
    assert stable_log(log(2**20, 2**46, 5)) != stable_log(log(0, 2**46, 5))


def test_a_page_is_its_elements_and_the_documents_in_it() -> None:
    page = '<!DOCTYPE html><p>a</p><script type="application/json" class="x">{"fits": true}</script></html>'
    assert parsed(page) == {"data": [{"fits": True}], "page": "<!DOCTYPE html>\n<p>a</p>\n</html>"}
    assert parsed('{"fits": true}') == {"fits": True}
    assert parsed("{fits") == "{fits"


def written(folder: Path, name: str, out: str, code: int = 0, home: str = "/tmp/oracle-a") -> Path:
    """A record with one question."""
    place = folder / name
    (place / "files").mkdir(parents=True)
    (folder / "record.json").write_text(json.dumps({"source": "src"}))
    answer = {"commands": [{"command": "tonnage x", "code": code, "seconds": 1.0}], "home": home, "source": "/src"}
    (place / "answer.json").write_text(json.dumps(answer))
    (place / "0.out").write_text(out)
    (place / "0.err").write_text("")
    return place


def test_folders_seconds_and_containers_of_files_are_no_difference(tmp_path: Path) -> None:
    for number, record in enumerate(("old", "new")):
        home = f"/tmp/oracle-{number}"
        files = written(tmp_path / record, "one", f"written to {home}/work/x", home=home) / "files"
        with zipfile.ZipFile(files / "run.tonnage", "w") as archive:
            archive.writestr("rank0/trace.json", json.dumps({"seconds": number, "rank": 0}))
            archive.writestr("rank0/events.action", b"\x00\x01")
        (files / "z.pickle").write_bytes(pickle.dumps({"segments": [1]}, protocol=4 + number % 2))
    old, new = (documents(tmp_path / record / "one") for record in ("old", "new"))
    assert old == new
    assert old["stdout 0"] == "written to HOME/work/x"
    assert old["file run.tonnage"] == {"rank0/events.action": b"\x00\x01", "rank0/trace.json": {"rank": 0}}


@pytest.mark.parametrize(
    ("out", "code", "ends", "said"),
    [
        ("needs 3 GPUs", 0, 0, "1 answered alike"),
        ("3 GPUs are needed", 0, 0, "1 with other words alone"),
        ("needs 4 GPUs", 0, 1, "1 with other values"),
        ("needs 3 GPUs", 2, 1, "exit code 0: 0 -> 2"),
    ],
)
def test_another_value_ends_with_1(
    out: str, code: int, ends: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "old", "one", "needs 3 GPUs")
    written(tmp_path / "old", "two", "")
    written(tmp_path / "new", "one", out, code)
    assert compare(tmp_path / "old", tmp_path / "new") == ends
    printed = capsys.readouterr().out
    assert said in printed
    assert f"1 only in {tmp_path / 'old'}: two" in printed


def test_a_record_is_never_made_inside_a_tree(tmp_path: Path) -> None:
    tree = Path(__file__).parents[1]
    with pytest.raises(ValueError, match="inside the tree"):
        check(tree / "record", tree / "src")
    with pytest.raises(ValueError, match="holds no package tonnage"):
        check(tmp_path / "record", tmp_path / "other" / "src")
    (tmp_path / "mine").write_text("")
    with pytest.raises(ValueError, match="something other than a record"):
        check(tmp_path, tree / "src")


def test_questions_have_names_of_their_own_and_inputs_that_are_there() -> None:
    every = questions()
    assert len({one.name for one in every}) == len(every)
    assert all((INPUTS / name).is_file() for one in every for name in one.inputs)
