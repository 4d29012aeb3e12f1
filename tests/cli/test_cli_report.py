"""`tonnage report` shows a saved estimate again."""

import json
import pickle
import zipfile
from dataclasses import replace

import pytest
from lines import is_one_line

import estimates
from tonnage.estimates import archive
from tonnage.report.terminal import render


@pytest.fixture
def kept(tmp_path):
    path = tmp_path / "run.tonnage"
    archive.save(path, estimates.full_card())
    return path


def test_saved_estimate_gives_the_same_report_json_and_exit_code(kept, tonnage, calls):
    calls.estimate = estimates.full_card()
    again, first = tonnage("report", str(kept)), tonnage("estimate", "gpt2", "--gpu", "t4")
    assert (again.code, again.out) == (first.code, first.out)
    assert again.out == render(estimates.full_card(), width=100)
    assert json.loads(tonnage("report", str(kept), "--json").out) == json.loads(json.dumps(calls.estimate.to_json()))


def test_width_follows_the_terminal(kept, tonnage, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    assert tonnage("report", str(kept)).out == render(estimates.full_card(), width=70)


def test_page_is_written(kept, tonnage, tmp_path):
    tonnage("report", str(kept), "--html", str(tmp_path / "page.html"))
    assert "DOES NOT FIT" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_page_replaces_only_a_page_without_force(kept, tonnage, tmp_path):
    page, mine = tmp_path / "page.html", tmp_path / "mine.html"
    mine.write_text("<!DOCTYPE html><p>mine")
    assert [tonnage("report", str(kept), "--html", str(page)).code for _ in range(2)] == [1, 1]
    for path in (mine, kept):
        ended = tonnage("report", str(kept), "--html", str(path))
        assert (ended.code, ended.out) == (2, "")
        assert "add --force" in ended.err
    assert tonnage("report", str(kept), "--html", str(mine), "--force").code == 1
    assert "DOES NOT FIT" in mine.read_text(encoding="utf-8")


def test_snapshot_of_the_cpu_is_refused(tonnage, tmp_path):
    path, made = tmp_path / "run.tonnage", estimates.fitting()
    archive.save(path, replace(made, cluster={**made.cluster, "gpu": "cpu"}))
    ended = tonnage("report", str(path), "--snapshot", str(tmp_path / "z.pickle"))
    assert (ended.code, ended.out) == (2, "")
    assert "the CPU has none" in ended.err


def test_snapshot_needs_a_trace(kept, tonnage, tmp_path):
    ended = tonnage("report", str(kept), "--snapshot", str(tmp_path / "snapshot.pickle"))
    assert ended.code == 3
    assert is_one_line(ended.err)
    assert "has no trace for a snapshot" in ended.err


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", pickle.dumps([1]), b"{}"])
def test_other_files_are_a_one_line_error(content, tmp_path, tonnage):
    path = tmp_path / "other"
    path.write_bytes(content)
    ended = tonnage("report", str(path))
    assert (ended.code, ended.out) == (3, "")
    assert is_one_line(ended.err)


def test_missing_file_is_refused(tonnage, tmp_path):
    ended = tonnage("report", str(tmp_path / "none"))
    assert ended.code == 3
    assert "is not there; give a file written by --save" in ended.err


HARMFUL = "\x1b]0;owned\x07\x1b[2J\u202e\x9b2J"


def place(document, path, value):
    """Return a copy of a JSON document with another value, or another key, at a path."""
    copy = json.loads(json.dumps(document))
    part = copy
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    return copy


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("peak", "by_category", HARMFUL), -1),
        (("peak", "by_category", HARMFUL), 1),
        ((HARMFUL,), 1),
        (("coverage", HARMFUL), [1]),
        (("coverage", "assumed"), [HARMFUL]),
        (("notes",), [HARMFUL]),
        (("model", "name"), HARMFUL),
        (("cluster", "gpu"), HARMFUL),
        (("plan", HARMFUL), HARMFUL),
        (("oom", "message"), HARMFUL),
        (("oom", "stack"), [HARMFUL]),
        (("source",), HARMFUL),
        (("schema_version",), HARMFUL),
        (("time", "bound_by"), HARMFUL),
        (("versions", HARMFUL), HARMFUL),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [(), ("--json",), ("--html",)], ids=str)
def test_no_text_of_a_file_reaches_the_terminal_as_it_is(path, value, options, tonnage, tmp_path):
    file, page = tmp_path / f"{HARMFUL.replace('/', '')}.tonnage", tmp_path / "page.html"
    with zipfile.ZipFile(file, "w") as archive_file:
        archive_file.writestr("estimate.json", json.dumps(place(estimates.full_card().to_json(), path, value)))
    words = ("--html", str(page)) if options == ("--html",) else options
    ended = tonnage("report", str(file), *words)
    assert ended.code in (1, 3)
    shown = ended.out + ended.err + (page.read_text(encoding="utf-8") if page.exists() else "")
    assert [letter for letter in shown if not letter.isprintable() and letter != "\n"] == []
