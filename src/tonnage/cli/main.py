"""`tonnage COMMAND`: run a command, and report every error as one line and an exit code."""

import errno
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NoReturn

import typer

from tonnage.cli import (
    cache,
    devices,
    dry_run,
    estimate,
    export,
    formats,
    models,
    plan,
    report,
    serve_check,
    train,
    tune,
)
from tonnage.errors import TonnageError
from tonnage.printable import filtered
from tonnage.synonyms import (
    NO_SOURCE,
    Synonym,
    explain_unknown_option,
    find_option,
    find_train_option,
    is_without_effect,
)

INTERRUPTED = 130
USAGE = 2
BROKEN = 70
"""A bug in tonnage itself (EX_SOFTWARE of sysexits.h)."""

app = typer.Typer(
    name="tonnage",
    help="Know what your GPUs can carry before you load them: the real PyTorch, on a GPU that isn't there.",
    epilog="Start with: tonnage estimate llama-3.1-8b --gpu 8xA100-80GB --shard zero3. "
    "Exit codes: 0 fits, 1 does not fit, 2 wrong usage, 3 cannot estimate, 4 out of memory in a trial, "
    "5 the script failed, 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("estimate")(estimate.estimate)
app.command("plan")(plan.plan)
app.command("export")(export.export)
app.command("dry-run", context_settings={"allow_interspersed_args": False})(dry_run.dry_run)
app.command("train")(train.train)
app.command("tune")(tune.tune)
app.command("serve-check")(serve_check.serve_check)
app.command("report")(report.report)
app.command("devices")(devices.devices)
app.command("models")(models.models)
app.command("formats")(formats.formats)
app.command("cache")(cache.cache)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from tonnage import __version__

        print(f"tonnage {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the `tonnage` program; SIGTERM and SIGHUP make it end its ghosts and the user's command first."""
    _open_standard_streams()
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # not every system has both
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # nohup stays nohup
            signal.signal(number, _end)
    sys.exit(run(sys.argv[1:]))


def _open_standard_streams() -> None:
    """Open /dev/null for each standard stream that is closed: else the next opened file would take its number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _end(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; an error is one line on standard error."""
    with filtered():
        return _run(arguments)


def _run(arguments: Sequence[str]) -> int:
    command = typer.main.get_command(app)
    try:
        code: Any = command.main(list(arguments), prog_name="tonnage", standalone_mode=False)
        if code == INTERRUPTED:  # what typer makes of Ctrl-C
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except TonnageError as error:
        return _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted.", INTERRUPTED)
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the help was printed instead
            return USAGE
        if (message := _usage_message(error, serves=_is_about_serving(arguments))) is not None:
            return _fail(message, USAGE)
        if (message := _disk_message(error)) is not None:
            return _fail(message, TonnageError.exit_code)
        return _bug(error)


def _is_about_serving(arguments: Sequence[str]) -> bool:
    return "--task=serve" in arguments or ("--task", "serve") in pairwise(arguments)


def _usage_message(error: Exception, *, serves: bool) -> str | None:
    """Return typer's message about wrong options, or None for another error.

    Only some versions of typer export the classes of these errors, so they are known by their `format_message`.
    """
    if not hasattr(error, "format_message"):
        return None
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "tonnage"
    message = _other_word_message(error, serves=serves) or str(error.format_message()).strip()
    message = message.removesuffix(".") if message.endswith("?.") else message  # some versions end it twice
    return f"{message}{'' if message.endswith(('.', '?')) else '.'} See {where} --help."


def _other_word_message(error: Exception, *, serves: bool) -> str | None:
    """Return what an option of another program is called here; None for another error, or an unknown word."""
    name, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if not isinstance(name, str) or context is None or not hasattr(error, "possibilities"):
        return None
    if name == "--source":
        return f"No such option: {name}. {NO_SOURCE}"
    own = {option for parameter in context.command.params for option in parameter.opts}
    if context.command.name == "train":
        return _explain_train_option(name)
    is_script = "--timeout" in own and "--seq-len" not in own
    known = _find_serve_option(name) if serves else find_option(name)
    if known is not None and (known.option == "MODEL" or f"--{known.option}" in own) and not is_script:
        return f"No such option: {name}. Here it is {known.on_command_line}."
    if is_script and (known is not None or is_without_effect(name) or name in _request_options()):
        return f"No such option: {name}. The script sets it itself: give it behind the command, after the two dashes."
    if (way := explain_unknown_option(name)) is not None:
        return f"No such option: {name}. {way[0].upper()}{way[1:]}."
    if is_without_effect(name):
        return f"No such option: {name}. Neither memory nor seconds depend on it: leave it out."
    return None


def _find_serve_option(name: str) -> Synonym | None:
    from tonnage.serving.option_names import find_serve_option

    return find_serve_option(name)


def _explain_train_option(name: str) -> str | None:
    """Return what `tonnage train` calls an option, or that its plan says it; None for an unknown word."""
    if (own := find_train_option(name)) is not None:
        return f"No such option: {name}. Here it is --{own}."
    known = find_option(name)
    option = name if known is None else f"--{known.option}"
    if option in {*_request_options(), "--gpu", "--gpus"}:
        return f"No such option: {name}. The plan file says it: {option.removeprefix('--').replace('-', '_')}."
    return None


def _request_options() -> set[str]:
    """Return the options of Job and Plan as the command line spells them."""
    from tonnage.job import Job
    from tonnage.options import options, spell_option
    from tonnage.plans import Plan

    return {f"--{spell_option(item.name)}" for kind in (Job, Plan) for item, _ in options(kind)}


def _disk_message(error: Exception) -> str | None:
    """Return what to do if a file could not be written for lack of space, or None for another error."""
    from tempfile import gettempdir

    if isinstance(error, FileNotFoundError) and "temporary directory" in str(error):  # tempfile's own words
        return "No folder for temporary files is writable; set TMPDIR to one that is."
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return "A file that is needed here is larger than the limit for files; raise it with ulimit -f."
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = error.filename or os.environ.get("TMPDIR") or gettempdir()  # which skips a full one
        return f"No space is left on the device of {where}; free some, or set TMPDIR to a folder on another device."
    return None


def _fail(message: str, code: int) -> int:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return code


def _bug(error: Exception) -> int:
    if os.environ.get("TONNAGE_DEBUG"):
        traceback.print_exception(error)
        return BROKEN
    where = traceback.extract_tb(error.__traceback__)[-1]
    return _fail(
        f"this is a bug in tonnage: {type(error).__name__}: {error} ({where.name}, line {where.lineno} of "
        f"{os.path.basename(where.filename)}). TONNAGE_DEBUG=1 shows the traceback; please report it.",
        BROKEN,
    )
