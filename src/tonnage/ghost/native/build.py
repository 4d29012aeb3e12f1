"""Build the ghost's libraries with the machine's C compiler; standard library only.

    python -m tonnage.ghost.native.build [--strict] [--force] [FOLDER]

For each major CUDA version a folder `cuda12`, `cuda13` gets `libghost.so`, which has every function that we
implement, and one thin library for each of NVIDIA's, with its name, its symbol version, and a generated stub for
each public function that libghost.so lacks.  A folder whose inputs have not changed is left alone.
"""

from __future__ import annotations

import argparse
import ctypes
import fnmatch
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
MAJORS = (12, 13)
PARTS = tuple(
    f"libcudnn_{part}.so.9"
    for part in ("adv", "cnn", "engines_precompiled", "engines_runtime_compiled", "graph", "heuristic", "ops")
)  # cuDNN's parts, by which extensions (Transformer Engine) load it; all its functions are in libcudnn.so.9's list
STAMP = "stamp"  # file with the hash of what a folder was built from
# unused parameters are the public signatures' own
FLAGS = ["-std=gnu11", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter"]
STUB_FLAGS = ["-std=gnu11", "-O0", "-fPIC", "-fno-builtin", "-w"]
PER_THREAD = re.compile(r"_(ptsz|ptds)$")  # variants for the per-thread default stream, here the same


class BuildError(Exception):
    """The libraries cannot be built here; the message gives the reason."""


@dataclass(frozen=True, kw_only=True)
class Library:
    """One of NVIDIA's libraries, as its symbol list describes it.

    name: file name and soname, such as `libcudart.so.13`.
    version: version of its symbols, empty if they have none.
    notes: results that each public function hands out (notation in collect.py).
    """

    name: str
    version: str
    notes: dict[str, str]


def default_folder() -> Path:
    return HERE.parent / "lib"


def supported() -> bool:
    """Return whether the libraries can run on this machine."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def compiler() -> list[str]:
    """Return the C compiler's command: $CC or cc.  Raises BuildError if there is none."""
    command = shlex.split(os.environ.get("CC", "cc"))
    if not command or shutil.which(command[0]) is None:
        raise BuildError(f"no C compiler: {' '.join(command) or 'CC'} not found; install gcc or set CC")
    return command


def read_library(path: Path) -> Library:
    version, notes = "", {}
    for line in path.read_text().splitlines():
        if line.startswith("# version "):
            version = line.split()[2]
        elif line and not line.startswith("#"):
            name, _, note = line.partition(" ")
            notes[name] = note
    return Library(name=path.name.removesuffix(".txt"), version=version, notes=notes)


def read_libraries(major: int) -> list[Library]:
    listed = [read_library(path) for path in sorted((HERE / "symbols" / f"cuda{major}").glob("*.txt"))]
    return listed + [Library(name=name, version="", notes={}) for name in PARTS]


def matcher(listing: str) -> Callable[[str], bool]:
    """Return a predicate for names in a list of patterns of `symbols/any`; patterns after ! exclude names."""
    lines = (HERE / "symbols" / "any" / listing).read_text().splitlines()
    patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    wanted = [re.compile(fnmatch.translate(p)) for p in patterns if not p.startswith("!")]
    refused = [re.compile(fnmatch.translate(p[1:])) for p in patterns if p.startswith("!")]
    return lambda name: any(p.match(name) for p in wanted) and not any(p.match(name) for p in refused)


def input_hash() -> str:
    """Return the hash of everything that a build depends on: sources, lists, this file, compiler command."""
    digest = hashlib.sha256(os.environ.get("CC", "cc").encode())
    for path in sorted(HERE.rglob("*")):
        if path.suffix in {".c", ".h", ".txt"} or path == Path(__file__).resolve():
            digest.update(str(path.relative_to(HERE)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed: {done.stderr.strip()[:4000]}")


def stub(name: str, note: str, before: str) -> str:
    """Return the C text of one stub: it runs `before`, hands out the results in its note, and returns success."""
    outs = re.findall(r"(p|i4|i8)@(\d+)", note)
    last = max((int(position) for _, position in outs), default=1)
    arguments = ", ".join(f"long a{i}" for i in range(1, last + 1))
    stores = {"p": "ghost_store8((void *)a{0}, (uint64_t)ghost_new_handle());"}
    stores |= {"i4": "ghost_store4((void *)a{0}, 0);", "i8": "ghost_store8((void *)a{0}, 0);"}
    body = [before, *(stores[kind].format(position) for kind, position in outs)]
    result = '(long)"not modelled by the ghost"' if "text" in note.split() else "0"
    return f"PUBLIC long {name}({arguments}) {{ {' '.join(body)} return {result}; }}\n"


def variable(name: str, note: str) -> str:
    """Return the C text of one of the library's variables, with the same size and all zero."""
    return f"PUBLIC char {name}[{note.removeprefix('data@')}] __attribute__((aligned(16)));\n"


def alias(name: str, target: str) -> str:
    """Return the C text of a second name for a function that libghost.so has."""
    return f'__asm__(".globl {name}\\n.type {name}, @function\\n{name}: jmp {target}@PLT\\n");\n'


def alias_target(name: str, own: set[str]) -> str | None:
    """Return the function of ours for which `name` is another name; None if there is none."""
    base = PER_THREAD.sub("", name)
    for candidate in (base, base.removeprefix("p") if base.startswith("pnccl") else base):
        if candidate != name and candidate in own:
            return candidate
    return None


def stub_source(library: Library, own: set[str]) -> str:
    """Return the generated C file of one thin library."""
    harmless, work = matcher("harmless.txt"), matcher("work.txt")
    data = {name: note for name, note in library.notes.items() if note.startswith("data@")}
    names = [name for name in library.notes if name not in own and name not in data]
    aliases = {name: target for name in names if (target := alias_target(name, own))}
    stubs = [name for name in names if name not in aliases]
    table = "".join(f'    "{name}",\n' for name in stubs)
    size = max(1, len(stubs))
    text = f"""/* generated by build.py from the symbol list of {library.name} */
#include <stddef.h>
#include <stdint.h>

#define PUBLIC __attribute__((visibility("default")))

extern void ghost_register_stubs(const char *, const char *const *, const uint64_t *, size_t);
extern void *ghost_new_handle(void);
extern void ghost_library_work(const char *, void *);
extern void ghost_store4(void *, uint32_t);
extern void ghost_store8(void *, uint64_t);

static uint64_t calls[{size}];
static const char *const names[{size}] = {{
{table}}};

__attribute__((constructor)) static void begin(void)
{{
    ghost_register_stubs("{library.name}", names, calls, {len(stubs)});
}}

"""
    for index, name in enumerate(stubs):
        before = f"calls[{index}]++;"  # reported as not modelled
        if work(name):
            before = f'ghost_library_work("{name}", (void *)a1);'
        elif harmless(name):
            before = ""
        text += stub(name, library.notes[name], before)
    text += "".join(variable(name, note) for name, note in data.items())
    return text + "".join(alias(name, target) for name, target in aliases.items())


def build_ghost(major: int, work: Path, strict: bool) -> Path:
    """Compile libghost.so."""
    target = work / "libghost.so"
    flags = [*FLAGS, f"-DGHOST_CUDA={major}", *(["-Werror"] if strict else [])]
    sources = [str(path) for path in sorted(HERE.glob("*.c"))]
    link = ["-shared", "-Wl,-soname,libghost.so", "-Wl,-z,defs", "-lpthread", "-ldl", "-lrt", "-lm"]
    run([*compiler(), *flags, "-o", str(target), *sources, *link])
    return target


def build_thin(library: Library, own: set[str], work: Path) -> Path:
    """Compile the thin library that replaces one of NVIDIA's."""
    source, script, target = work / f"{library.name}.c", work / f"{library.name}.map", work / library.name
    source.write_text(stub_source(library, own))
    link = ["-shared", f"-Wl,-soname,{library.name}", f"-L{work}", "-Wl,--no-as-needed", "-l:libghost.so"]
    link += ["-Wl,-rpath,$ORIGIN", "-Wl,--enable-new-dtags"]
    if library.version:
        script.write_text(f"{library.version} {{ global: *; }};\n")
        link.append(f"-Wl,--version-script={script}")
    run([*compiler(), *STUB_FLAGS, "-o", str(target), str(source), *link])
    return target


def list_implemented(ghost: Path, libraries: Iterable[Library]) -> set[str]:
    """Return the public functions that libghost.so has, as the dynamic linker finds them."""
    loaded = ctypes.CDLL(str(ghost), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    names = {PER_THREAD.sub("", name).removeprefix("p") for library in libraries for name in library.notes}
    names |= {name for library in libraries for name in library.notes}
    return {name for name in names if hasattr(loaded, name)}


def build_major(major: int, folder: Path, *, strict: bool = False, force: bool = False) -> bool:
    """Build one major CUDA version into `folder`; return False if it was up to date."""
    stamp = folder / STAMP
    wanted = input_hash()
    if not force and stamp.exists() and stamp.read_text() == wanted:
        return False
    libraries = read_libraries(major)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".build-") as name, ThreadPoolExecutor(2) as pool:
        work = Path(name)
        ghost = build_ghost(major, work, strict)
        own = list_implemented(ghost, libraries)
        built = [ghost, *pool.map(lambda library: build_thin(library, own, work), libraries)]
        built.append(Path(shutil.copy(work / "libcuda.so.1", work / "libcuda.so")))  # what `-lcuda` looks for
        kept = {path.name for path in built}
        for old in folder.iterdir():
            if old.name not in kept and old.name != STAMP:
                old.unlink()
        for path in built:  # files are replaced as a whole, so that running processes keep theirs
            os.replace(path, folder / path.name)
    stamp.write_text(wanted)
    return True


def build(folder: Path | None = None, *, strict: bool = False, force: bool = False) -> list[Path]:
    """Build every major CUDA version that is not up to date; return their folders.

    With `strict`, warnings are errors.  Raises BuildError if this is not Linux on x86-64 or there is no compiler, and
    if the compiler fails.
    """
    if not supported():
        raise BuildError(f"the ghost runs on Linux x86_64, this is {sys.platform} {platform.machine()}")
    compiler()
    folder = folder or default_folder()
    folders = [folder / f"cuda{major}" for major in MAJORS]
    for major, target in zip(MAJORS, folders, strict=True):
        build_major(major, target, strict=strict, force=force)
    return folders


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the ghost's libraries.")
    parser.add_argument("folder", nargs="?", type=Path, help="target folder (default: beside the package)")
    parser.add_argument("--strict", action="store_true", help="warnings are errors")
    parser.add_argument("--force", action="store_true", help="also build folders that are up to date")
    options = parser.parse_args()
    try:
        for folder in build(options.folder, strict=options.strict, force=options.force):
            print(f"{folder}: {len(list(folder.glob('*.so*')))} libraries")
    except BuildError as error:
        sys.exit(f"ghost: {error}")


if __name__ == "__main__":
    main()
