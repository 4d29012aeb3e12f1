"""The ghost's C interface (libghost.so), which is absent where the GPU is real."""

import ctypes
import json
from collections.abc import Callable
from typing import Any


class Native:
    """Functions of libghost.so; `load` returns None where it is not loaded in this process."""

    def __init__(self, library: Any) -> None:
        self._library = library
        library.ghost_forget.argtypes = [ctypes.c_uint64]
        library.ghost_forget.restype = None
        for name in ("ghost_pinned_peak_bytes", "ghost_managed_peak_bytes", "ghost_log_data", "ghost_computed_reads"):
            getattr(library, name).restype = ctypes.c_uint64
        library.ghost_nccl_next_split.argtypes = [ctypes.c_int]
        library.ghost_nccl_next_split.restype = None
        library.ghost_log_count.restype = ctypes.c_size_t
        library.ghost_name_count.restype = ctypes.c_uint32
        library.ghost_name.argtypes = [ctypes.c_uint32]
        library.ghost_name.restype = ctypes.c_char_p
        library.ghost_unknown_calls.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        library.ghost_unknown_calls.restype = ctypes.c_size_t
        library.ghost_unknown_workspaces.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        library.ghost_unknown_workspaces.restype = ctypes.c_size_t
        library.ghost_set.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
        library.ghost_zero_host.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
        library.ghost_zero_host.restype = None
        library.ghost_copy_host.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]
        library.ghost_copy_host.restype = None
        library.ghost_copy_values.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]
        library.ghost_copy_values.restype = None
        library.ghost_reads_zero.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
        library.ghost_note_computed_read.restype = None
        for name in ("ghost_known", "ghost_readable", "ghost_forget_values", "ghost_forget_followed"):
            getattr(library, name).argtypes = [ctypes.c_uint64, ctypes.c_uint64]
        library.ghost_forget_values.restype = library.ghost_forget_followed.restype = None
        library.ghost_guess.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64]
        library.ghost_guess.restype = None
        library.ghost_log_add.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64]
        library.ghost_log_add.restype = None
        library.ghost_log_cut.argtypes = [ctypes.c_size_t]
        library.ghost_log_cut.restype = None
        library.ghost_make_requests.restype = None
        library.ghost_device_used.restype = ctypes.c_uint64
        library.ghost_take_outside.argtypes = [ctypes.c_int64]
        self._mark = ctypes.c_uint32.in_dll(library, "ghost_current_mark")
        self.forget: Callable[[int], None] = library.ghost_forget

    def back_python(self) -> None:
        """Put Python's further small objects into huge pages."""
        functions = (self._library.ghost_arena_take, self._library.ghost_arena_give)
        arenas = (ctypes.c_void_p * 3)(None, *(ctypes.cast(each, ctypes.c_void_p) for each in functions))
        ctypes.pythonapi.PyObject_SetArenaAllocator(arenas)  # which copies this PyObjectArenaAllocator

    def set(self, key: str, value: str) -> None:
        """Configure the card; valid before its first use in this process."""
        if self._library.ghost_set(key.encode(), value.encode()) != 0:
            raise ValueError(f"the ghost knows no setting {key}={value}")

    def mark(self, number: int) -> None:
        """Give further records this mark."""
        self._mark.value = number

    def known(self, address: int, count_bytes: int) -> bool:
        """Return whether these bytes were copied to the card, rather than left to a kernel to compute."""
        return bool(self._library.ghost_known(address, count_bytes))

    def readable(self, address: int, count_bytes: int) -> bool:
        """Return whether these bytes are known or were guessed."""
        return bool(self._library.ghost_readable(address, count_bytes))

    def guess(self, address: int, source: int, count_bytes: int) -> None:
        """Put bytes of the host where a kernel has computed: they are read, and are not known."""
        self._library.ghost_guess(address, source, count_bytes)

    def forget_values(self, address: int, count_bytes: int) -> None:
        """Forget what was known or guessed of these bytes."""
        self._library.ghost_forget_values(address, count_bytes)

    def forget_followed(self, address: int, count_bytes: int) -> None:
        """Forget what `copy_values` has put there, and nothing that the program has copied there since."""
        self._library.ghost_forget_followed(address, count_bytes)

    def zero_host(self, address: int, count_bytes: int) -> None:
        """Make host memory read as zero; pages that were never touched read so already, and stay untouched."""
        self._library.ghost_zero_host(address, count_bytes)

    def copy_host(self, target: int, source: int, count_bytes: int) -> None:
        """Copy within the host; pages of the source that were never touched touch none of the target."""
        self._library.ghost_copy_host(target, source, count_bytes)

    def copy_values(self, target: int, source: int, count_bytes: int) -> None:
        """Copy known values between host and card, without a call of the driver."""
        self._library.ghost_copy_values(target, source, count_bytes)

    def reads_zero(self, address: int, count_bytes: int) -> bool:
        """Return whether all of this host memory is zero; pages that were never touched stay untouched."""
        return bool(self._library.ghost_reads_zero(address, count_bytes))

    def card(self, device: int) -> int:
        """Return the number of a visible card among all cards of the machine."""
        return int(self._library.ghost_device_card(device))

    def log(self, enabled: bool) -> None:
        """Start or stop recording kernels, copies and collectives."""
        self._library.ghost_log_enable(1 if enabled else 0)

    def log_bytes(self) -> bytes:
        """Return the records so far, 64 bytes each."""
        count = self._library.ghost_log_count()
        return ctypes.string_at(self._library.ghost_log_data(), count * 64) if count else b""

    def log_add(self, like: bytes, address: int, address2: int) -> None:
        """Add a copy of a record with other addresses."""
        self._library.ghost_log_add(like, address, address2)

    def log_cut(self, count: int) -> None:
        """Delete all records but the first `count`."""
        self._library.ghost_log_cut(count)

    def log_count(self) -> int:
        """Return the number of records."""
        return int(self._library.ghost_log_count())

    def launched(self, since: int) -> int:
        """Return the number of kernels, copies, fills and library operations among the records from this one on."""
        count = self.log_count() - since
        kinds = ctypes.string_at(self._library.ghost_log_data() + 64 * since, 64 * count)[::64] if count > 0 else b""
        return sum(map(kinds.count, _LAUNCHED))

    def make_requests(self, asked: "Asked", allocator: "Allocator") -> None:
        """Make requests of an allocator through its C functions until one fails; `asked.made` tells how many."""
        self._library.ghost_make_requests(ctypes.byref(asked), ctypes.byref(allocator))

    def names(self) -> list[str]:
        """Return the names that the records refer to."""
        library = self._library
        return [library.ghost_name(i).decode(errors="replace") for i in range(library.ghost_name_count())]

    def pinned_peak_bytes(self) -> int:
        """Return the peak of page-locked host memory in bytes."""
        return int(self._library.ghost_pinned_peak_bytes())

    def managed_peak_bytes(self) -> int:
        """Return the peak of managed memory (cudaMallocManaged) in bytes."""
        return int(self._library.ghost_managed_peak_bytes())

    def computed_reads(self) -> int:
        """Return how often the program read on the host a value that a kernel would have computed."""
        return int(self._library.ghost_computed_reads())

    def note_computed_read(self) -> None:
        """Count a read of a computed value that a patch answered, without a copy from the card."""
        self._library.ghost_note_computed_read()

    def next_split(self, ranks: int) -> None:
        """Set the number of ranks of the next communicator that is split off another."""
        self._library.ghost_nccl_next_split(ranks)

    def take_for_nccl(self, ranks: int, peers: int) -> None:
        """Allocate what NCCL does for a communicator of so many ranks (0: for none) and so many new peers.

        Raises RuntimeError, in NCCL's words, if the card has too little memory left.
        """
        if self._library.ghost_nccl_take(ranks, peers) != 0:
            raise RuntimeError("NCCL error: unhandled cuda error; Cuda failure 2 'out of memory'")

    def device_used(self, device: int) -> int:
        """Return the memory of a card that this process holds, with its context."""
        return int(self._library.ghost_device_used(device))

    def take_outside(self, count_bytes: int) -> bool:
        """Take memory of the card that no allocator asks for, or give some back; return False if it does not fit."""
        return not self._library.ghost_take_outside(count_bytes)

    def unknown_calls(self) -> dict[str, int]:
        """Return the calls of functions that the ghost does not implement: `library:symbol` to count."""
        return _counts(self._library.ghost_unknown_calls)

    def unknown_workspaces(self) -> dict[str, int]:
        """Return the workspaces counted as 0 bytes, since only a closed library knows their size: caller to count."""
        return _counts(self._library.ghost_unknown_workspaces)


_LAUNCHED = (1, 2, 3, 4, 5, 13)
"""Kinds of records (`RECORD_KERNEL` and so on in ghost.h)."""


class Asked(ctypes.Structure):
    """Requests and their results (`struct requests`)."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("made", ctypes.c_uint64),
        ("addresses", ctypes.c_void_p),
        ("blocks", ctypes.c_uint64),
    )


class Allocator(ctypes.Structure):
    """C functions (`struct allocator`) that hand out and take back a block, and enter and leave a stream."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("hand_out", "take_back", "enter_stream", "leave_stream"))


def _counts(write_json: Any) -> dict[str, int]:
    """Return the counts that a function of the ghost writes as a JSON object."""
    buffer = ctypes.create_string_buffer(1 << 20)
    write_json(buffer, len(buffer))
    return {str(name): int(count) for name, count in json.loads(buffer.value or b"{}").items()}


def load() -> Native | None:
    """Return the ghost of this process; None if there is none."""
    try:
        library = ctypes.CDLL("libghost.so", mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return None
    return Native(library)
