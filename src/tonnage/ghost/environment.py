"""The environment of a ghost process: our libraries in place of NVIDIA's, the card's facts, and the watch.

Nothing here changes the calling process: the ghost lives only in children started with this environment.
"""

import os
import platform
import shlex
import shutil
import stat
import sys
import tempfile
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tonnage.errors import GhostUnavailable, UsageError
from tonnage.ghost.cache_folder import cache_folder, check_executed, make_private
from tonnage.ghost.wheel import Torch, find

INSIDE = Path(__file__).parent / "inside"
"""Folder of sitecustomize and tonnage_inside, first on PYTHONPATH."""

RECORDER = Path(__file__).parents[1] / "recorder"
"""Folder of tonnage_recorder, on PYTHONPATH of every process that is recorded."""

PATH = os.pathsep.join((str(INSIDE), str(RECORDER)))
"""First entries on PYTHONPATH of every ghost process."""

CUDA_MAJORS = (12, 13)
"""Major versions of CUDA for which there are libraries."""

NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"
"""Variable that turns off torch's caching allocator, so that there is no record of what torch allocates."""

_SEARCHED = ("CUDNN_HOME", "NVRTC_HOME", "CURAND_HOME")
"""Variables with the folders in which Transformer Engine looks for libraries by names without versions."""

_FEW_FAULTS = "glibc.malloc.hugetlb=1:glibc.malloc.top_pad=67108864"
"""Setting by which the C library takes memory in huge pages; without it, a fork spends a tenth of its time on
thousands of page faults."""

_BUILT = Path(__file__).parent / "lib"


def libraries(cuda_major: int) -> Path:
    """Return the folder of the ghost's libraries for this CUDA.  Raises GhostUnavailable."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise GhostUnavailable(
            f"A ghost GPU needs Linux on x86-64; this is {platform.system()} on {platform.machine()}. "
            "Run tonnage in a Linux container or machine, or use `tonnage estimate MODEL --source meta` here."
        )
    folder = _BUILT / f"cuda{cuda_major}"
    if not (folder / "libghost.so").exists():
        raise GhostUnavailable(
            f"The ghost's libraries for CUDA {cuda_major} are not built. "
            "Install a C compiler and run: python -m tonnage.ghost.native.build"
        )
    return folder


def any_libraries() -> None:
    """Raise GhostUnavailable if no ghost can run here with any CUDA, before a build of torch is fetched."""
    libraries(next((major for major in CUDA_MAJORS if (_BUILT / f"cuda{major}").exists()), CUDA_MAJORS[-1]))


def environment(
    *,
    torch: Torch | None = None,
    inherit: Mapping[str, str] | None = None,
    watch_into: Path | None = None,
    steps: int | None = 3,
    devices: int = 1,
    **settings: str | int,
) -> dict[str, str]:
    """Return the environment for a child in which torch sees ghost cards.

    `settings` are the GHOST_* variables in lower case (`total_bytes`, `capability`, `sms`, ...);
    `watch_into` is a folder into which each process that trains writes its trace after `steps` optimizer steps (None:
    at its end).
    Raises GhostUnavailable.
    """
    torch = torch or find(sys.executable)
    variables = dict(os.environ if inherit is None else inherit)
    folder = libraries(torch.cuda_major)
    preload = [str(path) for path in sorted(folder.iterdir()) if ".so" in path.name]
    paths = [PATH]
    if torch.path is not None:
        paths.append(str(torch.path))
    variables["LD_PRELOAD"] = ":".join([*preload, *filter(None, [variables.get("LD_PRELOAD")])])
    variables["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [variables.get("PYTHONPATH")])])
    variables["GHOST_PYTHONPATH"] = os.pathsep.join(paths)
    variables["TRITON_LIBCUDA_PATH"] = str(folder)
    variables |= dict.fromkeys(_SEARCHED, str(folder))
    variables |= _kernel_caches()
    variables["GHOST_DEVICES"] = str(devices)
    variables["GHOST_SHM"] = f"tonnage-{uuid.uuid4().hex[:12]}"
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING"):
        variables.pop(name, None)
    for name, value in settings.items():
        variables[f"GHOST_{name.upper()}"] = str(value)
    if watch_into is not None:
        variables["TONNAGE_OUT"] = str(watch_into)
        variables["TONNAGE_STEPS"] = "all" if steps is None else str(steps)
        variables["TONNAGE_SOURCE"] = "ghost"
    return variables


def forking(torch: Torch | None = None) -> dict[str, str]:
    """Return the environment for a child that imports libraries once and forks for each job.

    Raises GhostUnavailable.
    """
    variables = environment(torch=torch)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", NO_CACHING):
        variables.pop(name, None)  # each job says which allocator it wants
    for name in [name for name, value in variables.items() if name.startswith("XDG_") and not os.path.isabs(value)]:
        variables.pop(name)  # torch loads extensions below XDG_CACHE_HOME, and a relative one is to be ignored
    variables.pop("PYTHONOPTIMIZE", None)  # transformers cannot be imported without its docstrings
    # Else torch.cuda.is_available(), which transformers 5.0 asks while it is imported, makes forks useless.
    variables["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    variables["OMP_NUM_THREADS"] = "1"  # several would wait for one another, busily, to cast a few adapters
    variables["GLIBC_TUNABLES"] = ":".join(filter(None, (_FEW_FAULTS, variables.get("GLIBC_TUNABLES"))))
    return variables


def _kernel_caches() -> dict[str, str]:
    """Return the variables for the folders of compiled kernels, apart from those of real cards.

    A real card must not load a ghost's kernels: NVRTC's are empty here, and Inductor, Triton and vLLM's autotuner
    choose among theirs without having measured them.
    """
    folder = cache_folder() / "compiled"
    with suppress(OSError):
        make_private(folder)
        check_executed(folder)
        folder.chmod(0o700)  # one of an earlier version, so that the check need not look into it again
    if not os.access(folder, os.W_OK):
        folder = Path(tempfile.gettempdir()) / f"tonnage-compiled-{os.getuid()}"
        if not _is_own(folder):  # what lies there is loaded
            folder = Path(tempfile.mkdtemp(prefix="tonnage-compiled-"))
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "USE_PYTORCH_KERNEL_CACHE": "0",
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
    }


def _is_own(folder: Path) -> bool:
    """Create a folder for this user alone if it is missing; return whether it is: another user may have made it."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def programs(folder: Path) -> Path:
    """Create in `folder`, and return, a folder for the front of PATH with the `nvidia-smi` of a ghost's machine."""
    program_folder = folder / "bin"
    program_folder.mkdir()
    program = program_folder / "nvidia-smi"
    words = [sys.executable, "-S", str(INSIDE / "tonnage_inside" / "smi.py")]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o755)
    return program_folder


def interpreter(command: list[str]) -> str:
    """Return the path of the Python that a command line runs under: the command, or what a console script names.

    Raises UsageError if the command is not found, and GhostUnavailable if there is no Python.
    """
    program = shutil.which(command[0])
    if program is None and Path(command[0]).is_file():
        raise UsageError(
            f"{command[0]} is a file that cannot be run by itself; write its interpreter too: python {command[0]}"
        )
    if program is None:
        raise UsageError(f"The command {command[0]!r} is not found on PATH.{_instead(command)}")
    if Path(program).name.startswith("python"):
        return os.path.abspath(program)  # it is also started in another folder
    named = _shebang(Path(program))
    if named is not None and Path(named).name.startswith("python") and Path(named).exists():
        return named
    later = (
        shutil.which(word) for word in command[1:] if Path(word).name.startswith("python")
    )  # env A=1 python x.py
    fallback = next(filter(None, later), None) or shutil.which("python3") or shutil.which("python")
    if fallback is None:
        raise GhostUnavailable("No python3 is found on PATH.")
    return os.path.abspath(fallback)


def _instead(command: list[str]) -> str:
    """Return a hint at what was probably meant by a first word that is no program; "" if there is none."""
    first, _, rest = command[0].strip().partition(" ")
    if rest and shutil.which(first):
        return f" Give its words without quotes around them: {command[0]}"
    if first.partition("=")[0].isidentifier() and "=" in first:
        return f" Variables are set by env: env {' '.join(command)}"
    return ""


def _shebang(script: Path) -> str | None:
    """Return the interpreter in a script's first line, or in the two-line form that pip writes for long paths."""
    try:
        with script.open("rb") as file:
            head = file.read(1024).decode(errors="replace").splitlines()
    except OSError:
        return None
    if not head or not head[0].startswith("#!"):
        return None
    words = head[0][2:].split()
    if words and words[0].endswith("/env") and len(words) > 1:
        return shutil.which(words[1])
    if words and words[0] == "/bin/sh" and len(head) > 1 and "exec" in head[1]:
        quoted = [word.strip("'\"") for word in head[1].split() if "python" in word]
        return quoted[0] if quoted else None
    return words[0] if words else None
