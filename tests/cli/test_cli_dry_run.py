"""Tests of `tonnage dry-run`: its own options end where the command begins."""

import pytest
from lines import is_one_line

import estimates
from tonnage.errors import TrialFailed


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["--", "python", "train.py", "--gpu", "x"], ["python", "train.py", "--gpu", "x"]),
        (["python", "train.py", "--steps", "9", "--help"], ["python", "train.py", "--steps", "9", "--help"]),
        (["--", "torchrun", "--", "x"], ["torchrun", "--", "x"]),
    ],
)
def test_the_command_is_passed_on_unchanged(arguments, command, tonnage, calls):
    assert tonnage("dry-run", "--gpu", "t4", "--steps", "2", *arguments).code == 0
    assert calls.command == command
    assert calls.options["steps"] == 2


@pytest.mark.parametrize("late", [["--gpu", "t4"], ["--gpu-memory=24GiB"]])
def test_a_gpu_named_behind_the_command_belongs_to_the_command(late, tonnage, calls):
    answer = tonnage("dry-run", "python", "train.py", *late)
    assert answer.code == 2
    assert is_one_line(answer.err)
    assert "stands behind the command and belongs to it; write it before the command" in answer.err


def test_options_arrive(tonnage, calls):
    text = (
        "dry-run --gpu a100-80gb --gpus 4 --gpu-memory 40GiB --host-memory 1TiB --timeout 60 --torch 2.11.0 --rank 3 "
        "-- python train.py"
    )
    assert tonnage(*text.split()).code == 0
    assert (calls.cluster.gpus, calls.cluster.device.capacity_bytes) == (4, 40 * 2**30)
    assert (calls.options["timeout_seconds"], calls.options["torch_version"]) == (60.0, "2.11.0")
    assert calls.options["rank"] == 3
    assert calls.cluster.host_limit_bytes == 2**40


def test_a_full_host_does_not_fit(tonnage, calls):
    host = calls.estimate.host.with_machine(96 * 2**30, {}, 64 * 2**30)
    calls.estimate = calls.estimate.with_host(host)
    ended = tonnage("dry-run", "--gpu", "t4", "--host-memory", "64GiB", "--no-advice", "--", "python", "train.py")
    assert ended.code == 1
    assert "32.00 GiB of host memory missing on each machine" in " ".join(ended.out.split())


def test_the_report_names_the_command(tonnage, calls):
    calls.estimate = estimates.scripted()
    assert "python train.py --epochs 3 on H100-80GB" in tonnage("dry-run", "--gpu", "t4", "--", "x").out


def test_a_report_does_not_replace_the_script(tonnage, calls, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print()")
    for option in ("--save", "--html", "--snapshot"):
        ended = tonnage("dry-run", "--gpu", "t4", option, str(script), "--", "python", str(script))
        assert (ended.code, calls.command, script.read_text()) == (2, None, "print()")
        assert is_one_line(ended.err)
    assert tonnage("dry-run", "--gpu", "t4", "--html", str(script), "--force", "--", "python", "x").code == 0


def test_a_failed_script_exits_with_code_5(tonnage, calls):
    calls.error = TrialFailed("The command ended with exit code 1.")
    ended = tonnage("dry-run", "--gpu", "t4", "--", "false")
    assert ended.code == 5
    assert is_one_line(ended.err)
