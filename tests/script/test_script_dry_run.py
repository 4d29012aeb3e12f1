"""Tests of what a dry-run leaves on the terminal."""

import os
import pty
import subprocess
import sys

import pytest

from tonnage.errors import TrialFailed
from tonnage.script import ending
from tonnage.script.process_results import ProcessResults
from tonnage.trace.trace import Trace

END = [sys.executable, "-c", "from tonnage.script import dry_run; dry_run._end_line(); print('FITS', flush=True)"]


def test_the_verdict_begins_a_line_of_its_own_on_a_terminal():
    ours, theirs = pty.openpty()
    os.write(theirs, b" 50%|#####     | 1/2")
    subprocess.run(END, stdout=theirs, stderr=theirs, check=True)
    os.close(theirs)
    assert os.read(ours, 1000).split(b"\r\n") == [b" 50%|#####     | 1/2", b"FITS", b""]
    os.close(ours)


def test_the_verdict_begins_a_line_of_its_own_in_a_file_with_everything(tmp_path):
    with (tmp_path / "log").open("w") as log:
        log.write("1/2")
        log.flush()
        subprocess.run(END, stdout=log, stderr=log, check=True)
    assert (tmp_path / "log").read_text() == "1/2\nFITS\n"


def test_nothing_is_added_where_the_verdict_goes_elsewhere():
    ended = subprocess.run(END, capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("FITS\n", "")


@pytest.mark.parametrize(
    ("command", "processes", "names_rank"),
    [
        ("torchrun --nproc-per-node 2 train.py", (), True),
        ("python -m accelerate.commands.launch train.py", (), True),
        ("deepspeed train.py", (), True),
        ("python train.py", (), False),
        ("python fabric.py", ("fabric.py", "fabric.py"), True),
        ("python spawn.py", ("spawn.py SpawnProcess-1", "spawn.py SpawnProcess-2"), False),
    ],
)
def test_a_time_out_names_what_takes_less_time(command: str, processes: tuple[str, ...], names_rank: bool) -> None:
    names = {100 + rank: (rank, name) for rank, name in enumerate(processes)}
    nothing = ProcessResults(traces=(), others=(), cut_off=(), names=names)
    with pytest.raises(TrialFailed, match=r"stopped after 9 s.*--timeout") as raised:
        ending.judge(command.split(), nothing, None, 3, 9.0)
    assert ("--rank 0" in str(raised.value)) == names_rank


@pytest.mark.parametrize(
    ("words", "failure", "hub"),
    [
        (["vllm", "serve", "qwen3-0.6b"], "LocalEntryNotFoundError: no snapshot", "Qwen/Qwen3-0.6B"),
        (
            ["python", "run.py", "--model=llama-3.1-8b"],
            "connect to 'https://huggingface.co'",
            "meta-llama/Llama-3.1-8B",
        ),
        (["vllm", "serve", "Qwen/Qwen3-0.6B"], "LocalEntryNotFoundError: no snapshot", None),
        (["python", "run.py", "qwen3-0.6b"], "ValueError: 3 is not 4", None),
    ],
)
def test_a_name_of_the_catalog_that_a_program_asked_the_hub_for(words, failure, hub):
    hint = ending.name_on_the_hub(words, failure)
    assert hint.endswith(f"is {hub}.") if hub else not hint


@pytest.mark.parametrize(
    "words", ["CUDA error: invalid device function", "no kernel image is available for execution"]
)
def test_a_library_without_machine_code_for_the_card_is_said(words):
    outcome = {"kind": "failed", "error": "AcceleratorError", "message": words, "stack": ["train.py:4 <module>"]}
    said = ending.explain_failure(Trace(source="ghost", versions={}, device={}, steps=0, outcome=outcome))
    assert said.endswith("A library has no machine code for this card; an older version of it may have.")
