"""Runs tonnage's commands as on another platform: without what its standard library lacks.

    python elsewhere.py win32|darwin < COMMANDS.json

Commands are lists of words; exit codes and output go to standard output as JSON.  The modules and names that a
platform lacks are read from typeshed, which mypy brings along.  Other libraries differ by platform themselves, so
they are imported before anything is removed; of tonnage nothing is.
"""

import ast
import contextlib
import importlib
import io
import json
import platform
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mypy
import psutil  # noqa: F401
import torch
import torch.distributed.tensor.parallel
import torch.testing._internal.distributed.fake_pg
import transformers.models.llama.modeling_llama  # noqa: F401
import typer.rich_utils  # noqa: F401

TYPESHED = Path(mypy.__file__).parent / "typeshed" / "stdlib"
POORER = ("os", "signal", "socket", "time", "mmap", "ctypes")
"""Modules that every platform has, with fewer names."""
MACHINES = {"win32": ("Windows", "AMD64"), "darwin": ("Darwin", "arm64")}


def names(source: Path, system: str) -> set[str]:
    """Return the names that a module of the standard library defines on a system."""
    found: set[str] = set()
    for node in _holding(ast.parse(source.read_text(encoding="utf-8")).body, system):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in found if not name.startswith("_")}


def _holding(body: list[ast.stmt], system: str) -> Iterator[ast.stmt]:
    """Yield the statements that apply to a system and this Python."""
    told = {"sys": SimpleNamespace(platform=system, version_info=sys.version_info), "TYPE_CHECKING": True}
    for node in body:
        if isinstance(node, ast.If):
            holds = eval(compile(ast.Expression(node.test), "typeshed", "eval"), told)
            yield from _holding(node.body if holds else node.orelse, system)
        else:
            yield node


def take_away(system: str) -> None:
    """Remove from this process what the system lacks, and report that system."""
    for source in TYPESHED.glob("*.pyi"):
        if names(source, "linux") and not names(source, system):
            sys.modules[source.stem] = None  # type: ignore[assignment]
    for name in POORER:
        source = next(path for path in (TYPESHED / name / "__init__.pyi", TYPESHED / f"{name}.pyi") if path.exists())
        module = importlib.import_module(name)
        for gone in names(source, "linux") - names(source, system):
            with contextlib.suppress(AttributeError):
                delattr(module, gone)
    sys.platform = system
    if system == "darwin":  # whose torch finds another accelerator
        torch.backends.mps.is_available = torch.backends.mps.is_built = torch.accelerator.is_available = lambda: True
        torch.accelerator.current_accelerator = lambda check_available=False: torch.device("mps")
    platform.system, platform.machine = (lambda said=said: said for said in MACHINES[system])


def run(words: list[str]) -> dict[str, Any]:
    """Run one command; return its exit code, and its output on a console limited to Western European letters."""
    from tonnage.cli import main, progress

    progress._PATIENCE_SECONDS = threading.TIMEOUT_MAX  # how far it is, a slow machine alone would say
    out, err = (io.TextIOWrapper(io.BytesIO(), "cp1252", errors) for errors in ("strict", "backslashreplace"))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main.run(words)
        for stream in (out, err):
            stream.flush()
    return {"code": code, "stdout": _written(out), "stderr": _written(err)}


def _written(stream: io.TextIOWrapper) -> str:
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode("cp1252")


def answers() -> None:
    """Run what standard input lists."""
    asked = json.load(sys.stdin)
    take_away(sys.argv[1])
    warnings.filterwarnings("error", category=EncodingWarning, module=r"tonnage\b")  # files in the locale's encoding
    json.dump([run(words) for words in asked], sys.stdout)


if __name__ == "__main__":
    answers()
