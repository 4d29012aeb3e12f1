"""The card and single operations: what no public source says exactly."""

from __future__ import annotations

import ctypes
import gc
import re
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import driver
import events
import isolated
import torch
from exports import exported_symbols
from operations import Call, operations

TIMEOUT_SECONDS: Final = 60
"""For one fact that is one process."""
OPERATIONS_SECONDS: Final = 300
"""For the operations of one process; the rest goes on in another."""
TIMED_SECONDS: Final = 0.02
"""About how long one operation is repeated for its time."""

GROWING: Final = (
    "sdpa flash bf16 b1 h32/8 s4096 d128 causal backward",
    "sdpa efficient bf16 b1 h32/32 s4096 d128 causal backward",
    "sdpa cudnn bf16 b1 h32/8 s4096 d128 causal backward",
    "cross_entropy bf16 4096x32000 backward",
    "layer_norm bf16 8x512x1024 backward",
    "embedding bf16 4096x128256x2048 backward",
    "sort 1048576 fp32",
    "optimizer adamw fp32",
    "optimizer adamw fused fp32",
    "conv patches 16 bf16 backward",
    "LSTM fp32 backward",
    "svd 512",
    "fft 512",
    "sparse csr mm",
    "grouped_mm bf16 8 groups",
    "scaled_mm fp8 4096",
)
"""Operations that load more libraries or kernels, in the order in which `growth` runs them."""


def record(done: set[str], *, source: str, deadline: float) -> Iterator[dict[str, Any]]:
    """Every fact that is not in `done`, one line each, until the deadline; failures are lines with `error`."""
    whole: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "device": device,
        "libraries": libraries,
        "growth": growth,
        "growth of a communicator": growth_of_a_communicator,
        "growth of triton": growth_of_triton,
        "workspaces": workspaces,
    }
    for name, fact in whole.items():
        if name not in done and time.monotonic() < deadline:
            yield {"fact": name, "source": source, **isolated.run(fact, timeout_seconds=TIMEOUT_SECONDS)}
    yield from _operations(done, source, deadline)


def device() -> Iterator[dict[str, Any]]:
    """What runtime and driver report of the card, and the context's bytes before anything else is loaded."""
    before = driver.device_used()
    torch.cuda.init()
    torch.cuda.set_device(0)
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    properties = torch.cuda.get_device_properties(0)
    names = [name for name in dir(properties) if not name.startswith("_") and name != "uuid"]
    yield {
        "nvml_used_before_bytes": before,
        "nvml_used_after_bytes": driver.device_used(),
        "nvml": _nvml_facts(),
        "mem_get_info": [free_bytes, total_bytes],
        "properties": {name: getattr(properties, name) for name in names if not callable(getattr(properties, name))},
        "driver_attributes": _driver_attributes(),
        "limits": _runtime_limits(),
        "versions": driver.versions(),
        "allocation_granularity": {
            str(n): _granularity_of(n) for n in (1, 512, 1 << 20, 2 << 20, (2 << 20) + 1, 20 << 20)
        },
    }


def _nvml_facts() -> dict[str, Any]:
    opened = driver._nvml()
    if opened is None:
        return {}
    library, handle = opened
    asked: dict[str, Callable[[], Any]] = {
        "name": lambda: driver._text(library.nvmlDeviceGetName(handle)),
        "total": lambda: library.nvmlDeviceGetMemoryInfo(handle).total,
        "memory_v2": lambda: _fields(library.nvmlDeviceGetMemoryInfo(handle, version=library.nvmlMemory_v2)),
        "bar1_total": lambda: library.nvmlDeviceGetBAR1MemoryInfo(handle).bar1Total,
        "bus_bits": lambda: library.nvmlDeviceGetMemoryBusWidth(handle),
        "max_sm_mhz": lambda: library.nvmlDeviceGetMaxClockInfo(handle, library.NVML_CLOCK_SM),
        "max_memory_mhz": lambda: library.nvmlDeviceGetMaxClockInfo(handle, library.NVML_CLOCK_MEM),
        "pcie_generation": lambda: library.nvmlDeviceGetMaxPcieLinkGeneration(handle),
        "pcie_width": lambda: library.nvmlDeviceGetMaxPcieLinkWidth(handle),
        "cores": lambda: library.nvmlDeviceGetNumGpuCores(handle),
        "power_limit_mw": lambda: library.nvmlDeviceGetEnforcedPowerLimit(handle),
        "driver": lambda: driver._text(library.nvmlSystemGetDriverVersion()),
        "nvml": lambda: driver._text(library.nvmlSystemGetNVMLVersion()),
    }
    return {name: _or_error(ask) for name, ask in asked.items()}


def _fields(structure: Any) -> dict[str, int]:
    return {name: int(getattr(structure, name)) for name, _ in structure._fields_}


def _or_error(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception as error:  # each question is independent; the answer "not supported" is a fact too
        return f"{type(error).__name__}: {error}"


def _driver_attributes() -> dict[str, int]:
    """cuDeviceGetAttribute for every attribute number that the driver answers."""
    library = ctypes.CDLL("libcuda.so.1")
    value = ctypes.c_int()
    answers = {}
    for number in range(1, 160):
        if library.cuDeviceGetAttribute(ctypes.byref(value), number, 0) == 0:
            answers[str(number)] = value.value
    return answers


def _runtime_limits() -> dict[str, int]:
    """cuCtxGetLimit: stack, printf buffer, heap: they are part of the context's bytes."""
    library = ctypes.CDLL("libcuda.so.1")
    value = ctypes.c_size_t()
    names = ("stack", "printf", "heap", "sync_depth", "pending_launches", "l2_fetch", "persisting_l2")
    return {
        name: value.value
        for number, name in enumerate(names)
        if library.cuCtxGetLimit(ctypes.byref(value), number) == 0
    }


def _granularity_of(size_bytes: int) -> int | None:
    """How much less memory is free after a cudaMalloc of this size."""
    before = torch.cuda.mem_get_info()[0]
    pointer = _raw_malloc(size_bytes)
    after = torch.cuda.mem_get_info()[0]
    return None if pointer is None else before - after


def _raw_malloc(size_bytes: int) -> int | None:
    library = ctypes.CDLL("libcuda.so.1")
    pointer = ctypes.c_uint64()
    failed = library.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size_bytes))
    return None if failed else pointer.value


def libraries() -> Iterator[dict[str, Any]]:
    """Which NVIDIA libraries a training process has loaded, and what the driver's own two export."""
    x = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16)
    (x @ x).sum().item()
    ctypes.CDLL("libnvidia-ml.so.1")
    mapped = set(re.findall(r"/\S+\.so\S*", Path("/proc/self/maps").read_text()))
    loaded = sorted(
        path for path in mapped if re.search(r"nvidia|cuda|cublas|cudnn|nccl|nvrtc|cupti|cu[a-z]+\.so", path)
    )
    own = [path for path in loaded if re.search(r"/lib(cuda|nvidia-ml)\.so", path)]
    yield {
        "loaded": [Path(path).name for path in loaded],
        "exports": {Path(path).name: exported_symbols(Path(path)) for path in own},
    }


Work = tuple[str, Callable[[], Any]]


def growth() -> Iterator[dict[str, Any]]:
    """Memory outside the allocator after each library is first used, in one process, in order."""
    x = half = torch.empty(0)

    def allocated() -> None:
        nonlocal x, half
        x = torch.empty(1024, 1024, device="cuda")
        half = torch.empty(1024, 1024, device="cuda", dtype=torch.bfloat16)

    calls = operations()
    yield from _noted(
        [
            ("first allocation", allocated),
            ("fill", lambda: x.fill_(0.5)),
            ("normal_", lambda: x.normal_()),
            ("cast", lambda: half.copy_(x)),
            ("reduction", lambda: x.sum()),
            ("cublas fp32", lambda: x @ x),
            ("cublas bf16", lambda: half @ half),
            ("cublas fp16", lambda: x.half() @ x.half()),
            ("cublasLt bias", lambda: torch.addmm(half[0], half, half)),
            ("cublas batched", lambda: torch.bmm(half[None], half[None])),
            *((name, lambda name=name: calls[name]()()) for name in GROWING),
            ("second stream", _on_another_stream),
            ("cuda graph", _captured),
        ]
    )


def growth_of_triton() -> Iterator[dict[str, Any]]:
    """The same for the first kernel that Triton compiles."""
    yield from _noted([("fill", lambda: torch.ones(1024, device="cuda")), ("triton", _compiled)])


def growth_of_a_communicator() -> Iterator[dict[str, Any]]:
    """Memory of NCCL with one rank: the group, its first collective of each kind, a second communicator."""
    import torch.distributed as dist

    x = torch.empty(0)

    def filled() -> None:
        nonlocal x
        x = torch.ones(1 << 20, device="cuda")

    yield from _noted(
        [
            ("fill", filled),
            ("group", lambda: dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)),
            ("all_reduce", lambda: dist.all_reduce(x)),
            ("all_gather", lambda: dist.all_gather_into_tensor(torch.empty_like(x), x)),
            ("reduce_scatter", lambda: dist.reduce_scatter_tensor(torch.empty_like(x), x)),
            ("all_to_all", lambda: dist.all_to_all_single(torch.empty_like(x), x)),
            ("broadcast", lambda: dist.broadcast(x, 0)),
            ("second group", lambda: dist.all_reduce(x, group=dist.new_group([0]))),
        ]
    )


def _noted(works: Iterable[Work]) -> Iterator[dict[str, Any]]:
    """Where the bytes are after each work, the context's own first; all so far each time, lest a crash lose them."""
    before = driver.device_used()
    torch.cuda.init()
    torch.cuda.set_device(0)
    noted: list[dict[str, Any]] = [{"after": "context", **driver.observe()}]
    for name, work in works:
        answer = _or_error(work)
        torch.cuda.synchronize()
        failed = {"failed": answer.splitlines()[0][:200]} if isinstance(answer, str) else {}
        noted.append({"after": name, **driver.observe(), **failed})
        yield {"nvml_used_before_bytes": before, "noted": noted}


def _on_another_stream() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.ones(512, 512, device="cuda")
        torch.mm(x, x)


def _captured() -> None:
    graph = torch.cuda.CUDAGraph()
    x = torch.ones(512, 512, device="cuda")
    with torch.cuda.graph(graph):
        torch.mul(x, 2)
    graph.replay()


def _compiled() -> None:
    """Makes Inductor write and load one Triton kernel."""
    torch.compile(lambda x: (x * 2 + 1).relu())(torch.ones(1024, device="cuda"))


def workspaces() -> Iterator[dict[str, Any]]:
    """cuBLAS workspaces: what the first product of each thread and stream asks the allocator for."""
    events.start()
    x = torch.ones(256, 256, device="cuda", requires_grad=True)
    seen: dict[str, list[int]] = {}

    def note(name: str, work: Callable[[], Any]) -> None:
        before = len(events.recorded())
        work()
        seen[name] = events.sizes(events.recorded()[before:])

    note("forward", lambda: x @ x)
    note("again", lambda: x @ x)
    note("backward", lambda: (x @ x).sum().backward())
    note("second stream", _on_another_stream)
    note("bias", lambda: torch.addmm(x[0], x, x))
    note("bf16", lambda: x.bfloat16() @ x.bfloat16())
    yield {"sizes": seen}


def _operations(done: set[str], source: str, deadline: float) -> Iterator[dict[str, Any]]:
    pending = [name for name in operations() if f"op {name}" not in done]
    while pending and time.monotonic() < deadline:
        seconds = min(OPERATIONS_SECONDS, max(5.0, deadline - time.monotonic()))
        for line in isolated.stream(lambda: _observe_all(pending, source), timeout_seconds=seconds):
            name = pending.pop(0)
            yield {"fact": f"op {name}", "source": source, **line}
            if not pending:
                break


def _observe_all(names: list[str], source: str) -> Iterator[dict[str, Any]]:
    """One line an operation; ends with an exception after which this process can do no more."""
    torch.manual_seed(0)
    torch.set_grad_enabled(True)
    _warm_up()
    events.start()
    calls = operations()
    for name in names:
        try:
            yield _observe(calls[name], source)
        except RuntimeError as error:
            if "CUDA error" in str(error):  # the context is lost with it
                raise
            torch.cuda.empty_cache()
            yield {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}


def _warm_up() -> None:
    """Both threads that call cuBLAS get their workspace, so that no operation is charged with it."""
    x = torch.ones(256, 256, device="cuda", requires_grad=True)
    (x @ x).sum().backward()
    torch.cuda.synchronize()


def _observe(maker: Callable[[], Call], source: str) -> dict[str, Any]:
    call = maker()
    torch.cuda.synchronize()
    outside = _outside()
    first, second = _sizes_of(call), _sizes_of(call)
    line: dict[str, Any] = {"first": first, "outside_bytes": _outside() - outside}
    if second != first:
        line["second"] = second
    if source == "real":
        line["seconds"] = _seconds_of(call)
    del call
    gc.collect()  # what it left in a cycle is given back here, and not while the next one is looked at
    torch.cuda.memory._record_memory_history(None)
    torch.cuda.empty_cache()
    events.start()
    return line


def _outside() -> int:
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return total_bytes - free_bytes - torch.cuda.memory_reserved()


def _sizes_of(call: Call) -> list[int]:
    before = len(events.recorded())
    result = call()
    torch.cuda.synchronize()
    seen = events.sizes(events.recorded()[before:])
    del result
    return seen


def _seconds_of(call: Call) -> float:
    """Median over repetitions, between CUDA events; includes what the host needs where that is longer."""
    first, second = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    call()
    second.record()
    torch.cuda.synchronize()
    count = max(3, min(50, int(TIMED_SECONDS / max(first.elapsed_time(second) / 1e3, 1e-5))))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    each = sorted(a.elapsed_time(b) / 1e3 for a, b in pairwise(marks))
    return each[len(each) // 2]
