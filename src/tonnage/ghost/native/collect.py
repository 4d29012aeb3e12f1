"""Write the symbol lists in `symbols/` from NVIDIA's public packages; only a maintainer needs this.

    python collect.py NM_FOLDER HEADER_FOLDER

NM_FOLDER has the output of `nm -D -S --defined-only` of each library, one file each, named
`libNAME.so.N@WHEEL.txt`; HEADER_FOLDER has one folder of public headers per package.  A list has the names
of a library's public functions and, if the header shows that a function hands out a result through its
arguments, its kind and the argument:

    p@K   a new handle through integer argument K (counted from 1)
    i4@K, i8@K   a number of 4 or 8 bytes
    text  the function returns a string, size: it returns a size, void: nothing
    data@N   a variable of N bytes instead of a function

Nothing else of the headers is kept.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

# library file name -> packages (as they appear in the folder names) whose symbols are united
LIBRARIES: dict[str, dict[str, tuple[str, ...]]] = {
    "cuda13": {
        "libcudart.so.13": ("nvidia_cuda_runtime-13",),
        "libcublas.so.13": ("nvidia_cublas-13",),
        "libcublasLt.so.13": ("nvidia_cublas-13",),
        "libcudnn.so.9": ("nvidia_cudnn_cu13", "nvidia_cudnn_cu12"),
        "libcufft.so.12": ("nvidia_cufft-12",),
        "libcufile.so.0": ("nvidia_cufile-1", "nvidia_cufile_cu12"),
        "libcupti.so.13": ("nvidia_cuda_cupti-13",),
        "libcurand.so.10": ("nvidia_curand-10", "nvidia_curand_cu12"),
        "libcusolver.so.12": ("nvidia_cusolver-12",),
        "libcusolverMg.so.12": ("nvidia_cusolver-12",),
        "libcusparse.so.12": ("nvidia_cusparse-12", "nvidia_cusparse_cu12"),
        "libcusparseLt.so.0": ("nvidia_cusparselt_cu13", "nvidia_cusparselt_cu12"),
        "libnccl.so.2": ("nvidia_nccl_cu13", "nvidia_nccl_cu12"),
        "libnvJitLink.so.13": ("nvidia_nvjitlink-13",),
        "libnvrtc.so.13": ("nvidia_cuda_nvrtc-13",),
        "libnvshmem_host.so.3": ("nvidia_nvshmem_cu13", "nvidia_nvshmem_cu12"),
        "libnvtx3interop.so.1": ("nvidia_nvtx-13",),
    },
    "cuda12": {
        "libcudart.so.12": ("nvidia_cuda_runtime_cu12",),
        "libcublas.so.12": ("nvidia_cublas_cu12",),
        "libcublasLt.so.12": ("nvidia_cublas_cu12",),
        "libcudnn.so.9": ("nvidia_cudnn_cu12", "nvidia_cudnn_cu13"),
        "libcufft.so.11": ("nvidia_cufft_cu12",),
        "libcufile.so.0": ("nvidia_cufile_cu12", "nvidia_cufile-1"),
        "libcupti.so.12": ("nvidia_cuda_cupti_cu12",),
        "libcurand.so.10": ("nvidia_curand_cu12", "nvidia_curand-10"),
        "libcusolver.so.11": ("nvidia_cusolver_cu12",),
        "libcusolverMg.so.11": ("nvidia_cusolver_cu12",),
        "libcusparse.so.12": ("nvidia_cusparse_cu12", "nvidia_cusparse-12"),
        "libcusparseLt.so.0": ("nvidia_cusparselt_cu12", "nvidia_cusparselt_cu13"),
        "libnccl.so.2": ("nvidia_nccl_cu12", "nvidia_nccl_cu13"),
        "libnvJitLink.so.12": ("nvidia_nvjitlink_cu12",),
        "libnvrtc.so.12": ("nvidia_cuda_nvrtc_cu12",),
        "libnvshmem_host.so.3": ("nvidia_nvshmem_cu12", "nvidia_nvshmem_cu13"),
        "libnvtx3interop.so.1": ("nvidia_nvtx_cu12",),
        "libnvToolsExt.so.1": ("nvidia_nvtx_cu12",),
    },
}
# one library's functions under another's name: CUDA 12's old NVTX library holds those of the new one
LISTED_AS = {"libnvToolsExt": "libnvtx3interop"}
# libraries that come with the driver: the names are those its public headers declare
DRIVER = {
    "libcuda.so.1": ("cuda.h", "nvidia_cuda_runtime"),
    "libnvidia-ml.so.1": ("nvml.h", "nvidia_nvml_dev"),
}

DECLARATION = re.compile(
    r"([A-Za-z_][\w\s\*]*?[\s\*])([A-Za-z_]\w*)\s*\(([^(){};]*)\)\s*(?:[A-Z_]{4,}\s*)*(?:;|\{|__attribute)"
)
HANDLE_TYPE = re.compile(r"typedef\s+(?:const\s+)?(?:struct|void|class)\s*\w*\s*\*\s*(\w+)\s*;")
RENAMED = re.compile(r"^\s*#\s*define\s+(\w+)\s+(?:__CUDA_API_(PTDS|PTSZ)\(\s*)?(\w+)", re.M)
GETTER = re.compile(
    r"Get|Query|[bB]ufferSize|[wW]orkspace|Size|Version|Count|Num|Properties|Estimate|Is[A-Z]|Heuristic|State"
)
MAKER = re.compile(
    r"Create|Init|Open|Alloc|Duplicate|Copy|Clone|Load|Subscribe|Plan|Describe|Instantiate|Begin|Import|Retain|Descr"
)
# where no declaration was found: these still hand out a handle through their first argument
HANDS_OUT = re.compile(r"^(?!cufft|nvtx|cudaCreateChannelDesc|nccl|pnccl)\w*Create(?!IdentityPermutation|Status)")
WIDE = re.compile(r"\b(size_t|int64_t|uint64_t|long|CUdeviceptr)\b")
FLOATING = re.compile(r"^(const\s+)?(float|double)\b(?!.*\*)")
DECORATION = re.compile(
    r"\b(extern|static|inline|const|struct|enum|CUDARTAPI|CUDAAPI|CUPTIAPI|CUFFTAPI|CUBLASWINAPI|CUDNNWINAPI|"
    r"CUSPARSEAPI|CUSPARSELT_API|CURANDAPI|CUSOLVERMGAPI|DECLDIR|NCCL_API|__host__|__cudart_builtin__|"
    r"__CUDA_DEPRECATED|__device_builtin__|CUSPARSE_DEPRECATED\w*|CUFILE_\w+|NVSHMEMI_HOSTDEVICE_PREFIX)\b"
)


def without_comments(text: str) -> str:
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    return re.sub(r"//[^\n]*", " ", text)


def arguments(text: str) -> list[str]:
    parts = [" ".join(part.split()) for part in text.split(",")]
    return [part for part in parts if part and part != "void"]


def note(name: str, returns: str, args: list[str], handles: set[str]) -> str:
    """Return the results that a function hands out, in the notation above; empty if nothing is known."""
    plain = " ".join(DECORATION.sub(" ", returns).split())
    notes = []
    if "*" in plain and "char" in plain:
        notes.append("text")
    elif plain == "size_t":
        notes.append("size")
    elif plain == "void":
        notes.append("void")
    position = 0
    for arg in args:
        if FLOATING.match(arg):
            continue
        position += 1
        stars = arg.count("*") + arg.count("[")
        if stars == 0:
            continue
        kind = re.sub(r"\b(struct|enum|__restrict__)\b", " ", arg)
        base = re.match(r"\s*(const\s+)?(unsigned long long|unsigned int|unsigned|long long|\w+)", kind)
        if base is None:
            continue
        is_const = arg.startswith("const") and not (stars >= 2)
        if is_const:
            continue
        pointed = base.group(2)
        makes = MAKER.search(name) is not None and GETTER.search(name) is None
        if stars >= 2 or pointed in handles:
            if makes and (stars == 1 or pointed in {"void"} or pointed.startswith("cu")) and stars <= 2:
                notes.append(f"p@{position}")
            elif GETTER.search(name):
                notes.append(f"i8@{position}")
        elif GETTER.search(name) and (pointed in NUMBERS or ENUM.search(pointed)) and not pointed.endswith(STRUCTS):
            notes.append(f"{'i8' if WIDE.search(kind.split('*')[0]) or 'long long' in kind else 'i4'}@{position}")
    return " ".join(notes)


NUMBERS = {
    "int", "unsigned", "unsigned int", "size_t", "int64_t", "uint64_t", "int32_t", "uint32_t", "long long",
    "unsigned long long", "float", "CUdevice", "CUdeviceptr",
}  # fmt: skip
ENUM = re.compile(r"(_t|Status|State|Mode|Type|Format|Kind|Order)$")
# pointed-to types that are structures, not numbers: a stub leaves them alone
STRUCTS = (
    "Prop", "Properties", "Attributes", "Params", "Desc", "Config", "_st", "Info", "info_t", "Info_t", "Location",
    "Result_t", "Params_t", "Op", "Extent", "Pos", "Handle_st", "UniqueId", "UUID",
    "uuid_t", "Memory_t", "Memory_v2_t", "Parms", "_v1_t", "_v2_t", "_v3_t", "_v4_t",
    "Element_t", "Sample_t", "Rates_t", "Rate_t", "Stats_t", "Counts_t", "Table_t", "Id_t", "Value_t", "Metadata_t",
)  # fmt: skip


def declarations(header: Path) -> Iterator[tuple[str, str, list[str], set[str]]]:
    text = without_comments(header.read_text(errors="replace"))
    handles = set(HANDLE_TYPE.findall(text)) | {"cudaStream_t", "cudaEvent_t"}
    for returns, name, args in DECLARATION.findall(text):
        yield name, returns, arguments(args), handles


def notes_of(folders: list[Path]) -> dict[str, str]:
    """Return notes by function name from all headers of these packages, with the handle types of all of them."""
    declared = [item for folder in folders for header in sorted(folder.rglob("*.h")) for item in declarations(header)]
    handles = set().union(*(item[3] for item in declared)) if declared else set()
    notes: dict[str, str] = {}
    for name, returns, args, _ in declared:
        notes.setdefault(name, note(name, returns, args, handles))
    return notes


PUBLIC_NAME = re.compile(r"_*(p?nccl|cu|nv|CU)")


def list_exported(listing: Path) -> set[str]:
    """Return the public C functions of one `nm` listing: no data, version names, C++ or runtime leftovers."""
    names = set()
    for line in listing.read_text().splitlines():
        kind, symbol = line.split()[-2:]
        name = symbol.split("@")[0]
        if kind in {"T", "W", "i"} and PUBLIC_NAME.match(name) and not name.startswith("_Z"):
            names.add(name)
    return names


def variables(listing: Path) -> dict[str, str]:
    """Return the public C variables of one `nm -S` listing, with their sizes; a library that uses one needs it."""
    notes = {}
    for line in listing.read_text().splitlines():
        words = line.split()
        if len(words) == 4 and words[2] in {"B", "D", "R"} and PUBLIC_NAME.match(words[3]):
            notes[words[3].split("@")[0]] = f"data@{int(words[1], 16)}"
    return notes


def driver_names(header: Path, prefix: str) -> dict[str, str]:
    """Return the functions that a driver header declares, with the older and per-thread variants in its macros."""
    text = without_comments(header.read_text(errors="replace"))
    notes: dict[str, str] = {}
    handles = set(HANDLE_TYPE.findall(text))
    for name, returns, args, _ in declarations(header):
        if name.startswith(prefix):
            notes.setdefault(name, note(name, returns, args, handles))
    for short, thread, target in RENAMED.findall(text):
        if short in notes and target.startswith(prefix):
            for variant in {target, f"{target}_{thread.lower()}" if thread else target}:
                notes.setdefault(variant, notes[short])
    return notes


def version_name(listings: list[Path]) -> str:
    """Return the name under which a library versions its symbols, empty if it does not."""
    versions = re.findall(r"@@(\S+)", listings[0].read_text()) if listings else []
    return max(set(versions), key=versions.count) if versions else ""


def write(path: Path, sources: str, version: str, notes: dict[str, str]) -> None:
    lines = [f"# {path.name[:-4]}: public symbols of {sources}; notation in collect.py"]
    lines += [f"# version {version}"] if version else []
    lines += [f"{name} {notes[name]}".rstrip() for name in sorted(notes)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def packages(folder: Path, prefixes: tuple[str, ...], library: str) -> list[Path]:
    return [p for prefix in prefixes for p in sorted(folder.glob(f"{library}{prefix}*"))]


def short_name(path: Path) -> str:
    name = path.name.removesuffix(".txt").split("@")[-1]
    return re.sub(r"-py3.*", "", name).replace("_", "-")


def main(nm_folder: Path, header_folder: Path) -> None:
    out = Path(__file__).parent / "symbols"
    for major, libraries in LIBRARIES.items():
        for library, prefixes in libraries.items():
            stem = library.split(".so")[0]
            stem = LISTED_AS.get(stem, stem)
            listings = [p for prefix in prefixes for p in sorted(nm_folder.glob(f"{stem}.so.*@{prefix}*.txt"))]
            notes = notes_of(packages(header_folder, prefixes, ""))
            names = set().union(*(list_exported(p) for p in listings))
            table = {name: text for p in listings for name, text in variables(p).items()}
            for name in names:
                base = re.sub(r"(_ptsz|_ptds)$", "", name)
                table[name] = notes.get(name) or notes.get(base) or ("p@1" if HANDS_OUT.search(name) else "")
            version = version_name(listings).replace(stem, library.split(".so")[0])
            write(out / major / f"{library}.txt", ", ".join(short_name(p) for p in listings), version, table)
    for library, (header, package) in DRIVER.items():
        folders = sorted(header_folder.glob(f"{package}*"))
        functions: dict[str, str] = {}
        for folder in folders:
            for path in folder.rglob(header):
                for name, text in driver_names(path, "nvml" if header == "nvml.h" else "cu").items():
                    functions.setdefault(name, text)
        sources = ", ".join(f"{header} of {short_name(p)}" for p in folders)
        for major in LIBRARIES:
            write(out / major / f"{library}.txt", sources, "", functions)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
