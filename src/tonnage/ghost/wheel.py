"""Finds a CUDA build of torch for a Python, or fetches only its wheel (without the `nvidia-*` packages) once.

The ghost replaces NVIDIA's libraries, so torch's wheel and Triton's are enough: 0.7 GB, 1.8 GB unpacked (torch
2.13).  `pip download --no-deps 'torch===X'` ignores local builds such as X+cpu; pip checks the hash.  Wheels are
unpacked into the cache (`tonnage.ghost.cache_folder`), never into the user's environment.
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
from tonnage.ghost.cache_folder import cache_folder, check_executed, make_private
from tonnage.ghost.download import download
from tonnage.ghost.scratch import scratch

Progress = Callable[[str], None]

OLDEST = (2, 8)
"""Oldest version of torch that is tested (docs/reference/versions.md)."""

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
    """Version in its metadata, without the local part."""
    cuda_major: int
    """12 or 13: the set of the ghost's libraries that it needs."""
    path: Path | None
    """Folder to put on PYTHONPATH; None if the environment's own torch is the CUDA build."""
    python: str
    """Interpreter that it belongs to."""


def find(python: str, version: str | None = None, progress: Progress = lambda text: None) -> Torch:
    """Return the CUDA torch for this interpreter: its own, a cached one, or one fetched now.

    `version` is a version other than the installed one.  Raises GhostUnavailable.
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
    check_executed(folder)
    cuda_major = _cuda_major(folder / "torch")
    if cuda_major is None:
        _fetch(python, wanted, folder, progress)
        cuda_major = _cuda_major(folder / "torch")
    if cuda_major is None:
        raise GhostUnavailable(f"torch {wanted} from the package index is not a CUDA build for Linux x86-64.")
    return Torch(version=wanted, cuda_major=cuda_major, path=folder, python=python)


def find_in_folder(folder: Path, python: str) -> Torch:
    """Return the CUDA torch in a folder (`pip install --no-deps --target FOLDER torch==2.5.1`), of any age.

    A version older than the oldest that is tested may fail on a ghost.  Raises GhostUnavailable.
    """
    cuda_major = _cuda_major(folder / "torch")
    if cuda_major is None:
        raise GhostUnavailable(f"{folder} holds no CUDA build of torch.")
    source = (folder / "torch" / "version.py").read_text(encoding="utf-8")
    version = re.search(r"^__version__\b[^=]*=\s*'([^'+]+)", source, re.MULTILINE)
    return Torch(version=version[1] if version else "", cuda_major=cuda_major, path=folder, python=python)


def place(version: str, python: Sequence[int]) -> Path:
    """Return the folder in which the wheel of this torch for this Python (3, 11) is unpacked."""
    return cache_folder() / f"torch-{version}-cp{''.join(str(number) for number in python)}"


def _inspect(python: str) -> dict[str, Any]:
    try:
        done = subprocess.run(
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
        return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]
    except (ValueError, IndexError) as error:
        reason = next(iter(done.stderr.split("\n")), "").strip() or f"exit code {done.returncode}"
        raise GhostUnavailable(f"{python} does not run as a Python interpreter ({reason}).") from error


def _apart() -> dict[str, str]:
    """Return the environment of a Python that imports nothing from the folder that it is started in."""
    return {**os.environ, "PYTHONSAFEPATH": "1"}


def _cuda_major(torch: Path) -> int | None:
    """Return the major CUDA version of an unpacked torch; None if it is a CPU build or missing."""
    if not (torch / "lib" / "libtorch_cuda.so").exists():
        return None
    try:
        text = (torch / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=]*=\s*'(\d+)", text, re.MULTILINE)
    return int(match[1]) if match else None


def _fetch(python: str, version: str, folder: Path, progress: Progress) -> None:
    """Download and unpack torch and its triton, and rename them to `folder`, unless another process was faster."""
    with contextlib.ExitStack() as stack:
        try:
            make_private(folder.parent)
            stack.enter_context(_alone_in(folder.parent, progress))
            if folder.exists():  # another process has fetched it
                return
            partial = stack.enter_context(scratch("fetching-", folder.parent))
        except OSError as error:
            raise GhostUnavailable(
                f"The CUDA build of torch {version} is needed, and it cannot be stored in {folder.parent} "
                f"({error.strerror}); set TONNAGE_CACHE to another folder."
            ) from error
        try:
            _fill(python, version, partial, progress)
            _move(partial / "unpacked", folder)
        except OSError as error:
            raise GhostUnavailable(
                f"The CUDA build of torch {version} could not be stored in {folder} ({error})."
            ) from error


@contextlib.contextmanager
def _alone_in(cache: Path, progress: Progress) -> Iterator[None]:
    """Lock the cache: otherwise each worker of a search would fetch all of it.  Raises OSError."""
    import fcntl  # not every system has it, and on none without it a ghost runs

    lock = os.open(cache, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for the CUDA build of torch, which another process is fetching")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks: at worst it is fetched twice
        yield
    finally:
        os.close(lock)


def _fill(python: str, version: str, partial: Path, progress: Progress) -> None:
    """Put torch and its triton, compiled, into the folder `find_in_folder` of `place`."""
    sizes = "about 0.7 GB with triton, 1.8 GB unpacked; once"
    progress(f"fetching the CUDA build of torch {version} ({sizes}) into {partial.parent}")
    unpacked = partial / "unpacked"
    unpacked.mkdir(mode=0o700)
    _unpack(_download(python, f"torch==={version}", partial, progress), unpacked)
    triton = _required_triton(unpacked)
    if triton is not None:
        progress(f"fetching {triton}")
        _unpack(_download(python, triton, partial, progress), unpacked)
    progress("compiling its Python files")
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


def _offered(errors: str, most: int = 8) -> str:
    """Return the newest versions on the index as pip's errors list them; empty if pip could not reach it."""
    listed = re.search(r"\(from versions: ([^)]*)\)", errors)
    return "" if listed is None or listed[1] == "none" else ", ".join(listed[1].split(", ")[-most:])


def _unpack(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    for program in ("ptxas", "ptxas-blackwell", "cuobjdump", "nvdisasm"):
        for path in folder.glob(f"triton/backends/nvidia/bin/{program}"):
            path.chmod(0o755)
    wheel.unlink()


def _compile(python: str, folder: Path) -> None:
    """Write the bytecode, as pip does when it installs.

    Otherwise each ghost would spend several seconds on compiling its imports where PYTHONDONTWRITEBYTECODE is set (as
    in many containers) or the cache is read-only.  Files that do not compile (templates) stay as they are.
    """
    command = [python, "-m", "compileall", "-q", "-j", "0", str(folder)]
    subprocess.run(command, capture_output=True, check=False, env=_apart())


def _required_triton(folder: Path) -> str | None:
    """Return the requirement of triton (`triton==X` or `triton~=X`) in this torch's metadata; None if it has none."""
    for metadata in folder.glob("torch-*.dist-info/METADATA"):
        text = metadata.read_text(encoding="utf-8")
        match = re.search(r"^Requires-Dist: triton\s*\(?([=~<>!][^\s;)]*)", text, re.MULTILINE)
        return f"triton{match[1]}" if match else None
    return None
