"""Triton's key is of its files' sizes and dates, not of what some hundred megabytes of them hold."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tonnage.ghost.environment import PATH, environment
from tonnage.ghost.wheel import Torch

WITH_KEY = """
def triton_key():
    raise SystemExit("every file is read")

def get_cache_key():
    return triton_key()
"""
PROGRAM = """
from tonnage_inside import kernels
kernels.key_by_dates()
from triton.runtime.cache import get_cache_key
assert get_cache_key() == get_cache_key()
print(get_cache_key())
"""


@pytest.fixture
def triton(tmp_path: Path) -> Path:
    """A package like it."""
    for folder in ("runtime", "compiler", "language", "backends", "_C"):
        (tmp_path / "triton" / folder).mkdir(parents=True)
        (tmp_path / "triton" / folder / "__init__.py").write_text("")
    (tmp_path / "triton" / "__init__.py").write_text("")
    (tmp_path / "triton" / "runtime" / "cache.py").write_text(WITH_KEY)
    (tmp_path / "triton" / "_C" / "libtriton.so").write_bytes(b"code")
    return tmp_path / "triton"


def key(triton: Path, program: str = PROGRAM) -> str:
    paths = f"{PATH}:{triton.parent}"
    ran = subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": paths}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_it_changes_with_what_decides_and_with_nothing_else(triton: Path) -> None:
    first = key(triton)
    (triton / "runtime" / "notes.txt").write_text("about")
    assert key(triton) == first, "by now there is bytecode, too"
    (triton / "_C" / "libtriton.so").write_bytes(b"longer code")
    longer = key(triton)
    os.utime(triton / "language" / "__init__.py", (1, 1))
    assert len({first, longer, key(triton)}) == 3


def test_a_triton_that_has_it_elsewhere_is_left_alone(triton: Path) -> None:
    (triton / "runtime" / "cache.py").write_text("def get_cache_key():\n    return 'its own'\n")
    assert key(triton) == "its own\n"


@pytest.mark.ghost
def test_a_programs_triton_has_such_a_key(torch_build: Torch, tmp_path: Path) -> None:
    program = (
        "import torch\nfrom triton.runtime.cache import triton_key\nprint(triton_key.__module__, len(triton_key()))"
    )
    told = environment(torch=torch_build, watch_into=tmp_path)
    ran = subprocess.run([sys.executable, "-c", program], env=told, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["tonnage_inside.kernels", "64"]
