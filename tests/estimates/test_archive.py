"""Saved files: they load as they were saved; damage is a one-line error; nothing is executed or half-written."""

import errno
import json
import os
import pickle
import random
import zipfile
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import estimates
from tonnage import files
from tonnage.errors import UnreadableFile, UnwritableFile
from tonnage.estimates import archive
from tonnage.estimates.estimate import Estimate, StepPeak
from tonnage.recorder.tonnage_recorder.record_layout import EVENT_COLUMNS
from tonnage.report import html, terminal
from tonnage.trace.trace import Claim, Mark, Trace


def small_trace(rank: int = 0) -> Trace:
    """Return a Trace of two allocations and a free."""
    rows = [(3, 4096, 2**21, 0, 0), (0, 4096, 512, 0, 0), (1, 4096, 512, 0, 1)]
    return Trace(
        source="ghost",
        versions={"torch": "2.13.0"},
        device={"name": "NVIDIA T4", "total_bytes": 2**34},
        rank=rank,
        steps=1,
        marks=(Mark(step=0, phase="forward", module="a"), Mark(step=0, phase="backward", module="")),
        claims=(Claim(mark=0, address=4096, category="parameter"),),
        event_columns={
            name: array("q", column) for name, column in zip(EVENT_COLUMNS, zip(*rows, strict=True), strict=True)
        },
        log=bytes(128),
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("saved") / "run.tonnage"
    archive.save(path, estimates.full_card(), (small_trace(1), small_trace(0)))
    return path.read_bytes()


@pytest.mark.parametrize("make", [estimates.fitting, estimates.full_card, estimates.scripted])
def test_what_was_saved_comes_back(make, tmp_path):
    path = tmp_path / "run.tonnage"
    archive.save(path, make(), (small_trace(1), small_trace(0)))
    # JSON knows no tuples, so those within the free-form fields come back as lists: there are none here.
    assert archive.load_estimate(path) == make()
    assert archive.load_traces(path) == (small_trace(0), small_trace(1))


def test_without_traces(tmp_path):
    archive.save(tmp_path / "run", estimates.fitting())
    assert archive.load_traces(tmp_path / "run") == ()


def read_everything(path: Path) -> None:
    """Load and show, as `tonnage report` does."""
    estimate = archive.load_estimate(path)
    terminal.render(estimate)
    html.page(estimate)
    archive.load_traces(path)


@settings(max_examples=150)
@given(data=st.data())
def test_truncated_and_flipped_archives_are_unreadable_or_right(data, whole, tmp_path):
    raw = bytearray(whole)
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    else:
        for position in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=8)):
            raw[position] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path / "damaged"
    path.write_bytes(raw)
    try:
        read_everything(path)
    except UnreadableFile as error:
        assert "\n" not in str(error)  # noqa: PT017


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def paths_of(value: object, at: tuple = ()) -> list[tuple]:
    """Yield every path in a JSON document."""
    found = [at]
    if isinstance(value, dict):
        found += [path for key, item in value.items() for path in paths_of(item, (*at, key))]
    elif isinstance(value, list | tuple):
        found += [path for key, item in enumerate(value) for path in paths_of(item, (*at, key))]
    return found


def timed() -> Estimate:
    """Return an estimate in which every kind of value occurs."""
    seconds = {"step_seconds": 0.5, "low_seconds": 0.4, "high_seconds": 0.6}
    return replace(
        estimates.full_card(),
        time={**seconds, "tokens_per_second_per_gpu": 8192.0, "mfu": 0.4, "bound_by": "compute"},
        job={"command": ["python", "train.py"], "steps": 3},
        cards=({"index": 0, "peak_bytes": 9, "processes": [{"process": 1, "rank": 0, "peak_bytes": 9}]},),
    )


PATHS = paths_of(json.loads(json.dumps(timed().to_json())))[1:]


@settings(max_examples=300)
@given(where=st.sampled_from(PATHS), value=JSON)
@example(where=("job", "command", 0), value=None)
@example(where=("cards", 0, "processes"), value=None)
@example(where=("cards", 0, "processes", 0), value=[])
def test_any_value_anywhere_is_refused_or_can_be_shown(where, value, tmp_path):
    document = json.loads(json.dumps(timed().to_json()))
    place = document
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    path = tmp_path / "odd"
    with zipfile.ZipFile(path, "w") as members:
        members.writestr("estimate.json", json.dumps(document))
    try:
        read_everything(path)
    except UnreadableFile as error:
        assert "\n" not in str(error)  # noqa: PT017


@pytest.mark.parametrize("content", [b"", b"not an archive", pickle.dumps({"a": 1})])
def test_other_files(content, tmp_path):
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(UnreadableFile, match="not a file that tonnage saved"):
        archive.load_estimate(path)


def test_missing_file_and_folder(tmp_path):
    for path in (tmp_path / "none", tmp_path, tmp_path / ("n" * 300)):
        with pytest.raises(UnreadableFile):
            archive.load_estimate(path)


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize(
    ("member", "load"), [("estimate.json", archive.load_estimate), ("rank0/trace.json", archive.load_traces)]
)
def test_nothing_is_unpickled(member, load, tmp_path):
    path = tmp_path / "run"
    with zipfile.ZipFile(path, "w") as members:
        members.writestr(member, pickle.dumps(Bomb(tmp_path / "exploded")))
    with pytest.raises(UnreadableFile):
        load(path)
    assert not (tmp_path / "exploded").exists()


def test_zip_bombs_are_refused_by_what_they_claim(tmp_path):
    path = tmp_path / "bomb"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as members:
        members.writestr("estimate.json", b" " * (65 * 2**20))
    with pytest.raises(UnreadableFile, match=r"claims to hold 65.0 MiB; the limit for a file of its size is 19.8"):
        archive.load_estimate(path)


def test_traces_that_claim_too_much_are_refused(tmp_path):
    """Five columns of zeros, as a trace of six million events has them."""
    path, column = tmp_path / "run", bytes(48 * 10**6)
    archive.save(path, estimates.fitting(), (replace(small_trace(), log=b""),))
    with zipfile.ZipFile(path) as source:
        kept = {name: source.read(name) for name in source.namelist() if "events." not in name}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as members:
        for name, content in kept.items():
            members.writestr(name, content)
        for name in EVENT_COLUMNS:
            members.writestr(f"rank0/events.{name}", column)
    for load in (archive.load_traces, archive.load_estimate):
        with pytest.raises(UnreadableFile, match=r"claims to hold 228.9 MiB; the limit"):
            load(path)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_ways_of_packing_are_refused(method, tmp_path):
    path = tmp_path / "run"
    with zipfile.ZipFile(path, "w", method) as members:
        members.writestr("estimate.json", json.dumps(estimates.fitting().to_json()))
    with pytest.raises(UnreadableFile, match="packed in another way"):
        archive.load_estimate(path)


def changed(**values):
    """Return a document with other values; `a__b` is the field b of a."""
    document = json.loads(json.dumps(estimates.full_card().to_json()))
    for path, value in values.items():
        *parents, name = path.split("__")
        part = document
        for parent in parents:
            part = part[parent]
        part[name] = value
    return document


DEEP = json.loads("[" * 30 + "]" * 30)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (changed(notes=["a " * 100_000]), "notes has 200,000 characters, of at most 65,536"),
        (changed(notes=["ab " * 10_000] * 10), "its texts together has 30"),
        (changed(coverage__assumed=["x y"] * 1_001), "coverage has 1,001 entries, of at most 1,000"),
        (changed(phases=[{"name": "a", "allocated_bytes": 1, "reserved_bytes": 1}] * 2_000), "phases has 2,000"),
        (changed(peak__by_category={str(number): 1 for number in range(2_000)}), "peak has 2,000 fields"),
        (changed(steps=[{"step": 1, "allocated_bytes": 1, "reserved_bytes": 1}] * 100_001), "steps has 100,001"),
        (changed(oom__stack=["a:1 b"] * 2_000), "oom has 2,000 entries"),
        (changed(model__name="a" * 70_000), "model has 70,000 characters"),
        (changed(job={"a" * 300_000: 1}), "its texts together has 30"),
        (changed(plan={"a": DEEP}), "nested more than 20 levels"),
        (changed(advice=[{}] * 1_001), "advice has 1,001"),
        ([1] * 2_000, "the estimate has 2,000"),
    ],
)
def test_amounts_that_no_estimate_has_are_refused(document, words, tmp_path):
    path = tmp_path / "run"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as members:
        members.writestr("estimate.json", json.dumps(document))
    with pytest.raises(UnreadableFile, match=words):
        archive.load_estimate(path)


def test_long_honest_runs_are_read_and_shown(tmp_path):
    """Fifty thousand steps, thousands of ranks, long notes: more than any run so far, less than the bounds."""
    made = estimates.full_card()
    step = made.steps[0] if made.steps else StepPeak(step=1, allocated_bytes=1, reserved_bytes=1)
    rank = {"rank": 0, "fits": True, "allocated_bytes": 1, "reserved_bytes": 1, "process_bytes": 1}
    long = replace(
        made,
        steps=tuple(replace(step, step=number) for number in range(50_000)),
        ranks=tuple({**rank, "rank": number} for number in range(4_096)),
        notes=("word " * 1_000,) * 5,
        job={"command": ["python", "-c", "x" * 20_000, *map(str, range(500))]},
    )
    path = tmp_path / "run"
    archive.save(path, long)
    assert archive.load_estimate(path) == long
    assert "DOES NOT FIT" in terminal.render(long, width=100)


@pytest.mark.parametrize(
    "changed",
    [
        {"step_seconds": [1]},
        {"mfu": [1]},
        {"mfu": None},
        {"tokens_per_second_per_gpu": "x"},
        {"high_seconds": {}},
        {"low_seconds": -1.0},
        {"step_seconds": True},
    ],
)
def test_seconds_that_are_no_numbers_are_refused(changed, tmp_path):
    path, estimate = tmp_path / "run", timed()
    archive.save(path, replace(estimate, time={**estimate.time, **changed}))
    with pytest.raises(UnreadableFile, match=f"time: {next(iter(changed))} is .*, and no number from 0 on"):
        archive.load_estimate(path)


def test_what_a_damaged_archive_holds_is_not_printed(tmp_path):
    path = tmp_path / "run"
    archive.save(path, estimates.fitting())
    content = bytearray(path.read_bytes())
    content[27] ^= 1 << 6  # the length of the member's name
    path.write_bytes(content)
    with pytest.raises(UnreadableFile) as caught:
        archive.load_estimate(path)
    assert len(str(caught.value)) < 400


def test_escape_sequences_in_a_saved_file_do_not_reach_the_terminal(tmp_path):
    path, hostile = tmp_path / "run", "\x1b]0;pwned\x07\x1b[2J<script>"
    estimate = estimates.fitting()
    curve = tuple(replace(moment, phase=hostile) for moment in estimate.curve)
    assert curve
    archive.save(path, replace(estimate, model={"name": hostile}, notes=("\x1b[1m",), curve=curve))
    estimate = archive.load_estimate(path)
    assert "\x1b" not in terminal.render(estimate)
    assert "\x1b" not in html.page(estimate)
    assert "<script>" not in html.fragment(estimate)


# ---- writing ---------------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "run"
    path.write_text("old")

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(archive.traces_format, "write", full)
    with pytest.raises(UnwritableFile, match="No space left on device"):
        archive.save(path, estimates.fitting(), (small_trace(),))
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["run"]


def test_an_interrupted_save_leaves_nothing(tmp_path):
    def interrupted() -> None:
        with files.open_replacing(tmp_path / "run") as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_device_is_written_in_place():
    with pytest.raises(UnwritableFile, match="No space left"):
        archive.save(Path("/dev/full"), estimates.fitting())
    assert not Path("/dev/full").is_file()


def test_what_cannot_be_written_is_known_before_the_work(tmp_path):
    with pytest.raises(UnwritableFile, match="no folder"):
        files.check_writable(tmp_path / "none" / "run")
    with pytest.raises(UnwritableFile, match="is a folder"):
        files.check_writable(tmp_path)
    for name in ("n" * 300, "zero\0byte"):
        with pytest.raises(UnwritableFile, match="cannot be written"):
            files.check_writable(tmp_path / name)
    files.check_writable(tmp_path / "run")


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "its fields are not those that tonnage writes"),
        ({}, "no estimate of tonnage: it has no schema_version"),
        ({"schema_version": 2}, "has schema_version 2; this tonnage reads 1"),
        ({"schema_version": 1}, "it has no peak"),
        ({"schema_version": 1, "peak": []}, "its fields are not those that tonnage writes"),
        ({**estimates.fitting().to_json(), "rank": None}, "estimate: rank is missing"),
        ({**estimates.fitting().to_json(), "rank": "0"}, "estimate: rank is a text"),
    ],
)
def test_what_is_wrong_is_said_in_words_of_a_reader(document, words, tmp_path):
    path = tmp_path / "odd"
    with zipfile.ZipFile(path, "w") as members:
        members.writestr("estimate.json", json.dumps(document))
    with pytest.raises(UnreadableFile, match=words) as caught:
        archive.load_estimate(path)
    assert not any(word in str(caught.value) for word in ("Error", "NoneType", "attribute", "None"))


def test_its_own_files_are_known(tmp_path):
    path = tmp_path / "run"
    assert not archive.is_saved(path)
    for content in (b"", b"print()", b"PK\x05\x06" + bytes(18), b"PK\x05\x06" + b"x" * 40):
        path.write_bytes(content)
        assert not archive.is_saved(path)
    archive.save(path, estimates.fitting())
    assert archive.is_saved(path)


def test_random_bytes_are_never_anything_else_than_unreadable(tmp_path):
    source = random.Random(7)
    for length in (1, 22, 100, 4096):
        path = tmp_path / "noise"
        path.write_bytes(b"PK\x05\x06" + source.randbytes(length))
        with pytest.raises(UnreadableFile):
            archive.load_estimate(path)
