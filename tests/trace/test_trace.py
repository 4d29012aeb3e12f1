"""A Trace is saved and loaded unchanged, and a damaged one raises one clear error."""

import contextlib
import json
import zipfile
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.errors import UnreadableFile
from tonnage.estimates.timeline import timeline
from tonnage.recorder.tonnage_recorder import record_layout
from tonnage.trace import trace as traces
from tonnage.trace.trace import Activity, Claim, Mark, Trace

EVENTS = [("segment_alloc", 0, 2097152, 0, 0), ("alloc", 0, 1000, 0, 1), ("free_requested", 0, 1000, 0, 1)]


def example() -> Trace:
    columns = {name: array("q") for name in record_layout.EVENT_COLUMNS}
    for action, *numbers in EVENTS:
        columns["action"].append(record_layout.ACTIONS.index(action))
        for name, number in zip(record_layout.EVENT_COLUMNS[1:], numbers, strict=True):
            columns[name].append(number)
    return Trace(
        source="ghost",
        versions={"torch": "2.13.0"},
        device={"name": "card", "total_bytes": 1 << 30},
        steps=1,
        outcome={"kind": "completed"},
        peaks={"allocated_bytes": 1024, "reserved_bytes": 2097152},
        marks=(Mark(step=0, phase="load", module=""), Mark(step=0, phase="forward", module="model.layers.0")),
        claims=(Claim(mark=1, address=0, category="parameter"),),
        names=("gemm",),
        event_columns=columns,
        log=record_layout.RECORD.pack(1, 0, 0, 1, 0, 8, 4, 1, 128, 0, 7, 0, 0, 0),
    )


def save(trace: Trace, path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        traces.write(trace, archive)
    return path


def test_saved_trace_loads_unchanged(tmp_path: Path) -> None:
    trace = example()
    assert traces.load(save(trace, tmp_path / "a.trace")) == trace


def test_events_and_activities_are_read_from_the_columns() -> None:
    trace = example()
    assert [tuple(event) for event in trace.events()] == EVENTS
    (kernel,) = trace.activities()
    assert (kernel.kind, kernel.name, kernel.grid, kernel.block, kernel.stream) == (
        "kernel",
        "gemm",
        (8, 4, 1),
        128,
        7,
    )


def test_equal_exchanges_are_listed_once() -> None:
    def exchange(name: str, peer: int, layout: tuple[int, int, int], size: int) -> Activity:
        return Activity("collective", name, 1, 0, layout, peer, 7, size, 0, 0)

    exchanges = [
        exchange("AllGather", 0, (4, 1, 2), 512),
        exchange("AllGather", 0, (4, 1, 2), 1024),
        exchange("Send", 3, (4, 1, 2), 512),
        exchange("AllGather", 0, (2, 2, 0), 512),
    ]
    indices = {"AllGather": 0, "Send": 1}
    log = example().log + b"".join(traces.pack_activity(each, indices) for each in exchanges)
    trace = replace(example(), names=tuple(indices), log=log)
    assert list(trace.activities("collective")) == exchanges
    distinct = [("AllGather", (4, 1, 2), 0), ("Send", (4, 1, 2), 3), ("AllGather", (2, 2, 0), 0)]
    assert trace.exchanges() == distinct


@pytest.mark.parametrize(
    ("repeated", "is_valid"), [((0, 1), True), ((), True), ((1,), False), ((0, 9), False), ((1, 0), False)]
)
def test_repeated_steps_must_begin_at_existing_marks(
    tmp_path: Path, repeated: tuple[int, ...], is_valid: bool
) -> None:
    path = save(replace(example(), repeated=repeated), tmp_path / "a.trace")
    with contextlib.nullcontext() if is_valid else pytest.raises(UnreadableFile, match="repeated"):
        assert timeline(traces.load(path)).marks == example().marks


@pytest.mark.parametrize("member", ["trace.json", "events.mark", "log"])
def test_missing_member_is_one_error(tmp_path: Path, member: str) -> None:
    whole = save(example(), tmp_path / "whole.trace")
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(tmp_path / "part.trace", "w") as target:
        for name in source.namelist():
            if name != member:
                target.writestr(name, source.read(name))
    with pytest.raises(UnreadableFile):
        traces.load(tmp_path / "part.trace")


def _marked(row: str) -> bytes:
    return b'{"format_version": 1, "marks": {"phases": ["load"], "modules": [""], "rows": [%s]}}' % row.encode()


@pytest.mark.parametrize(
    ("member", "content"),
    [
        ("trace.json", b"[]"),
        ("trace.json", b'{"format_version": 99}'),
        ("trace.json", b'{"format_version": 1, "marks": 3, "claims": []}'),
        *(("trace.json", _marked(row)) for row in ("[0, 7, 0]", f"[0, {10**300}, 0]", "[1e999, 0, 0]")),
        ("events.mark", array("q", [0, 1, 99]).tobytes()),
        ("events.action", array("q", [0, 1, 77]).tobytes()),
        ("events.size", array("q", [1]).tobytes()),
        ("events.size", b"odd"),
        ("log", b"short"),
    ],
)
def test_inconsistent_member_is_one_error(tmp_path: Path, member: str, content: bytes) -> None:
    whole = save(example(), tmp_path / "whole.trace")
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(tmp_path / "bad.trace", "w") as target:
        for name in source.namelist():
            target.writestr(name, content if name == member else source.read(name))
    with pytest.raises(UnreadableFile):
        traces.load(tmp_path / "bad.trace")


@pytest.mark.parametrize(
    ("name", "value"),
    [("allocator_settings", 3), ("rank", "0"), ("versions", []), ("seconds", None), ("outcome", "oom")],
)
def test_field_of_the_wrong_type_is_one_error(tmp_path: Path, name: str, value: Any) -> None:
    whole = save(example(), tmp_path / "whole.trace")
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(tmp_path / "bad.trace", "w") as target:
        for member in source.namelist():
            content = source.read(member)
            changed = json.dumps({**json.loads(content), name: value}).encode() if member == "trace.json" else content
            target.writestr(member, changed)
    with pytest.raises(UnreadableFile, match=f"its {name} has the wrong type"):
        traces.load(tmp_path / "bad.trace")


@settings(max_examples=60)
@given(data=st.data())
def test_damaged_file_loads_or_raises_one_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("damage")
    raw = bytearray(save(example(), folder / "a.trace").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    (folder / "b.trace").write_bytes(bytes(raw[: data.draw(st.integers(0, len(raw)))]))
    with contextlib.suppress(UnreadableFile):
        traces.load(folder / "b.trace")
