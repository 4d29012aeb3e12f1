"""`tonnage plan -- COMMAND`: what reaches the advice, what is refused, how it ends."""

import json
import sys
from typing import Any

import pytest
from lines import is_one_line

import estimates
from tonnage.script import advice
from tonnage.script.advice import Advice


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the advice was asked; nothing is run."""
    noted: dict[str, Any] = {}

    def advise(asked: Any, progress: Any) -> Advice:
        noted["asked"] = asked
        why = "it makes neither a Trainer nor an Accelerator"
        return Advice(
            command=tuple(asked.command),
            budget_bytes=1,
            seen="a loop of its own",
            before=estimates.fitting(),
            why_not=why,
        )

    monkeypatch.setattr(advice, "advise", advise)
    return noted


def test_the_command_and_what_may_be_chosen(tonnage: Any, asked: Any) -> None:
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
    found = asked["asked"]
    assert found.command == [sys.executable, "train.py", "--gpu", "x", "--help"]
    assert (found.without, found.headroom, found.timeout_seconds) == (("precision",), 0.1, 9.0)
    assert found.said == {"checkpointing": "full"}
    assert "NOT PLANNED" in ended.out


def test_json_has_the_script(tonnage: Any, asked: Any) -> None:
    document = json.loads(tonnage("plan", "--gpu", "t4", "--json", "--", sys.executable, "train.py").out)
    assert (document["schema_version"], document["status"], document["plans"]) == (1, "unknown", [])
    assert document["script"]["command"] == [sys.executable, "train.py"]
    assert document["script"]["before"]["fits"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--find", "min-gpu", "--", sys.executable, "x.py"], "--find is for a MODEL"),
        (["--seq-len", "512", "--", sys.executable, "x.py"], "--seq-len is what the script itself says"),
        (["--engine", "trl", "--", sys.executable, "x.py"], "--engine is what the script itself says"),
        (["gpt2", "llama-3.1-8b"], "'gpt2' is no command"),
        ([], "Missing argument"),
    ],
)
def test_what_says_nothing_about_a_script_is_one_line(tonnage: Any, asked: Any, arguments: Any, said: str) -> None:
    ended = tonnage("plan", "--gpu", "t4", *arguments)
    assert ended.code == 2
    assert said in ended.err
    assert is_one_line(ended.err)
