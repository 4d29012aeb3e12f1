"""The shelf: Traces of earlier estimates, kept for when the same is asked again.

A Trace is found by all that it depends on: the configuration's content (not its name), job, plan, rank and ranks, the
card as the ghost reports it, the installed distributions, torch's build, Python, the environment variables that
libraries listen to, and the content of tonnage and its ghost.  What cannot be told apart so is not kept: a factory's
code, a library that is installed from a folder in which it may change.

One archive a Trace, in the format of `tonnage.trace.trace`: reading executes nothing, a damaged one counts as absent.
They lie in `traces` of the cache folder; when they grow beyond MOST_BYTES, those that were not used for longest go.
"""

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from tonnage.errors import UnreadableFile, UnwritableFile
from tonnage.files import replacing
from tonnage.ghost.wheel import cache_folder, place
from tonnage.trace import trace as traces
from tonnage.trace.trace import Trace

MOST_BYTES: Final = 2 * 2**30
"""What all kept Traces together may take: some hundred of 8B models, fifty of 405B."""

_LOOKS_EACH: Final = 50
"""The part of it, one in so many, that a process adds before it looks again how full the shelf is."""

_SUFFIX: Final = ".trace"
_IN_FLUX: Final = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "bitsandbytes",
    "torchao",
    "deepspeed",
    "trl",
    "torchtitan",
    "megatron",
    "liger",
)
"""Libraries whose code decides allocations: their version says nothing where they are installed as editable."""
_HEEDED: Final = (
    *("ACCELERATE_", "BNB_", "CUBLAS", "CUDA", "CUDNN", "DS_", "GHOST_", "HF_", "LD_", "NCCL_", "NVIDIA_"),
    *("PYTHON", "PYTORCH_", "TORCH", "TRANSFORMERS_", "TRITON_", "USE_"),
)
"""Beginnings of the names of environment variables that change what a program allocates, or which code it runs."""
_NAMES: Final = ("_name_or_path", "transformers_version")
"""Fields of a configuration that say nothing about the network."""


def key(request: Mapping[str, Any], torch_version: str | None = None) -> str | None:
    """Under what the Trace of a worker's request is kept; None where an equal key would not promise an equal Trace.

    `request` is what `tonnage.ghost.pool.request` made, `torch_version` the version that was asked for, if any.
    """
    model = request["job"]["model"]
    folders = tuple(_folders())
    installed = _installed(folders)
    if model["kind"] != "config" or installed is None:
        return None
    structure = {name: value for name, value in model["config"].items() if name not in _NAMES}
    document = {
        "request": {**request, "job": {**request["job"], "model": structure}},
        "python": [sys.version, platform.machine()],
        "distributions": installed,
        "torch": [torch_version, *_torch_builds(torch_version, folders)],
        "environment": {name: value for name, value in os.environ.items() if name.startswith(_HEEDED)},
        "tonnage": _own_content(),
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def find(key: str) -> Trace | None:
    """The Trace kept under a key; None if there is none that can be read."""
    path = _path(key)
    try:
        found = traces.load(path)
        now = time.time_ns()  # the kernel's own clock for files ticks in milliseconds, and two would be equal
        os.utime(path, ns=(now, now))  # used now: the last to go
    except (UnreadableFile, OSError):
        return None
    return found


def keep(key: str, trace: Trace, file: Path | None = None) -> None:
    """Put a Trace on the shelf, in place of an older one.  Where nothing can be written, nothing is kept.

    Where it lies in a `file` already that nobody needs, that is taken, if it is on the same disk.
    """
    path = _path(key)
    with suppress(OSError, UnwritableFile):
        path.parent.mkdir(parents=True, exist_ok=True)
        if file is None or not _moved(file, path):
            with replacing(path) as new, zipfile.ZipFile(new, "w") as archive:
                traces.write(trace, archive)
        _make_room_for(path.stat().st_size)


def _moved(file: Path, path: Path) -> bool:
    try:
        file.replace(path)
    except OSError:
        return False
    return True


def folder() -> Path:
    """Where the Traces lie."""
    return cache_folder() / "traces"


def _path(key: str) -> Path:
    return folder() / f"{key}{_SUFFIX}"


_added_bytes: dict[Path, int] = {}
"""What this process has put into a folder since it last looked through it."""


def _make_room_for(size_bytes: int) -> None:
    """Look through the folder where so many bytes more may be too many: at first, and each time a part was added.

    Thousands of files take longer to go through than a small Trace to be written.
    """
    place = folder()
    _added_bytes[place] = _added_bytes.get(place, MOST_BYTES) + size_bytes
    if _added_bytes[place] * _LOOKS_EACH > MOST_BYTES:
        _make_room()
        _added_bytes[place] = 0


def _make_room() -> None:
    """Remove what was not used for longest until the rest is within MOST_BYTES."""
    entries = [(entry.stat(), entry.path) for entry in os.scandir(folder()) if entry.name.endswith(_SUFFIX)]
    total = sum(status.st_size for status, _ in entries)
    for status, path in sorted(entries, key=lambda entry: entry[0].st_mtime_ns):
        if total <= MOST_BYTES:
            return
        with suppress(FileNotFoundError):  # another process may make room at the same time
            os.unlink(path)
        total -= status.st_size


# ---- what a Trace depends on -------------------------------------------------------------------------------------


def _folders() -> Iterator[tuple[str, int]]:
    """Where Python looks for what is installed, each with when something last came there or went."""
    for path in dict.fromkeys(sys.path):
        with suppress(OSError):
            yield path or ".", os.stat(path or ".").st_mtime_ns


@functools.lru_cache(maxsize=8)
def _installed(folders: tuple[tuple[str, int], ...]) -> list[str] | None:
    """The names and versions of what is installed there; None where a library is whose version says nothing."""
    found = sorted(distribution for path, _ in folders for distribution in _distributions(path))
    return None if any(_in_flux(each) for each in found) else [each.name for each in found]


def _distributions(path: str) -> Iterator[Path]:
    """The folders that describe what is installed; their names hold name and version."""
    with suppress(OSError):
        yield from (Path(entry.path) for entry in os.scandir(path) if entry.name.endswith(".dist-info"))


def _in_flux(distribution: Path) -> bool:
    """Whether this is a library that decides allocations, installed from a folder in which it may change."""
    if not distribution.name.startswith(_IN_FLUX):
        return False
    try:
        said = json.loads((distribution / "direct_url.json").read_text(encoding="utf-8"))
        return bool(said["dir_info"].get("editable"))
    except (OSError, ValueError, KeyError):
        return False


def _torch_builds(version: str | None, folders: tuple[tuple[str, int], ...]) -> list[str]:
    """What the torch that is installed, and the fetched one that may run in its place, say of their build."""
    there, installed = _installed_torch(folders)
    wanted = version or installed
    places = [there, place(wanted, sys.version_info[:2]) / "torch" if wanted else None]
    said = []
    for folder in filter(None, places):
        with suppress(OSError):
            said.append((folder / "version.py").read_text(encoding="utf-8"))
    return said


@functools.lru_cache(maxsize=8)
def _installed_torch(folders: tuple[tuple[str, int], ...]) -> tuple[Path | None, str | None]:
    """Where torch is installed, and which version, as long as nothing came or went in these folders."""
    spec = importlib.util.find_spec("torch")
    there = Path(spec.origin).parent if spec is not None and spec.origin else None
    try:
        return there, importlib.metadata.version("torch").split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return there, None


@functools.cache
def _own_content() -> str:
    """One hash of tonnage's code and its ghost's libraries."""
    package = Path(__file__).parents[1]
    return _hash(path for pattern in ("**/*.py", "ghost/lib/*/*.so*") for path in sorted(package.glob(pattern)))


def _hash(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
