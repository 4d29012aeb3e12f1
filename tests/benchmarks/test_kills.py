"""The benchmark of kills, with a few of them."""

import subprocess
import sys
from pathlib import Path


def test_a_run_that_is_killed_loses_nothing() -> None:
    """Five forks of one process train for a second each."""
    words = [sys.executable, "-m", "benchmarks.kills", "--kills", "4", "--steps", "60"]
    root = Path(__file__).parents[2]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 kills: " in done.stdout
    assert "while the trained network was written" in done.stdout
