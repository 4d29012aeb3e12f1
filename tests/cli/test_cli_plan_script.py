"""Tests of `tonnage plan -- COMMAND`: arguments of the plan, refused options, exit codes."""

import json
import sys
from typing import Any

import pytest
from lines import is_one_line

import estimates
from tonnage.script import planning
from tonnage.script.planning import ScriptPlan


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Record what was asked; nothing is run."""
    recorded: dict[str, Any] = {}

    def advise(asked: Any, progress: Any) -> ScriptPlan:
        recorded["asked"] = asked
        why = "it makes neither a Trainer nor an Accelerator"
        return ScriptPlan(
            command=tuple(asked.command),
            budget_bytes=1,
            seen="a loop of its own",
            before=estimates.fitting(),
            why_not=why,
        )

    monkeypatch.setattr(planning, "plan_script", advise)
    return recorded


def test_command_and_options_reach_the_plan(tonnage: Any, asked: Any) -> None:
    options = (
        "--gpu",
        "t4",
        "--without",
        "precision",
        "--headroom",
        "10",
        "--checkpointing",
        "full",
        "--timeout",
        "9",
    )
    ended = tonnage("plan", *options, "--", sys.executable, "train.py", "--gpu", "x", "--help")
    assert ended.code == 3
    question = asked["asked"]
    assert question.command == [sys.executable, "train.py", "--gpu", "x", "--help"]
    assert (question.without, question.headroom, question.timeout_seconds) == (("precision",), 0.1, 9.0)
    assert question.stated == {"checkpointing": "full"}
    assert "NOT PLANNED" in ended.out


def test_json_describes_the_script(tonnage: Any, asked: Any) -> None:
    document = json.loads(tonnage("plan", "--gpu", "t4", "--json", "--", sys.executable, "train.py").out)
    assert (document["schema_version"], document["status"], document["plans"]) == (1, "unknown", [])
    assert document["script"]["command"] == [sys.executable, "train.py"]
    assert document["script"]["before"]["fits"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--find", "min-gpu", "--", sys.executable, "x.py"], "--find is for a MODEL"),
        (["--seq-len", "512", "--", sys.executable, "x.py"], "--seq-len is set by the script itself"),
        (["--engine", "trl", "--", sys.executable, "x.py"], "--engine is set by the script itself"),
        (["gpt2", "llama-3.1-8b"], "'gpt2' is neither a program on PATH nor a file"),
        (["--", "./missing.sh"], "missing.sh does not exist"),
        (["--", "missing.py"], "missing.py does not exist"),
        (["--", __file__], "cannot be executed; run it by its program: tonnage plan --gpu t4 -- python"),
        ([], "Missing argument"),
    ],
)
def test_options_without_meaning_for_a_script_are_refused_in_one_line(
    tonnage: Any, asked: Any, arguments: Any, message: str
) -> None:
    ended = tonnage("plan", "--gpu", "t4", *arguments)
    assert ended.code == 2
    assert message in ended.err
    assert is_one_line(ended.err)


def test_html_shows_the_script(tonnage: Any, asked: Any, tmp_path: Any) -> None:
    page = tmp_path / "plan.html"
    ended = tonnage("plan", "--gpu", "t4", "--html", str(page), "--", sys.executable, "train.py")
    assert (ended.code, f"wrote {page}\n" in ended.err) == (3, True)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert all(part in text for part in ("NOT PLANNED", "train.py", "60.00 GiB", "a loop of its own"))
