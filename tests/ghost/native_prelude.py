"""What each program of test_native.py begins with: libghost.so through ctypes, without torch.

GHOST_FOLDER names the folder of the libraries under test.
"""

import ctypes
import os
import struct
import threading  # noqa: F401
import time  # noqa: F401
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint64, c_ulonglong, c_void_p  # noqa: F401

MIB = 1 << 20
FOLDER = os.environ["GHOST_FOLDER"]
g = ctypes.CDLL(f"{FOLDER}/libghost.so")
for name in (
    *("ghost_device_used", "ghost_device_peak", "ghost_pinned_bytes", "ghost_pinned_peak_bytes"),
    *("ghost_managed_bytes", "ghost_managed_peak_bytes", "ghost_launches", "ghost_log_data", "ghost_log_count"),
):
    getattr(g, name).restype = c_uint64
g.ghost_name.restype = c_char_p
g.cudaGetErrorString.restype = g.cudaGetErrorName.restype = c_char_p
g.ghost_forget.argtypes = [c_uint64]
g.ghost_known.argtypes = [c_uint64, c_size_t]


def malloc(count: int, function: str = "cudaMalloc", *more: object) -> int:
    """The address, after the call succeeded."""
    pointer = c_void_p()
    code = getattr(g, function)(byref(pointer), c_size_t(count), *more)
    assert code == 0, (function, code)
    return pointer.value or 0


def to_card(address: int, data: bytes) -> None:
    assert g.cudaMemcpy(c_void_p(address), data, c_size_t(len(data)), 1) == 0


def from_card(address: int, count: int) -> bytes:
    data = ctypes.create_string_buffer(b"\xee" * count, count)
    assert g.cudaMemcpy(data, c_void_p(address), c_size_t(count), 2) == 0
    return data.raw


def memory() -> tuple[int, int]:
    """Free and total bytes of the current device."""
    free, total = c_size_t(), c_size_t()
    assert g.cudaMemGetInfo(byref(free), byref(total)) == 0
    return free.value, total.value


def stream() -> c_void_p:
    made = c_void_p()
    assert g.cudaStreamCreateWithFlags(byref(made), 1) == 0
    return made


def event() -> c_void_p:
    made = c_void_p()
    assert g.cudaEventCreateWithFlags(byref(made), 2) == 0
    return made


class Size(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in "xyz"]


g.cudaLaunchKernel.argtypes = [c_void_p, Size, Size, c_void_p, c_size_t, c_void_p]


def launch(on: c_void_p) -> None:
    """A kernel without a name."""
    assert g.cudaLaunchKernel(0x77, Size(1, 1, 1), Size(32, 1, 1), None, 0, on) == 0


FIELDS = ("kind", "device", "flags", "mark", "name", "grid_x", "grid_y", "grid_z", "block", "shared")
FIELDS += ("stream", "bytes", "address", "address2")


def records() -> list[dict[str, int]]:
    """The log so far."""
    data = ctypes.string_at(g.ghost_log_data(), 64 * g.ghost_log_count()) if g.ghost_log_count() else b""
    return [dict(zip(FIELDS, values, strict=True)) for values in struct.iter_unpack("<BBHIIIIIIIQQQQ", data)]


def text_of(function: str) -> str:
    buffer = ctypes.create_string_buffer(1 << 16)
    getattr(g, function)(buffer, c_size_t(len(buffer)))
    return buffer.value.decode()


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


g.ncclCommInitRank.argtypes = [c_void_p, c_int, UniqueId, c_int]


def communicator(ranks: int, rank: int, name: str) -> c_void_p:
    made = c_void_p()
    code = g.ncclCommInitRank(byref(made), ranks, UniqueId(name.encode()), rank)
    assert code == 0, code
    return made


INT64, FLOAT32, BFLOAT16 = 4, 7, 9
SUM, PROD, MAX, MIN, AVG = range(5)


def numbers(address: int, count: int) -> list[int]:
    return list(struct.unpack(f"<{count}q", from_card(address, 8 * count)))


def put_numbers(*values: int) -> int:
    address = malloc(8 * len(values))
    to_card(address, struct.pack(f"<{len(values)}q", *values))
    return address


__all__ = [name for name in globals() if not name.startswith("__")]
