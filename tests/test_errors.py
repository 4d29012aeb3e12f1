"""An error of another process is raised again as the same class."""

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
def test_error_has_the_reported_class(name, kind):
    error = errors.of_kind(name, "what happened")
    assert type(error) is kind
    assert str(error) == "what happened"
