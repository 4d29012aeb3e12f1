"""Progress: on standard error, and for logs only when it takes long."""

from tonnage.cli import progress as module
from tonnage.cli.progress import progress


def test_nothing_for_what_is_over_at_once(capsys):
    with progress() as say:
        say("one")
        say("two")
    assert capsys.readouterr() == ("", "")


def test_a_long_run_says_where_it_is_once(capsys):
    lines = module._Lines()
    lines.say("one")
    lines.say("two")
    lines.begin()  # what the timer does
    lines.say("two")
    lines.say("three")
    assert capsys.readouterr().err == "two\nthree\n"


def test_a_late_first_message_is_said(capsys):
    lines = module._Lines()
    lines.begin()
    lines.say("one")
    assert capsys.readouterr().err == "one\n"
