"""An environment for each tool: its packages in a folder of their own, before everything else on the path."""

import os
import subprocess
import sys
from pathlib import Path

from tools import Tool

HERE = Path(__file__).parent


def prepare(tool: Tool) -> dict[str, str] | str:
    """The variables of the tool's process; a sentence if its packages cannot be had."""
    path = [str(HERE / "tools")]
    if tool.packages:
        folder = cache() / tool.name
        if not (folder / "complete").exists():
            failure = install(tool, folder)
            if failure:
                return failure
        path = [str(folder), str(folder / "source"), *path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "CUDA_VISIBLE_DEVICES": ""}


def cache() -> Path:
    return Path(os.environ.get("TONNAGE_CACHE", Path.home() / ".cache" / "tonnage")) / "league"


def install(tool: Tool, folder: Path) -> str:
    """Why it did not work; empty if it did.  Without dependencies: torch must be the same for all."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *tool.packages]
    commands = [pip]
    if tool.repository:
        address, commit = tool.repository
        source = str(folder / "source")
        commands += [
            ["git", "clone", "--quiet", address, source],
            ["git", "-C", source, "checkout", "--quiet", commit],
        ]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            return f"not installed: {lines[-1][:160] if lines else command[0] + ' failed'}"
    (folder / "complete").touch()
    return ""
