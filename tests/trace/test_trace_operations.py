"""A file of a step's operations is read whole, or refused in one line."""

import io
import struct
import zipfile
from array import array
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.errors import UnreadableFile
from tonnage.trace import operations
from tonnage.trace.operations import Operation, StepOperations

STEP = StepOperations(
    operations=(
        Operation("forward", "mm", "product", "bfloat16", 2 * 3 * 4 * 5, 94, 1, True, False, 0, 2),
        Operation("backward", "mul", "pass", "float32", 0, 24, 2, True, False, 0, 2),
    ),
    numbers=array("q", [0, 0, 1, 1, 2, 4]),
    phases={3: "forward", 4: "backward"},
    passed_on={"optimizer": 4},
    names=("", "kernel"),
    log=b"".join(struct.pack("<BBHIIIIIIIQQQQ", 1, 0, 0, 3, 1, *range(5), *range(4)) for _ in range(4)),
)


def archive(step):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as members:
        operations.write(step, members)
    return file.getvalue()


def test_saved_operations_load_unchanged(tmp_path):
    path = tmp_path / "PID.worked"
    assert operations.load(path) is None
    path.write_bytes(archive(STEP))
    assert operations.load(path) == STEP
    assert list(STEP.places()) == [(0, 0, 1), (1, 2, 4)]
    assert STEP.records()[0].name == "kernel"
    assert STEP.records()[0].grid == (0, 1, 2)


def test_archive_without_operations_gives_none():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as members:
        members.writestr("trace.json", "{}")
        assert operations.read(members) is None


@pytest.mark.parametrize("numbers", [[0, 0], [2, 0, 1], [0, 1, 1], [0, 3, 5], [-1, 0, 1]])
def test_operations_with_invalid_records_are_refused(tmp_path, numbers):
    path = tmp_path / "worked"
    path.write_bytes(archive(StepOperations(**{**vars(STEP), "numbers": array("q", numbers)})))
    with pytest.raises(UnreadableFile):
        operations.load(path)


def test_operation_that_launched_nothing_is_refused(tmp_path):
    waits = b"".join(struct.pack("<BBHIIIIIIIQQQQ", 15, 0, 0, 3, 1, *range(5), *range(4)) for _ in range(4))
    path = tmp_path / "worked"
    path.write_bytes(archive(StepOperations(**{**vars(STEP), "log": waits})))
    with pytest.raises(UnreadableFile, match="launched nothing"):
        operations.load(path)


@given(st.data())
def test_damaged_file_loads_or_raises_one_error(tmp_path_factory, data):
    whole = bytearray(archive(STEP))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "worked"
    path.write_bytes(bytes(whole[: data.draw(st.integers(0, len(whole)))]))
    with suppress(UnreadableFile):
        loaded = operations.load(path)
        assert loaded is not None
        assert all(last <= len(loaded.records()) for _, _, last in loaded.places())
