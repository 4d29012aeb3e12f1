"""Commands on platforms without a ghost: tonnage without what only Linux has (see `elsewhere`)."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from networks import TINY, tiny_job
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.errors import CannotEstimate
from tonnage.estimates import predict
from tonnage.plans import Plan

PROGRAM = Path(__file__).parent / "elsewhere.py"
SMALL = ("--seq-len", "16", "--steps", "1")
IMITATED = (*SMALL, "--source", "meta")


def answers(system: str, commands: list[list[str]], folder: Path) -> list[dict[str, Any]]:
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed")
    done = subprocess.run(
        [sys.executable, "-X", "warn_default_encoding", str(PROGRAM), system],
        input=json.dumps(commands),
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "TONNAGE_CACHE": str(folder / "cache"), "TONNAGE_DEBUG": "1"},
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Provide a folder whose name is not in the alphabet of a Western console."""
    folder = tmp_path / "模 é"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY["llama"]), encoding="utf-8")
    return str(folder)


def test_windows(model: str, tmp_path: Path) -> None:
    saved, page, picture = (str(tmp_path / name) for name in ("saved", "page.html", "picture.pickle"))
    asked = [
        ["estimate", model, "--gpu", "t4", *IMITATED, "--save", saved],
        ["estimate", model, "--gpu", "8xa100-80gb", "--shard", "zero3", *IMITATED, "--json"],
        ["estimate", model, "--gpu", "cpu", *SMALL],
        ["report", saved, "--html", page, "--snapshot", picture],
        ["devices"],
        ["models"],
        ["formats"],
        ["estimate", "--help"],
    ]
    refused = [
        ["estimate", model, "--gpu", "t4", *SMALL],
        ["plan", model, "--gpu", "t4"],
        ["dry-run", "--gpu", "t4", "--", sys.executable, "train.py"],
    ]
    found = answers("win32", asked + refused, tmp_path)
    for words, answer in zip(asked, found, strict=False):
        assert answer["code"] == 0, words
        writes = not {"--save", "--html"}.isdisjoint(words)
        assert answer["stderr"].startswith("wrote ") if writes else answer["stderr"] == "", words
    assert "\\u6a21 é" in found[0]["stdout"]
    assert json.loads(found[1]["stdout"])["source"] == "meta"
    assert found[3]["stdout"] == found[0]["stdout"]
    for words, answer in zip(refused, found[len(asked) :], strict=True):
        [line] = answer["stderr"].splitlines()
        assert answer["code"] == 3, words
        assert "needs Linux on x86-64; this is Windows on AMD64" in line
        assert "--source meta" in line


def test_macos(model: str, tmp_path: Path) -> None:
    """On macOS torch finds another accelerator than the imitated one."""
    words = ["estimate", model, "--gpu", "8xt4", "--shard", "ddp", *IMITATED]
    imitated, ghost = answers("darwin", [words, words[:-2]], tmp_path)
    assert imitated["code"] == 0, imitated["stderr"]
    assert "this is Darwin on arm64" in ghost["stderr"]


def test_a_torch_without_distributed_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    for name, source in (("cpu", "ghost"), ("t4", "meta")):
        with pytest.raises(CannotEstimate, match=r"without torch\.distributed"):
            predict.estimate(Case(tiny_job(), Plan(), parse_cluster(name)), source=source, fresh=True)
