"""What can go wrong, each with the exit code the command line answers with.

    TonnageError                    any of ours
    +-- UsageError            (2)   an option or argument that makes no sense
    |   +-- UnknownDevice
    +-- CannotEstimate        (3)   input that is unknown or unreadable, or a machine that cannot run a ghost
    |   +-- UnknownModel
    |   +-- UnreadableModel
    |   +-- UnreadableFile
    |   +-- GhostUnavailable
    |   +-- UnknownNetwork
    +-- UnwritableFile        (3)   an answer that could not be put where it was asked for
    +-- TrialFailed           (5)   the user's script, or the step, failed for a reason other than memory

Not fitting is an answer, not an error: it is a field of the Estimate, and exit code 1.
Every message is one line: what happened with numbers, what was possible, what to do.
"""

from typing import ClassVar


class TonnageError(Exception):
    """Any error tonnage raises on purpose; the command line prints its message without a traceback."""

    exit_code: ClassVar[int] = 3


class UsageError(TonnageError):
    """An option or argument that makes no sense."""

    exit_code = 2


class UnknownDevice(UsageError):
    """A GPU name that the catalog does not hold."""


class CannotEstimate(TonnageError):
    """Input that is unknown or unreadable, or a machine on which this cannot be computed."""

    exit_code = 3


class UnknownModel(CannotEstimate):
    """A model name that is neither in the catalog, nor a file, nor reachable."""


class UnreadableModel(CannotEstimate):
    """A model configuration that cannot be read or makes no sense."""


class UnreadableFile(CannotEstimate):
    """A saved trace, estimate or snapshot that is corrupt or of another kind."""


class GhostUnavailable(CannotEstimate):
    """This machine cannot run a ghost GPU as asked (platform, missing libraries, no CUDA build of torch)."""


class UnknownNetwork(CannotEstimate):
    """A network whose dimensions are not known, so that its seconds cannot be computed from them."""


class UnwritableFile(TonnageError):
    """A file that could not be written (no such folder, no permission, full disk)."""

    exit_code = 3


class TrialFailed(TonnageError):
    """The script or step that was run failed for a reason other than memory."""

    exit_code = 5


def of_kind(name: str, message: str) -> TonnageError:
    """The error that another process told by the name of its class, which only that process may know."""
    kinds = [TonnageError]
    for kind in kinds:  # which grows meanwhile
        kinds += kind.__subclasses__()
    return {kind.__name__: kind for kind in kinds}.get(name, CannotEstimate)(message)
