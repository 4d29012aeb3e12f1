"""Tests of `tonnage cache`: sizes, clearing, limits."""

import json

import pytest
from lines import is_one_line

from tonnage.estimates import cache


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A cache with a build of torch, a trace and a kernel."""
    monkeypatch.setenv("TONNAGE_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "folder", lambda: tmp_path / "traces")
    for name, size in (("torch-2.13.0-cp311/lib.so", 2**20), ("traces/a.trace", 2**10), ("compiled/k.cubin", 10)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    return tmp_path


def test_sizes_are_shown(tonnage, kept):
    ended = tonnage("cache")
    assert ended.code == 0
    assert [line.split()[0] for line in ended.out.splitlines()[1:4]] == ["torch", "traces", "compiled"]
    assert "1.0 MiB" in ended.out
    assert "2.00 GiB" in ended.out
    assert str(kept) in ended.out


def test_json_has_the_bytes(tonnage, kept):
    document = json.loads(tonnage("cache", "--json").out)
    assert (document["folder"], document["bytes"]) == (str(kept), 2**20 + 2**10 + 10)
    assert {part["name"]: part["bytes"] for part in document["parts"]} == {
        "torch": 2**20,
        "traces": 2**10,
        "compiled": 10,
    }


def test_clear_keeps_what_needs_a_download_unless_it_is_named(tonnage, kept):
    assert tonnage("cache", "clear").out == "cleared 1.0 KiB; 1.0 MiB are kept\n"
    assert [path.name for path in kept.iterdir()] == ["torch-2.13.0-cp311"]
    assert tonnage("cache", "clear", "all").out == "cleared 1.0 MiB; 0 B are kept\n"
    assert list(kept.iterdir()) == []


def test_a_limit_is_kept(tonnage, kept):
    assert tonnage("cache", "limit", "5GiB").code == 0
    assert "5.00 GiB" in tonnage("cache").out
    assert tonnage("cache", "limit", "1").code == 0
    assert not (kept / "traces" / "a.trace").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["purge"], "Unknown action 'purge'; possible: show, clear, limit"),
        (["clear", "wheels"], "Unknown part 'wheels'; possible: torch, traces, compiled, all"),
        (["limit", "much"], "'much' is not a size"),
        (["show", "torch"], "show has no 'torch'"),
    ],
)
def test_wrong_usage_is_one_line(tonnage, kept, arguments, message):
    ended = tonnage("cache", *arguments)
    assert (ended.code, message in ended.err, is_one_line(ended.err)) == (2, True, True)
    assert (kept / "traces" / "a.trace").exists()
