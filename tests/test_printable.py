"""No text that a terminal would carry out leaves the program."""

import io
import logging
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.errors import TonnageError
from tonnage.printable import Filtered, filtered, make_printable, unfiltered

HARMFUL = {
    "title of the window": "\x1b]0;owned\x07",
    "erase": "\x1b[2J",
    "eight bits": "\x9b2J",
    "hyperlink": "\x1b]8;;http://a\x1b\\text",
    "backspace": "a\x08b",
    "delete": "\x7f",
    "right to left": "\u202eabc",
    "isolate": "\u2066abc\u2069",
    "mark": "\u200f",
    "zero width": "a\u200bb",
    "line separator": "a\u2028b",
    "tag": "\U000e0041",
    "private": "\ue000",
    "surrogate": "\ud800",
}


@pytest.mark.parametrize("text", HARMFUL.values(), ids=HARMFUL)
@pytest.mark.parametrize("options", [{}, {"lines": True}, {"colours": True}], ids=str)
def test_what_does_not_print_is_replaced(text: str, options: dict[str, bool]) -> None:
    shown = make_printable(f"a{text}b", **options)
    assert shown.isprintable()
    assert "\ufffd" in shown
    assert len(shown) == len(text) + 2


@given(st.text())
def test_what_prints_stays(text: str) -> None:
    shown = make_printable(text)
    assert all(now in (before, "\ufffd") for now, before in zip(shown, text, strict=True))
    assert make_printable(shown) == shown
    assert make_printable(text.replace("\x1b", ""), colours=True) == make_printable(text.replace("\x1b", ""))


def test_lines_and_colours_stay_where_they_are_wanted() -> None:
    assert make_printable("a\n\tb\r", lines=True) == "a\n\tb\ufffd"
    assert make_printable("a\nb") == "a\ufffdb"
    assert make_printable("\x1b[1;31mred\x1b[0m\x1b[2J", colours=True) == "\x1b[1;31mred\x1b[0m\ufffd[2J"
    assert make_printable("größer, 中文, عربي, 🙂") == "größer, 中文, عربي, 🙂"


def test_an_error_is_one_line_that_prints() -> None:
    assert str(TonnageError("a\x1b[2J\n\u202eb  c")) == "a\ufffd[2J \ufffdb c"


def test_whoever_writes_is_filtered(monkeypatch: pytest.MonkeyPatch) -> None:
    outer = io.StringIO()
    monkeypatch.setattr(sys, "stderr", outer)
    monkeypatch.setattr(sys, "stdout", outer)
    with filtered():
        print("a\x1bb")
        sys.stderr.writelines(["c\x07", "d\n"])
        logger = logging.Logger("of a library")
        logger.addHandler(logging.StreamHandler())
        logger.warning("bos_token_id is %s", "\x1b[2J")
        print("\r 50%", end="\rx")
        assert unfiltered(sys.stdout) is outer
        assert isinstance(sys.stdout, Filtered)
        assert not sys.stdout.isatty()
    assert outer.getvalue() == "a\ufffdb\nc\ufffdd\nbos_token_id is \ufffd[2J\n\r 50%\rx"
    assert sys.stdout is outer


PROGRAM = """
from tonnage.cli.progress import progress
import sys, time
with progress() as say:
    say("a\\x1b]0;owned\\x07")
    time.sleep(0.3)
    print("b\\x1b]0;owned\\x07", file=sys.stderr)
    time.sleep(0.3)
"""


def test_the_status_of_a_terminal_is_filtered_and_still_moves() -> None:
    reads, writes = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    ran = subprocess.Popen([sys.executable, "-c", PROGRAM], stderr=writes, stdout=writes, env=environment)
    os.close(writes)
    seen = b""
    try:
        while piece := os.read(reads, 4096):
            seen += piece
    except OSError:  # the other end is closed
        pass
    assert ran.wait() == 0
    os.close(reads)
    assert b"a\xef\xbf\xbd]0;owned" in seen
    assert b"b\xef\xbf\xbd]0;owned" in seen
    assert b"\x1b[2K" in seen, "the spinner erases its own line"
    assert b"\x1b]0" not in seen
