"""Finds a CUDA build of torch for a Python, or fetches the wheel alone (without its `nvidia-*` packages) once.

The ghost stands in for NVIDIA's libraries, so the 0.5 GB wheel is enough.  `pip download --no-deps 'torch===X'`
passes over local builds such as X+cpu; pip checks the hash.  Wheels are unpacked into a private cache
(`$TONNAGE_CACHE`, else `$XDG_CACHE_HOME/tonnage`, else `~/.cache/tonnage`), never into the user's environment.
"""

import contextlib
import errno
import json
import os
import re
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tonnage.errors import GhostUnavailable
from tonnage.ghost.download import download
from tonnage.ghost.scratch import scratch

Progress = Callable[[str], None]

OLDEST = (2, 8)
"""The oldest torch that is tried (docs/reference/versions.md)."""

_INSPECT = """
import importlib.metadata as m, importlib.util as u, json, sys, os
spec = u.find_spec("torch")
where = os.path.dirname(spec.origin) if spec and spec.origin else None
try: version = m.version("torch")
except m.PackageNotFoundError: version = None
print(json.dumps({"folder": where, "version": version, "python": list(sys.version_info[:2])}))
"""


@dataclass(frozen=True, kw_only=True)
class Torch:
    """A CUDA build of torch that a ghost process can use."""

    version: str
    """As its metadata says, without the local part."""
    cuda_major: int
    """12 or 13: which of the ghost's library sets it needs."""
    path: Path | None
    """Folder to put on PYTHONPATH; None when the environment's own torch is the CUDA build."""
    python: str
    """The interpreter it belongs to."""


def find(python: str, version: str | None = None, progress: Progress = lambda text: None) -> Torch:
    """The CUDA torch for this interpreter: its own, a cached one, or one fetched now.

    `version` asks for another version than the installed one.  Raises GhostUnavailable.
    """
    facts = _inspect(python)
    installed = str(facts["version"]).split("+")[0] if facts["version"] else None
    wanted = version or installed
    if wanted is None:
        raise GhostUnavailable(f"{python} has no torch; install it there, or name a version with --torch.")
    if not re.fullmatch(r"[0-9]+(\.[0-9]+){1,2}[A-Za-z0-9.]*", wanted):
        raise GhostUnavailable(f"{wanted!r} is not a version of torch such as 2.13.0.")
    if tuple(int(number) for number in re.findall(r"[0-9]+", wanted)[:2]) < OLDEST:
        oldest = ".".join(str(number) for number in OLDEST)
        raise GhostUnavailable(
            f"torch {wanted} is too old for a ghost, which needs {oldest} or newer; choose another."
        )
    if wanted == installed and facts["folder"]:
        own = _cuda_major(Path(str(facts["folder"])))
        if own is not None:
            return Torch(version=wanted, cuda_major=own, path=None, python=python)
    folder = place(wanted, facts["python"])
    cuda_major = _cuda_major(folder / "torch")
    if cuda_major is None:
        _fetch(python, wanted, folder, progress)
        cuda_major = _cuda_major(folder / "torch")
    if cuda_major is None:
        raise GhostUnavailable(f"torch {wanted} from the package index is not a CUDA build for Linux x86-64.")
    return Torch(version=wanted, cuda_major=cuda_major, path=folder, python=python)


def unpacked(folder: Path, python: str) -> Torch:
    """The CUDA torch in a folder (`pip install --no-deps --target FOLDER torch==2.5.1`), of any age: whether one that
    is older than the oldest that is tried does on a ghost what it is run for, only running it says.

    Raises GhostUnavailable.
    """
    cuda_major = _cuda_major(folder / "torch")
    if cuda_major is None:
        raise GhostUnavailable(f"{folder} holds no CUDA build of torch.")
    said = (folder / "torch" / "version.py").read_text(encoding="utf-8")
    version = re.search(r"^__version__\b[^=]*=\s*'([^'+]+)", said, re.MULTILINE)
    return Torch(version=version[1] if version else "", cuda_major=cuda_major, path=folder, python=python)


def place(version: str, python: Sequence[int]) -> Path:
    """Where the wheel of this torch for this Python (3, 11) is unpacked."""
    return cache_folder() / f"torch-{version}-cp{''.join(str(number) for number in python)}"


def cache_folder() -> Path:
    """Where fetched wheels are unpacked, and traces kept."""
    if named := os.environ.get("TONNAGE_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tonnage"


def _inspect(python: str) -> dict[str, Any]:
    try:
        found = subprocess.run(
            [python, "-c", _INSPECT],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tempfile.gettempdir(),
            env=_apart(),
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise GhostUnavailable(f"{python} does not run as a Python interpreter ({error}).") from error
    try:
        return json.loads(found.stdout.splitlines()[-1])  # type: ignore[no-any-return]
    except (ValueError, IndexError) as error:
        said = next(iter(found.stderr.split("\n")), "").strip() or f"exit code {found.returncode}"
        raise GhostUnavailable(f"{python} does not run as a Python interpreter ({said}).") from error


def _apart() -> dict[str, str]:
    """The environment of a Python in which no file of the folder that it is started in stands in for a library."""
    return {**os.environ, "PYTHONSAFEPATH": "1"}


def _cuda_major(torch: Path) -> int | None:
    """CUDA's major version of an unpacked torch; None when it is a CPU build or not there."""
    if not (torch / "lib" / "libtorch_cuda.so").exists():
        return None
    try:
        text = (torch / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=]*=\s*'(\d+)", text, re.MULTILINE)
    return int(match[1]) if match else None


def _fetch(python: str, version: str, folder: Path, progress: Progress) -> None:
    """Download torch and its triton beside, unpack, and rename into place, unless somebody has meanwhile."""
    with contextlib.ExitStack() as stack:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_alone_in(folder.parent, progress))
            if folder.exists():  # whoever was there before has fetched it
                return
            place = stack.enter_context(scratch("fetching-", folder.parent))
        except OSError as error:
            raise GhostUnavailable(
                f"The CUDA build of torch {version} is needed, and {folder.parent} is no folder that it can be put "
                f"into ({error.strerror}); set TONNAGE_CACHE to one."
            ) from error
        try:
            _fill(python, version, place, progress)
            _move(place / "unpacked", folder)
        except OSError as error:
            raise GhostUnavailable(
                f"The CUDA build of torch {version} could not be stored in {folder} ({error})."
            ) from error


@contextlib.contextmanager
def _alone_in(cache: Path, progress: Progress) -> Iterator[None]:
    """Nobody else fetches meanwhile: the workers of a search would each fetch half a gigabyte.  Raises OSError."""
    import fcntl  # not every system has it, and on none without it a ghost runs

    place = os.open(cache, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for the CUDA build of torch, which another process is fetching")
            fcntl.flock(place, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system that locks nothing: it is fetched twice at worst
        yield
    finally:
        os.close(place)


def _fill(python: str, version: str, place: Path, progress: Progress) -> None:
    """Torch and its triton, compiled, in the folder `unpacked` of this one."""
    progress(f"fetching the CUDA build of torch {version} (about 0.5 GB, once) into {place.parent}")
    unpacked = place / "unpacked"
    _unpack(_download(python, f"torch==={version}", place, progress), unpacked)
    triton = _required_triton(unpacked)
    if triton is not None:
        progress(f"fetching {triton}")
        _unpack(_download(python, triton, place, progress), unpacked)
    progress("compiling it")
    _compile(python, unpacked)


def _move(unpacked: Path, folder: Path) -> None:
    try:
        unpacked.rename(folder)
    except OSError:
        if not folder.exists():  # another process may have finished first, which is as good
            raise


def _download(python: str, requirement: str, folder: Path, progress: Progress) -> Path:
    target = folder / re.sub(r"[^A-Za-z0-9]+", "-", requirement)
    command = [python, "-m", "pip", "download", "--progress-bar", "off", "--no-deps", "--only-binary=:all:"]
    done = download(
        [*command, "-d", str(target), requirement],
        _apart(),
        folder,
        lambda bar: progress(f"fetching {requirement}  {bar}"),
    )
    wheels = sorted(target.glob("*.whl")) if target.exists() else []
    if done.returncode != 0 or not wheels:
        if offered := _offered(done.stderr):
            raise GhostUnavailable(
                f"The package index has no {requirement} for this Python on Linux x86-64; its newest are {offered}. "
                "Choose one with --torch."
            )
        if os.strerror(errno.ENOSPC) in done.stderr:
            raise GhostUnavailable(
                f"No space is left to fetch {requirement} into {folder}; free about 3 GB, or set TONNAGE_CACHE "
                "and TMPDIR (for pip's own files) to folders elsewhere."
            )
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        reason = lines[-1] if lines else "no wheel came"
        raise GhostUnavailable(
            f"The CUDA build of torch is needed and not cached, and pip could not fetch {requirement} ({reason}). "
            f"Connect once, or set TONNAGE_CACHE to a folder that holds it."
        )
    return wheels[0]


def _offered(said: str, most: int = 8) -> str:
    """The newest versions that the index has, where pip tells them; empty when it could not ask."""
    told = re.search(r"\(from versions: ([^)]*)\)", said)
    return "" if told is None or told[1] == "none" else ", ".join(told[1].split(", ")[-most:])


def _unpack(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    for program in ("ptxas", "ptxas-blackwell", "cuobjdump", "nvdisasm"):
        for path in folder.glob(f"triton/backends/nvidia/bin/{program}"):
            path.chmod(0o755)
    wheel.unlink()


def _compile(python: str, folder: Path) -> None:
    """Write the bytecode, as pip does when it installs.

    Else each ghost would compile what it imports, several seconds long, where PYTHONDONTWRITEBYTECODE is set (as in
    many containers) or the cache may only be read.  What does not compile (templates) stays as it is.
    """
    command = [python, "-m", "compileall", "-q", "-j", "0", str(folder)]
    subprocess.run(command, capture_output=True, check=False, env=_apart())


def _required_triton(folder: Path) -> str | None:
    """`triton==X` or `triton~=X` as this torch's metadata asks for it on Linux; None if it asks for none."""
    for metadata in folder.glob("torch-*.dist-info/METADATA"):
        said = metadata.read_text(encoding="utf-8")
        match = re.search(r"^Requires-Dist: triton\s*\(?([=~<>!][^\s;)]*)", said, re.MULTILINE)
        return f"triton{match[1]}" if match else None
    return None
