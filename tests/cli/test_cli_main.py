"""Tests of every way in which the program ends: the exit code, one line of error, and nothing else."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from lines import is_one_line

from commands import TONNAGE
from tonnage.cli import main
from tonnage.errors import GhostUnavailable, TrialFailed, UnknownModel, UsageError

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "commands"
COMMANDS = [command.name for command in main.app.registered_commands]


def test_help_names_every_command(tonnage):
    ended = tonnage("--help")
    assert ended.code == 0
    assert all(name in ended.out for name in COMMANDS)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_closed_streams_are_no_error(closed):
    ended = subprocess.run(["sh", "-c", f'exec "$0" -m tonnage devices t4 {closed}', sys.executable])
    assert ended.returncode == 0


def test_a_misspelled_command_gets_a_suggestion(tonnage):
    assert "Did you mean 'estimate'? See tonnage --help." in tonnage("estiamte").err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example_that_can_be_typed(command, tonnage, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    words = re.search(rf"Example: tonnage ({command}\b[^\n]*)", tonnage(command, "--help").out)[1].split()
    context = typer.main.get_command(main.app).make_context("tonnage", list(words), resilient_parsing=True)
    assert context.command.commands[command].make_context(command, words[1:]).params


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_a_page_that_names_its_options(command, tonnage, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    help_text = tonnage(command, "--help")
    assert help_text.code == 0
    page = (DOCS / f"{command}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# tonnage {command}\n")
    if "(estimate.md)" in page:  # the command has the options of estimate, too
        page += (DOCS / "estimate.md").read_text(encoding="utf-8")
    options = set(re.findall(r"(?<![\w-])--[a-z-]+", help_text.out)) - {"--help"}
    if command in ("estimate", "dry-run"):
        assert options
    assert [option for option in sorted(options) if f"`{option}" not in page] == []


def test_no_page_without_a_command():
    assert {path.stem for path in DOCS.glob("*.md")} == set(COMMANDS)


def test_version(tonnage):
    assert tonnage("--version").out.startswith("tonnage ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["estimate"], "No MODEL was given"),
        (["dry-run", "--gpu", "t4"], "Missing argument"),
        (["estimate", "gpt2", "--gpu", "t4", "--np", "2"], "No such option: --np"),
        (["estimate", "gpt2", "--gpu", "t4", "--seq-len", "long"], "'long' is not a whole number"),
        (["estimate", "gpt2", "--gpu", "t4", "--seq-len", "0"], "above zero"),
        (["estimate", "gpt2", "--gpu-memory", "much"], "'much' is not a size"),
        (["estimate", "gpt2", "--gpu", "t4", "--method", "dora"], "Unknown method 'dora'; possible: full, lora"),
        (
            ["estimate", "gpt2", "--gpu", "t4", "--lora-rank", "8"],
            "lora-rank only applies to adapters, and method full has none",
        ),
        (["plan", "gpt2", "--gpu", "t4", "--lora-dropout", "0.1"], "lora-dropout only applies to adapters"),
        (
            ["estimate", "gpt2", "--gpu", "t4", "--precision", "fp64"],
            "possible: bf16-mixed, bf16-true, fp16-mixed, fp16-true, fp32",
        ),
        (["estimate", "gpt2", "--gpu", "t4", "--optimizer", "lamb"], "possible: adamw, adamw-loop"),
        (["estimate", "gpt2", "--gpu", "t4", "--checkpointing", "every-0"], "possible: none, full, full-reentrant"),
        (["estimate", "gpt2", "--gpu", "t4", "--shard", "zero4"], "possible: none, ddp, zero1"),
        (["estimate", "gpt2", "--gpu", "t4", "--attention", "paged"], "possible: auto, eager"),
        (["estimate", "gpt2", "--gpu", "t4", "--loss", "cut"], "possible: plain, chunked"),
        (["estimate", "gpt2", "--gpu", "t4", "--allocator", "x"], "possible: default, expandable"),
        (["estimate", "gpt2", "--gpu", "t4", "--param-offload", "disk"], "possible: none, cpu, nvme"),
        (["estimate", "gpt2", "--gpu", "t4", "--base-dtype", "int8"], "possible: fp32, bf16, fp16"),
        (["estimate", "gpt2", "--gpu", "t5"], "Unknown GPU 't5'"),
        (["estimate", "gpt2", "--gpu", "8xt4", "--gpus", "4"], "give one of the two"),
        (["estimate", "gpt2"], "No GPU named"),
        (["estimate", "gpt2", "--gpu", "t4", "--rank", "-1"], "--rank"),
        (["devices", "t5"], "Unknown GPU 't5'"),
    ],
)
def test_wrong_usage(arguments, message, tonnage, calls):
    ended = tonnage(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert is_one_line(ended.err)
    assert message in ended.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("a b"), 2),
        (UnknownModel("No model.\nTry another."), 3),
        (GhostUnavailable("not on this machine"), 3),
        (TrialFailed("the script failed"), 5),
        (OSError(errno.ENOSPC, "No space left on device"), 3),
        (OSError(errno.EFBIG, "File too large"), 3),
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"), 3),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_are_one_line_with_their_code(error, code, tonnage, calls):
    calls.error = error
    ended = tonnage("estimate", "gpt2", "--gpu", "t4")
    assert (ended.code, ended.out) == (code, "")
    assert is_one_line(ended.err)


def test_an_unexpected_error_is_reported_as_a_bug(tonnage, calls, monkeypatch):
    calls.error = ZeroDivisionError("division by zero")
    monkeypatch.delenv("TONNAGE_DEBUG", raising=False)
    ended = tonnage("estimate", "gpt2", "--gpu", "t4")
    assert ended.code == main.BROKEN
    assert is_one_line(ended.err)
    assert "bug in tonnage: ZeroDivisionError: division by zero" in ended.err
    monkeypatch.setenv("TONNAGE_DEBUG", "1")
    assert "Traceback" in tonnage("estimate", "gpt2", "--gpu", "t4").err


def test_the_program_runs_as_a_process():
    ended = subprocess.run([*TONNAGE, "devices", "t4"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0
    assert "Tesla T4" in ended.stdout


def test_a_closed_pipe_is_no_error():
    command = f"'{sys.executable}' -m tonnage devices | head -n 1; echo \"${{PIPESTATUS[0]}}\""
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert ended.stdout.splitlines()[-1] == "0"
    assert ended.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_behind_standard_output_is_one_line():
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([*TONNAGE, "devices"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 3
    assert ended.stderr == "error: The answer could not be printed (No space left on device).\n"


PLAIN = """
import sys
import tonnage, tonnage.__init__
import tonnage.cli.main, tonnage.cli.answer, tonnage.cli.progress, tonnage.cli.table
import tonnage.estimates.estimate, tonnage.trace.trace, tonnage.estimates.archive, tonnage.files, tonnage.plans
import tonnage.job, tonnage.cluster, tonnage.catalog.devices, tonnage.planner.solution, tonnage.planner.plan_file
import tonnage.catalog.configurations, tonnage.allocator.snapshot, tonnage.techniques, tonnage.trainers
import tonnage.report.terminal, tonnage.report.html
shown = set(sys.modules) & {{"numpy"}}
import tonnage.estimates.timeline, tonnage.estimates.predict, tonnage.script.dry_run  # numpy adds up the events
import tonnage.report.viewer  # and writes them
{extra}
heavy = {{name.split(".")[0] for name in sys.modules}} & {{"torch", "transformers", "peft"}}
print(" ".join(sorted(shown | heavy)))
"""


@pytest.mark.parametrize(("extra", "found"), [("", ""), ("import transformers", "transformers")])
def test_the_plain_half_imports_no_torch(extra, found):
    """The second case shows that the test can fail."""
    ended = subprocess.run(
        [sys.executable, "-c", PLAIN.format(extra=extra)], capture_output=True, text=True, check=True
    )
    assert (found in ended.stdout.split()) if found else ended.stdout.split() == []


def test_help_imports_little():
    """Imports make `--help` slow: it imports nothing of torch's world, and nothing of tonnage that computes."""
    code = (
        "import sys; from tonnage.cli import main; main.run(['--help']); "
        "print([n for n in sys.modules if n.startswith('tonnage.')], file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(re.findall(r"'(tonnage\.[\w.]+)'", ended.stderr))
    allowed = (
        "tonnage.cli",
        "tonnage.errors",
        "tonnage.printable",
        "tonnage.units",
        "tonnage.model",
        "tonnage.job",
        "tonnage.plans",
        "tonnage.options",
        "tonnage.synonyms",
    )
    assert [name for name in sorted(loaded) if not name.startswith(allowed)] == []


def test_no_environment_reaches_the_golden_text(tonnage, calls, monkeypatch):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "CLICOLOR_FORCE"):
        monkeypatch.setenv(name, "1")
    assert "\x1b" not in tonnage("estimate", "gpt2", "--gpu", "t4").out
    assert os.environ["FORCE_COLOR"] == "1"


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("tonnage est", ["estimate"]),
        ("tonnage estimate gpt2 --gpu l40", ["l40", "l40s"]),
        ("tonnage estimate llama-2-1", ["llama-2-13b"]),
    ],
)
def test_the_shell_completes_names(typed, completed):
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1), "_TONNAGE_COMPLETE": "complete_bash"}
    ended = subprocess.run(TONNAGE, env={**os.environ, **words}, capture_output=True, text=True, check=False)
    assert ended.stdout.split() == completed
