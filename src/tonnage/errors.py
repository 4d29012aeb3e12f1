"""The errors that tonnage raises on purpose, each with the exit code of the command line.

    TonnageError                    base class of them all
    +-- UsageError            (2)   an option or argument that makes no sense
    |   +-- UnknownDevice
    +-- CannotEstimate        (3)   input that is unknown or unreadable, or a machine that cannot run a ghost
    |   +-- UnknownModel
    |   +-- UnreadableModel
    |   +-- UnreadableFile
    |   +-- GhostUnavailable
    |   +-- UnknownNetwork
    +-- UnwritableFile        (3)   an answer that could not be written to its file
    +-- OutOfDeviceMemory     (4)   a step on a real device that needed more memory than it has
    +-- TrialFailed           (5)   the user's script, or the step, failed for a reason other than memory

A job that does not fit is an answer, not an error: it is a field of the Estimate, and exit code 1.
Every message is one line that says what happened (with numbers), what was possible and what to do.
"""

from typing import ClassVar

from tonnage.printable import make_printable


class TonnageError(Exception):
    """Base class of the errors that tonnage raises on purpose; the command line prints the message, no traceback."""

    exit_code: ClassVar[int] = 3

    def __str__(self) -> str:
        """Return the message in one line that a terminal can show: it may quote what a stranger's file holds."""
        return make_printable(" ".join(super().__str__().split()))


class UsageError(TonnageError):
    """An option or argument that makes no sense."""

    exit_code = 2


class UnknownDevice(UsageError):
    """A GPU name that is not in the catalog."""


class CannotEstimate(TonnageError):
    """Input that is unknown or unreadable, or a machine on which the answer cannot be computed."""

    exit_code = 3


class UnknownModel(CannotEstimate):
    """A model name that is not in the catalog, names no file, and cannot be downloaded."""


class UnreadableModel(CannotEstimate):
    """A model configuration that cannot be read or makes no sense."""


class UnreadableFile(CannotEstimate):
    """A saved trace, estimate or snapshot that is corrupt or of another kind."""


class GhostUnavailable(CannotEstimate):
    """A machine that cannot run the requested ghost GPU (platform, missing libraries, no CUDA build of torch)."""


class UnknownNetwork(CannotEstimate):
    """A network whose dimensions are unknown, so that the seconds of a step cannot be computed from them."""


class UnwritableFile(TonnageError):
    """A file that could not be written (no such folder, no permission, full disk)."""

    exit_code = 3


class OutOfDeviceMemory(TonnageError):
    """A step on a real device that needed more memory than the device has."""

    exit_code = 4


class TrialFailed(TonnageError):
    """A script or step that failed for a reason other than memory."""

    exit_code = 5


def of_kind(name: str, message: str) -> TonnageError:
    """Return the error that another process reported by the name of its class.

    A name that is no TonnageError here, because only the other process defines it, becomes a CannotEstimate.
    """
    classes = [TonnageError]
    for error_class in classes:  # the loop appends to the list that it walks
        classes += error_class.__subclasses__()
    return {error_class.__name__: error_class for error_class in classes}.get(name, CannotEstimate)(message)
