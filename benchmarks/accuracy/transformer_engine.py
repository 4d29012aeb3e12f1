"""Transformer Engine's own C++ for torch, compiled without nvcc and without a GPU.

Its kernels come as a library that loads on a ghost as it is (`transformer-engine-cu13`); what torch calls them
through comes as C++ (`transformer-engine-torch`), which wants g++ and the headers of CUDA 13, of which NVIDIA's
packages have folders.  Nothing is optimised: on a ghost nothing is computed.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from tonnage.ghost.environment import environment
from tonnage.ghost.wheel import Torch

HEADERS: Final = (
    "nvidia-cuda-runtime==13.0.*",
    "nvidia-cuda-crt==13.0.*",
    "nvidia-cuda-cccl==13.0.*",
    "nvidia-cuda-nvrtc==13.0.*",
    "nvidia-cublas==13.0.*",
    "nvidia-cusparse==12.6.*",
    "nvidia-cusolver==12.0.*",
    "nvidia-cudnn-cu13==9.15.*",
    "nvidia-nccl-cu13==2.28.*",
    "nvidia-nvtx==13.0.*",
)
"""Of CUDA 13.0, as torch's wheels are built with."""

FIRST: Final = """
#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/extension.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
"""
"""What nearly every file begins with, compiled once."""

FLAGS: Final = (
    "-O0",
    "-fPIC",
    "-std=c++20",
    "-fvisibility=hidden",
    "-w",
    "-DTORCH_API_INCLUDE_EXTENSION_H",
    "-DTORCH_EXTENSION_NAME=transformer_engine_torch",
)

Run = Callable[..., None]
"""Runs a command, or raises in its words."""


def compile_into(folder: Path, version: str, torch: Torch, run: Run) -> None:
    """Add `transformer_engine_torch` to a folder that has the kernels; `torch` is the one that it will run with."""
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        source = _source(work, version, torch, run)
        own = Path(torch.path or sysconfig.get_path("purelib")) / "torch"
        headers = _headers(work, run)
        common = source / "common_headers"
        include = [common, common / "common", common / "common/include", source / "csrc"]
        system = [own / "include", own / "include/torch/csrc/api/include", *headers, sysconfig.get_path("include")]
        options = [*FLAGS, *(f"-I{path}" for path in include)]
        options += [word for path in system for word in ("-isystem", str(path))]
        (work / "first.h").write_text(FIRST)
        run("g++", *options, "-x", "c++-header", str(work / "first.h"), "-o", str(work / "first.h.gch"))

        def compiled(index_and_file: tuple[int, Path]) -> str:
            index, file = index_and_file
            made = str(work / f"{index}.o")
            run("g++", "-include", str(work / "first.h"), *options, "-c", str(file), "-o", made)
            return made

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as side_by_side:
            objects = list(side_by_side.map(compiled, enumerate(sorted((source / "csrc").rglob("*.cpp")))))
        beside = folder / "transformer_engine" / "wheel_lib"
        libraries = ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_cuda", "-lc10_cuda", "-ltorch_python"]
        libraries += [f"-L{beside}", "-l:libtransformer_engine.so", "-Wl,--unresolved-symbols=ignore-all"]
        made = str(beside / "transformer_engine_torch.so")
        run("g++", "-shared", "-o", made, *objects, f"-L{own / 'lib'}", *libraries)


def _source(work: Path, version: str, torch: Torch, run: Run) -> Path:
    """The unpacked sources.  pip asks them for their names before it hands them over, and they ask torch for CUDA."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    pip += ["--no-build-isolation", "--dest", str(work), f"transformer-engine-torch=={version}"]
    run(*pip, env=environment(torch=torch))
    (archive,) = work.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(work, filter="data")
    return work / archive.name.removesuffix(".tar.gz")


def _headers(work: Path, run: Run) -> list[Path]:
    """Folders of headers out of NVIDIA's packages, one package after the other, since some are large."""
    for package in HEADERS:
        run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work / "wheel"), package)
        (wheel,) = (work / "wheel").iterdir()
        with zipfile.ZipFile(wheel) as files:
            files.extractall(work / "headers", [name for name in files.namelist() if "/include/" in name])
        wheel.unlink()
    found = list((work / "headers").glob("nvidia/*/include"))
    return [*found, *(cccl for folder in found if (cccl := folder / "cccl").is_dir())]
