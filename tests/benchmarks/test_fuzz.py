"""The short form of the fuzz of all readers, and what it would find."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import tonnage
from benchmarks import fuzz
from tonnage.errors import UnreadableFile

ROOT = Path(tonnage.__file__).parents[2]


def test_no_reader_has_a_fault() -> None:
    """In a process of its own, whose memory is limited."""
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.fuzz", "--inputs", "160", "--seed", "7"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src")))},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr[-1000:]
    assert [line.partition("  ")[0] for line in ran.stdout.splitlines()] == list(fuzz.READERS)


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lambda path: 1 / 0, "ZeroDivisionError"),
        (lambda path: "a\x1b[2J", "a terminal"),
        (lambda path: json.loads("{"), "JSONDecodeError"),
        (lambda path: [][0], "IndexError"),
    ],
)
def test_what_a_reader_must_not_do_is_a_fault(read: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(fuzz.Fault, match=words):
        fuzz.check(read, tmp_path)  # type: ignore[arg-type]


def test_an_error_of_tonnage_is_an_end(tmp_path: Path) -> None:
    def refuse(path: Path) -> str:
        raise UnreadableFile("no")

    assert fuzz.check(refuse, tmp_path) == "UnreadableFile"


def test_damage_is_the_same_for_the_same_seed_and_mostly_differs() -> None:
    for _, valid, _ in fuzz.READERS.values():
        content = valid()
        first, second = (
            [fuzz.damage(content, chance) for _ in range(20)] for chance in (random.Random(1), random.Random(1))
        )
        assert first == second
        assert sum(one != content for one in first) > 10
