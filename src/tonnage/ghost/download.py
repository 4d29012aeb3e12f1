"""`pip download` with a progress bar, read off the size of pip's temporary files."""

import contextlib
import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

_LOOK_SECONDS: Final = 0.1
_CELLS: Final = 20
_MB: Final = 10**6
_UNITS: Final = {"B": 1, "kB": 10**3, "MB": _MB, "GB": 10**9}

_SIZE: Final = re.compile(r"Downloading \S+ \(([\d.]+) (B|kB|MB|GB)\)")
"""The line with which pip announces a download and its size."""


def download(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, say: Callable[[str], None]
) -> "subprocess.CompletedProcess[str]":
    """Run pip with its files in `folder`, and call `say` at each twentieth of the download.  Raises OSError."""
    kept = folder / "pip"
    kept.mkdir(exist_ok=True)
    totals: list[float] = []
    with (kept / "errors").open("w+") as errors:
        with subprocess.Popen(
            command,
            env={**environment, "TMPDIR": str(kept), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process:
            assert process.stdout is not None
            reader = threading.Thread(target=_hear, args=(process.stdout, totals), daemon=True)
            reader.start()
            try:
                most = -1
                while process.poll() is None:
                    cells = _cells(_held_bytes(kept), totals[-1]) if totals else -1
                    if cells > most:  # in the end pip moves what it has
                        most = cells
                        say(_bar(cells, totals[-1]))
                    time.sleep(_LOOK_SECONDS)
            except BaseException:
                process.kill()
                raise
            reader.join()
        errors.seek(0)
        return subprocess.CompletedProcess(list(command), process.returncode, "", errors.read())


def _cells(done_bytes: float, total_bytes: float) -> int:
    return min(int(_CELLS * done_bytes / total_bytes), _CELLS) if total_bytes else _CELLS


def _bar(cells: int, total_bytes: float) -> str:
    """Return a bar such as `████████············  210 of 526 MB`, with the bytes of its full cells."""
    done = total_bytes * cells / _CELLS
    return f"{'█' * cells}{'·' * (_CELLS - cells)}  {done / _MB:.0f} of {total_bytes / _MB:.0f} MB"


def _hear(lines: IO[str], totals: list[float]) -> None:
    """Add the size of each file that pip begins to fetch to `totals`."""
    for line in lines:
        if size := _SIZE.search(line):
            totals.append(float(size[1]) * _UNITS[size[2]])


def _held_bytes(folder: Path) -> int:
    held = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves its files
            held += path.stat().st_size if path.is_file() else 0
    return held
