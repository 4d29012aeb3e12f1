"""Errors come back from another process as what they were."""

import pytest

from tonnage import errors


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("UnreadableModel", errors.UnreadableModel),
        ("UnknownDevice", errors.UnknownDevice),
        ("TrialFailed", errors.TrialFailed),
        ("TonnageError", errors.TonnageError),
        ("OfAnotherProgram", errors.CannotEstimate),
    ],
)
def test_an_error_is_of_the_kind_that_was_told(name, kind):
    told = errors.of_kind(name, "what happened")
    assert type(told) is kind
    assert str(told) == "what happened"
