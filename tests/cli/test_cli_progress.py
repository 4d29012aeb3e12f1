"""Progress goes to standard error, and to logs only when a command takes long."""

from tonnage.cli import progress as module
from tonnage.cli.progress import progress


def test_short_command_shows_no_progress(capsys):
    with progress() as show:
        show("one")
        show("two")
    assert capsys.readouterr() == ("", "")


def test_long_command_shows_each_message_once(capsys):
    lines = module._Lines()
    lines.show("one")
    lines.show("two")
    lines.begin()  # called by the timer
    lines.show("two")
    lines.show("three")
    assert capsys.readouterr().err == "two\nthree\n"


def test_late_first_message_is_shown(capsys):
    lines = module._Lines()
    lines.begin()
    lines.show("one")
    assert capsys.readouterr().err == "one\n"
