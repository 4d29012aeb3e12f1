"""The cache of Traces: earlier runs, reused when the same case is run again.

A Trace is found by all that it depends on: the configuration's content (not its name), job, plan, rank and ranks, the
GPU as the ghost reports it, the installed distributions, torch's build, Python, the environment variables that
libraries read, and the content of tonnage and its ghost.  What cannot be told apart in this way is not cached: a
factory's code, a library installed from a folder in which it may change.

There is one archive for each Trace, in the format of `tonnage.trace.trace`: reading executes nothing, a damaged one
counts as absent.  The archives are in `traces` of the cache folder; when they exceed MOST_BYTES, the least recently
used are removed.  The file `limit` beside that folder may state other bytes (`tonnage cache limit`).
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
from tonnage.files import open_replacing, write_text
from tonnage.ghost.cache_folder import cache_folder, check_private, make_private
from tonnage.ghost.wheel import place
from tonnage.trace import trace as traces
from tonnage.trace.trace import Trace

MOST_BYTES: Final = 2 * 2**30
"""Most bytes of all cached Traces: some hundred of 8B models, fifty of 405B."""

_CHECKS_PER_CAPACITY: Final = 50
"""A process checks the cache's size after each 1 / so many of MOST_BYTES that it adds."""

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
"""Libraries whose code decides allocations; the version of an editable installation identifies no code."""
_ENVIRONMENT_PREFIXES: Final = (
    *("ACCELERATE_", "BNB_", "CUBLAS", "CUDA", "CUDNN", "DS_", "GHOST_", "HF_", "LD_", "NCCL_", "NVIDIA_"),
    *("PYTHON", "PYTORCH_", "TORCH", "TRANSFORMERS_", "TRITON_", "USE_"),
)
"""Prefixes of environment variables that change what a program allocates, or which code it runs."""
_FOLDER_VARIABLES: Final = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Variables that name folders of compiled kernels; torch sets the first one itself when it is imported."""
_IGNORED_FIELDS: Final = ("_name_or_path", "transformers_version")
"""Configuration fields that do not affect the network."""


def key(request: Mapping[str, Any], torch_version: str | None = None) -> str | None:
    """Return the cache key of a worker's request; None if an equal key would not guarantee an equal Trace.

    `request` is the result of `tonnage.workers.worker.request`, `torch_version` the requested version, if any.
    """
    model = request["job"]["model"]
    folders = tuple(_search_paths())
    installed = _installed_distributions(folders)
    if model["kind"] != "config" or installed is None:
        return None
    structure = {name: value for name, value in model["config"].items() if name not in _IGNORED_FIELDS}
    document = {
        "request": {**request, "job": {**request["job"], "model": structure}},
        "python": [sys.version, platform.machine()],
        "distributions": installed,
        "torch": [torch_version, *_torch_builds(torch_version, folders)],
        "environment": {
            name: value
            for name, value in os.environ.items()
            if name.startswith(_ENVIRONMENT_PREFIXES) and name not in _FOLDER_VARIABLES
        },
        "tonnage": _own_content(),
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def find(key: str) -> Trace | None:
    """Return the Trace cached under a key; None if there is none that can be read.

    Raises GhostUnavailable if others can write into the cache.
    """
    path = _path(key)
    check_private(path.parent)
    try:
        trace = traces.load(path)
        now = time.time_ns()  # the kernel's clock for files ticks in milliseconds, and two times would be equal
        os.utime(path, ns=(now, now))  # most recently used
    except (UnreadableFile, OSError):
        return None
    return trace


def keep(key: str, trace: Trace, file: Path | None = None) -> None:
    """Cache a Trace, replacing an older one; if nothing can be written, nothing is cached.

    If it is already in a `file` that nothing else needs, that file is moved here, if it is on the same disk.
    """
    path = _path(key)
    with suppress(OSError, UnwritableFile):
        make_private(path.parent)
        if file is None or not _try_to_move(file, path):
            with open_replacing(path) as new, zipfile.ZipFile(new, "w") as archive:
                traces.write(trace, archive)
        _make_room_for(path.stat().st_size)


def _try_to_move(file: Path, path: Path) -> bool:
    try:
        file.replace(path)
    except OSError:
        return False
    return True


def folder() -> Path:
    """Return the folder of the cached Traces."""
    return cache_folder() / "traces"


def limit_bytes() -> int:
    """Return the most bytes of all cached Traces: those that the user set, else MOST_BYTES."""
    try:
        return int(_limit_file().read_text(encoding="ascii"))
    except (OSError, ValueError):
        return MOST_BYTES


def set_limit(most_bytes: int) -> None:
    """Set the most bytes of all cached Traces, and remove what exceeds them.  Raises UnwritableFile."""
    try:
        make_private(_limit_file().parent)
    except OSError as error:
        raise UnwritableFile(f"{_limit_file().parent} cannot be made ({error.strerror}).") from error
    write_text(_limit_file(), f"{most_bytes}\n")
    if folder().is_dir():
        _make_room()


def _limit_file() -> Path:
    return cache_folder() / "limit"


def _path(key: str) -> Path:
    return folder() / f"{key}{_SUFFIX}"


_added_bytes: dict[Path, int] = {}
"""Bytes that this process has added to a folder since it last checked its size."""


def _make_room_for(size_bytes: int) -> None:
    """Check the folder's size when it may be exceeded: at first, and each time enough bytes were added.

    Listing thousands of files takes longer than writing a small Trace.
    """
    path, most = folder(), limit_bytes()
    _added_bytes[path] = _added_bytes.get(path, most) + size_bytes
    if _added_bytes[path] * _CHECKS_PER_CAPACITY > most:
        _make_room()
        _added_bytes[path] = 0


def _make_room() -> None:
    """Remove the least recently used Traces until the rest is within the limit."""
    entries = [(entry.stat(), entry.path) for entry in os.scandir(folder()) if entry.name.endswith(_SUFFIX)]
    total = sum(status.st_size for status, _ in entries)
    most = limit_bytes()
    for status, path in sorted(entries, key=lambda entry: entry[0].st_mtime_ns):
        if total <= most:
            return
        with suppress(FileNotFoundError):  # another process may make room at the same time
            os.unlink(path)
        total -= status.st_size


def _search_paths() -> Iterator[tuple[str, int]]:
    """Yield the folders where Python looks for packages, each with the time of its last change."""
    for path in dict.fromkeys(sys.path):
        with suppress(OSError):
            yield path or ".", os.stat(path or ".").st_mtime_ns


@functools.lru_cache(maxsize=8)
def _installed_distributions(folders: tuple[tuple[str, int], ...]) -> list[str] | None:
    """Return the names and versions of what is installed; None if a library's version does not identify its code."""
    distributions = sorted(distribution for path, _ in folders for distribution in _distributions(path))
    if any(_is_editable_library(distribution) for distribution in distributions):
        return None
    return [distribution.name for distribution in distributions]


def _distributions(path: str) -> Iterator[Path]:
    """Yield the folders that describe what is installed; their names hold name and version."""
    with suppress(OSError):
        yield from (Path(entry.path) for entry in os.scandir(path) if entry.name.endswith(".dist-info"))


def _is_editable_library(distribution: Path) -> bool:
    """Return True for a library that decides allocations, installed from a folder in which it may change."""
    if not distribution.name.startswith(_IN_FLUX):
        return False
    try:
        origin = json.loads((distribution / "direct_url.json").read_text(encoding="utf-8"))
        return bool(origin["dir_info"].get("editable"))
    except (OSError, ValueError, KeyError):
        return False


def _torch_builds(version: str | None, folders: tuple[tuple[str, int], ...]) -> list[str]:
    """Return the version files of the installed torch, and of the fetched one that may run instead."""
    installed_folder, installed = _installed_torch(folders)
    wanted = version or installed
    candidates = [installed_folder, place(wanted, sys.version_info[:2]) / "torch" if wanted else None]
    builds = []
    for folder in filter(None, candidates):
        with suppress(OSError):
            builds.append((folder / "version.py").read_text(encoding="utf-8"))
    return builds


@functools.lru_cache(maxsize=8)
def _installed_torch(folders: tuple[tuple[str, int], ...]) -> tuple[Path | None, str | None]:
    """Return folder and version of the installed torch, cached until something in these folders changes."""
    spec = importlib.util.find_spec("torch")
    torch_folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    try:
        return torch_folder, importlib.metadata.version("torch").split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return torch_folder, None


@functools.cache
def _own_content() -> str:
    """Return one hash of tonnage's code, the tables that decide what is run, and its ghost's libraries."""
    package = Path(__file__).parents[1]
    patterns = ("**/*.py", "catalog/families.toml", "meta/*.json", "ghost/lib/*/*.so*")
    return _hash(path for pattern in patterns for path in sorted(package.glob(pattern)))


def _hash(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
