"""The ghost's C libraries through ctypes, each program in its own process and without torch."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tonnage.catalog.devices import parse_cluster
from tonnage.catalog.overheads import ghost_settings, overheads
from tonnage.ghost import cards
from tonnage.ghost.native import build

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def libraries() -> Path:
    try:
        build.build()
    except build.BuildError as error:
        pytest.skip(f"the ghost's libraries cannot be built here: {error}")
    return build.default_folder()


class Ghost:
    """Runs a program in a fresh process on libghost.so."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, program: str, major: int = 13, **settings: object) -> subprocess.Popen[str]:
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("GHOST_", "TORCHELASTIC_"))}
        variables |= {f"GHOST_{key.upper()}": str(value) for key, value in settings.items()}
        variables |= {"GHOST_FOLDER": str(self.folder / f"cuda{major}"), "PYTHONPATH": str(HERE)}
        source = "from native_prelude import *\n" + textwrap.dedent(program)
        return subprocess.Popen(
            [sys.executable, "-c", source],
            env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def __call__(self, program: str, major: int = 13, **settings: object) -> str:
        process = self.start(program, major, **settings)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        return out


@pytest.fixture
def ghost(libraries: Path) -> Ghost:
    return Ghost(libraries)


# ---- building


def test_a_second_build_does_nothing(libraries: Path) -> None:
    assert not build.build_major(13, libraries / "cuda13")


@pytest.mark.parametrize("major", build.MAJORS)
def test_the_sources_compile_without_a_warning(major: int, libraries: Path, tmp_path: Path) -> None:
    assert build.build_ghost(major, tmp_path, strict=True).exists()


def test_no_compiler_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(build.BuildError, match="no-such-compiler not found"):
        build.build(tmp_path)


@pytest.mark.parametrize("major", build.MAJORS)
def test_every_public_symbol_is_there_under_its_version(major: int, ghost: Ghost, tmp_path: Path) -> None:
    wanted = {lib.name: [lib.version, sorted(lib.notes)] for lib in build.read_libraries(major)}
    assert sum(len(names) for _, names in wanted.values()) > 6000
    (tmp_path / "wanted.json").write_text(json.dumps(wanted))
    program = f"""
        import json
        missing, own = [], {{}}
        dlvsym = ctypes.CDLL(None).dlvsym
        dlvsym.restype, dlvsym.argtypes = c_void_p, [c_void_p, c_char_p, c_char_p]
        for library, (version, names) in json.load(open({str(tmp_path / "wanted.json")!r})).items():
            handle = ctypes.CDLL(f"{{FOLDER}}/{{library}}")
            missing += [f"{{library}}:{{name}}" for name in names if not hasattr(handle, name)]
            if version:
                found = [name for name in names if dlvsym(handle._handle, name.encode(), version.encode())]
                own[library] = len(found)
        assert not missing, missing
        assert all(own.values()), own
    """
    ghost(program, major)


@pytest.mark.parametrize("major", build.MAJORS)
def test_public_variables_are_there_and_zero(major: int, ghost: Ghost) -> None:
    program = """
        library = ctypes.CDLL(f"{FOLDER}/libnvshmem_host.so.3")
        assert c_int.in_dll(library, "nvshmem_selected_device_transport").value == 0
        assert bytes((ctypes.c_char * 40).in_dll(library, "nvshmem_debug_output_lock")) == bytes(40)
    """
    ghost(program, major)


# ---- what the card is


@pytest.mark.parametrize(("major", "size", "blocks_at"), [(12, 1032, 712), (13, 1008, 688)])
def test_device_properties_have_the_layout_of_the_cuda_version(
    major: int, size: int, blocks_at: int, ghost: Ghost
) -> None:
    program = f"""
        data = ctypes.create_string_buffer(b"\\xee" * 2048, 2048)
        assert g.cudaGetDeviceProperties(data, 0) == 0
        raw = data.raw
        assert raw.rstrip(b"\\xee") == raw[:{size}], len(raw.rstrip(b"\\xee"))
        assert raw.startswith(b"A card\\0")
        total, shared, registers, warp = struct.unpack_from("<QQii", raw, 288)
        assert (total, shared, registers, warp) == (12345678848, 49152, 65536, 32)
        assert struct.unpack_from("<i", raw, {blocks_at}) == (24,)
    """
    ghost(program, major, name="A card", total_bytes=12345678848, capability="8.9")


@pytest.mark.parametrize(("major", "size"), [(12, 24), (13, 88)])
def test_pointer_attributes_tell_kinds_of_memory_apart(major: int, size: int, ghost: Ghost) -> None:
    program = f"""
        def kind(address):
            data = ctypes.create_string_buffer(b"\\xee" * 128, 128)
            assert g.cudaPointerGetAttributes(data, c_void_p(address)) == 0
            assert data.raw[{size}:] == b"\\xee" * (128 - {size})
            return struct.unpack_from("<ii", data.raw)
        assert g.cudaSetDevice(1) == 0
        assert kind(malloc(100) + 50) == (2, 1)
        assert kind(malloc(100, "cudaHostAlloc", 0))[0] == 1
        assert kind(malloc(100, "cudaMallocManaged", 1))[0] == 3
        assert kind(ctypes.addressof(c_int())) == (0, -2)
    """
    ghost(program, major, devices=2)


@pytest.mark.parametrize(
    ("capability", "threads", "shared", "expected"),
    [
        ("9.0", 2048, 233472, {(256, 0): 8, (1024, 0): 2, (32, 0): 32, (128, 100_000): 2}),
        ("7.5", 1024, 65536, {(256, 0): 4, (32, 0): 16, (128, 40_000): 1}),
        ("8.9", 1536, 102400, {(256, 0): 6, (1024, 0): 1, (32, 0): 24}),
    ],
)
def test_occupancy_follows_the_limits_of_the_card(
    capability: str, threads: int, shared: int, expected: dict[tuple[int, int], int], ghost: Ghost
) -> None:
    program = f"""
        for (threads, shared), blocks in {expected!r}.items():
            found = c_int()
            g.cudaOccupancyMaxActiveBlocksPerMultiprocessor(byref(found), None, threads, c_size_t(shared))
            assert found.value == blocks, (threads, shared, found.value)
    """
    ghost(program, capability=capability, threads_per_sm=threads, shared_per_sm_bytes=shared)


@pytest.mark.parametrize(
    ("capability", "entries", "versions"),
    [
        ("8.9", [(2, 75), (2, 80), (2, 86), (2, 90)], (86, 86)),
        ("9.0", [(2, 75), (2, 80), (2, 90), (1, 90)], (90, 90)),
        ("12.0", [(2, 80), (1, 90)], (120, 90)),
        ("8.0", [(2, 80), (2, 86)], (80, 80)),
    ],
)
def test_kernels_report_the_code_that_the_card_would_run(
    capability: str, entries: list[tuple[int, int]], versions: tuple[int, int], ghost: Ghost
) -> None:
    program = f"""
        parts = b"".join(
            struct.pack("<HHIQIIHHI", kind, 0, 64, 32, 0, 0, 0, 0, architecture) + bytes(32 + 32)
            for kind, architecture in {entries!r}
        )
        code = ctypes.create_string_buffer(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(parts)) + parts)
        wrapper = ctypes.create_string_buffer(struct.pack("<IIQQ", 0x466243B1, 1, ctypes.addressof(code), 0))
        register = g["__cudaRegisterFatBinary"]
        register.restype = c_void_p
        module = c_void_p(register(wrapper))
        g["__cudaRegisterFunction"](module, c_void_p(0x1234), None, b"kernel", -1, *[None] * 5)
        data = ctypes.create_string_buffer(144)
        assert g.cudaFuncGetAttributes(data, c_void_p(0x1234)) == 0
        threads, registers, ptx, binary = struct.unpack_from("<iiii", data.raw, 24)
        assert (binary, ptx) == {versions!r}, (binary, ptx)
    """
    ghost(program, capability=capability)


# ---- memory


def test_capacity_and_the_error_when_it_is_full(ghost: Ghost) -> None:
    program = """
        assert memory() == (90 * MIB, 100 * MIB)
        first = malloc(1)
        assert g.ghost_device_used(0) == 12 * MIB
        second = malloc(80 * MIB)
        assert memory() == (8 * MIB, 100 * MIB)
        pointer = c_void_p(1)
        assert g.cudaMalloc(byref(pointer), c_size_t(8 * MIB + 1)) == 2 and pointer.value is None
        assert g.cudaPeekAtLastError() == 2 and g.cudaGetLastError() == 2 and g.cudaGetLastError() == 0
        assert (g.cudaGetErrorName(2), g.cudaGetErrorString(2)) == (b"cudaErrorMemoryAllocation", b"out of memory")
        assert g.cudaFree(c_void_p(first + 1)) == 1 and g.cudaFree(None) == 0
        assert g.cudaFree(c_void_p(second)) == 0 and malloc(88 * MIB) and memory()[0] == 0
    """
    ghost(program, total_bytes=100 << 20, context_bytes=10 << 20)


def test_a_context_is_paid_by_the_first_use_of_its_device(ghost: Ghost) -> None:
    program = """
        count = c_int()
        assert g.cudaGetDeviceCount(byref(count)) == 0 and count.value == 8
        active = c_int()
        used = lambda: [g.ghost_device_used(i) // MIB for i in range(8)]
        assert used() == [0] * 8
        assert g.cudaSetDevice(3) == 0 and used() == [0, 0, 0, 7, 0, 0, 0, 0]
        malloc(2 * MIB)
        g.cuDevicePrimaryCtxGetState(2, byref(c_int()), byref(active))
        assert active.value == 0
        g.cuDevicePrimaryCtxGetState(3, byref(c_int()), byref(active))
        assert active.value == 1
        assert g.cudaSetDevice(8) == 101 and g.cudaSetDevice(-1) == 101
        assert g.cudaSetDevice(5) == 0
        malloc(4 * MIB)
        assert used() == [0, 0, 0, 9, 0, 11, 0, 0]
        can = c_int()
        assert g.cudaDeviceCanAccessPeer(byref(can), 3, 5) == 0 and can.value == 1
        assert g.cudaDeviceEnablePeerAccess(3, 0) == 0 and g.cudaDeviceEnablePeerAccess(3, 0) == 704
    """
    ghost(program, devices=8, context_bytes=7 << 20)


def test_blocks_never_overlap(ghost: Ghost) -> None:
    program = """
        import random
        dice, blocks, used = random.Random(1), {}, 0
        for _ in range(3000):
            if blocks and dice.random() < 0.45:
                address = dice.choice(sorted(blocks))
                used -= -(-blocks.pop(address) // (2 * MIB)) * 2 * MIB
                assert g.cudaFree(c_void_p(address)) == 0
            else:
                size = dice.choice([1, 2 * MIB, 20 * MIB, dice.randrange(1, 900 * MIB)])
                blocks[malloc(size)] = size
                used += -(-size // (2 * MIB)) * 2 * MIB
            assert g.ghost_device_used(0) == used
        placed = sorted(blocks.items())
        assert all(start + size <= after for (start, size), (after, _) in zip(placed, placed[1:]))
    """
    ghost(program, total_bytes=1 << 44)


def test_a_limit_on_the_address_space_is_none_of_the_cards(ghost: Ghost) -> None:
    ghost(
        """
        import resource, signal
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
        blocks = sorted(malloc(1 << 30) for _ in range(14))
        assert all(after - before >= 1 << 30 for before, after in zip(blocks, blocks[1:]))
        to_card(blocks[7] + 5, b"abc")
        assert from_card(blocks[7] + 5, 3) == b"abc"
        child = os.fork()
        if not child:
            ctypes.string_at(blocks[7], 1)  # no host pointer: reading faults
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
        """,
        total_bytes=16 << 30,
    )


def test_pinned_and_registered_memory_is_counted(ghost: Ghost) -> None:
    program = """
        pinned = malloc(1000, "cudaHostAlloc", 0)
        ctypes.memset(pinned, 7, 1000)
        own = ctypes.create_string_buffer(500)
        assert g.cudaHostRegister(own, c_size_t(500), 0) == 0
        assert g.cudaHostRegister(byref(own, 100), c_size_t(10), 0) == 712
        assert g.ghost_pinned_bytes() == 1500
        assert g.cudaHostUnregister(own) == 0 and g.cudaHostUnregister(own) == 713
        assert g.cudaFree(c_void_p(pinned)) == 1
        assert g.cudaFreeHost(c_void_p(pinned)) == 0
        assert (g.ghost_pinned_bytes(), g.ghost_pinned_peak_bytes()) == (0, 1500)
        assert [r["kind"] for r in records()] == [10, 10, 11, 11]
    """
    ghost(program, log=1)


def test_managed_memory_is_on_the_host_and_counted_apart(ghost: Ghost) -> None:
    program = """
        pointer = malloc(5000, "cudaMallocManaged", 1)
        ctypes.memset(pointer, 1, 5000)
        assert g.ghost_managed_bytes() == 5000 and g.ghost_device_used(0) == 0
        assert g.cudaFree(c_void_p(pointer)) == 0 and g.ghost_managed_bytes() == 0
        assert g.ghost_managed_peak_bytes() == 5000
    """
    ghost(program)


def test_a_pool_keeps_what_its_threshold_says(ghost: Ghost) -> None:
    program = """
        pool, value = c_void_p(), c_uint64()
        assert g.cudaDeviceGetDefaultMemPool(byref(pool), 0) == 0
        a = malloc(6 * MIB, "cudaMallocAsync", None)
        assert g.ghost_device_used(0) == 6 * MIB
        assert g.cudaFreeAsync(c_void_p(a), None) == 0 and g.ghost_device_used(0) == 0
        assert g.cudaMemPoolSetAttribute(pool, 4, byref(c_uint64(2**64 - 1))) == 0
        b = malloc(6 * MIB, "cudaMallocAsync", None)
        g.cudaFreeAsync(c_void_p(b), None)
        assert g.ghost_device_used(0) == 6 * MIB  # kept
        malloc(4 * MIB, "cudaMallocAsync", None)
        assert g.ghost_device_used(0) == 6 * MIB  # served from what was kept
        for attribute, expected in ((5, 6), (6, 6), (7, 4), (8, 6)):
            assert g.cudaMemPoolGetAttribute(pool, attribute, byref(value)) == 0
            assert value.value == expected * MIB, attribute
        malloc(96 * MIB)  # does not fit unless the pool gives back what it keeps
        assert g.ghost_device_used(0) == 100 * MIB
    """
    ghost(program, total_bytes=100 << 20)


def test_addresses_that_came_back_are_handed_out_again(ghost: Ghost) -> None:
    """Sizes that are no multiple of the 32 MiB at which ranges begin leave rests between them."""
    program = """
        def reserve(count):
            place = c_uint64()
            assert g.cuMemAddressReserve(byref(place), c_size_t(count), c_size_t(0), c_uint64(0), c_uint64(0)) == 0
            assert place.value % (32 * MIB) == 0
            return place.value, count

        first = reserve(4 << 40)
        for _ in range(40):  # of 32 TiB
            ranges = [reserve((1 << 40) + 12 * MIB), reserve(1 << 40), reserve((2 << 40) + 2 * MIB)]
            begins = sorted(ranges)
            assert all(a + size <= b for (a, size), (b, _) in zip(begins, begins[1:]))
            assert first not in ranges and begins[0][0] >= first[0] + first[1]
            for place, count in ranges:
                assert g.cuMemAddressFree(c_uint64(place), c_size_t(count)) == 0
    """
    ghost(program)


def test_virtual_memory_is_paid_when_created_and_seen_when_mapped(ghost: Ghost) -> None:
    program = """
        place, handle, size = c_uint64(), c_uint64(), c_size_t()
        properties = struct.pack("<iiiiQQ", 1, 1, 1, 0, 0, 0)
        assert g.cuMemGetAllocationGranularity(byref(size), properties, 0) == 0 and size.value == 2 * MIB
        assert g.cuMemAddressReserve(byref(place), c_size_t(1 << 40), c_size_t(0), c_uint64(0), c_uint64(0)) == 0
        assert g.ghost_device_used(0) == 0
        assert g.cuMemCreate(byref(handle), c_size_t(20 * MIB), properties, c_uint64(0)) == 0
        assert g.cuMemCreate(byref(c_uint64()), c_size_t(90 * MIB), properties, c_uint64(0)) == 2
        assert g.cuMemMap(place, c_size_t(20 * MIB), c_size_t(0), handle, c_uint64(0)) == 0
        to_card(place.value + 100, b"hello")
        assert from_card(place.value + 100, 5) == b"hello"
        assert g.cuMemUnmap(place, c_size_t(20 * MIB)) == 0 and g.ghost_device_used(0) == 20 * MIB
        assert g.cuMemUnmap(place, c_size_t(20 * MIB)) == 1
        assert g.cuMemRelease(handle) == 0 and g.ghost_device_used(0) == 0
        assert from_card(place.value + 100, 5) == bytes(5)
        assert [(r["kind"], r["bytes"]) for r in records() if r["kind"] in (8, 9)] == [(8, 20 * MIB), (9, 20 * MIB)]
    """
    ghost(program, total_bytes=100 << 20, log=1)


# ---- values


def test_copied_values_come_back_and_everything_else_is_zero(ghost: Ghost) -> None:
    program = """
        a, b = malloc(4 * MIB), malloc(4 * MIB)
        assert from_card(a, 10) == bytes(10)
        to_card(a + 100, b"0123456789")
        assert from_card(a + 98, 14) == b"\\0\\0" + b"0123456789" + b"\\0\\0"
        g.cudaMemcpyAsync(c_void_p(b + 1), c_void_p(a + 103), c_size_t(4), 3, None)
        assert from_card(b, 6) == b"\\0" + b"3456" + b"\\0"
        to_card(a + 102, b"xy")
        assert from_card(a + 100, 10) == b"01xy456789"
        g.cudaMemset(c_void_p(a + 108), 0x41, c_size_t(4))
        assert from_card(a + 104, 8) == b"4567AAAA"
        g.cuMemsetD32Async(c_void_p(a), 0x01020304, c_size_t(2), None)
        assert from_card(a, 9) == b"\\4\\3\\2\\1" * 2 + b"\\0"
        to_card(a, b"z" * (MIB + 1))
        assert from_card(a, 5) == bytes(5)  # too large to carry values, and the old ones are gone
        to_card(b, b"q" * MIB)
        assert from_card(b, MIB) == b"q" * MIB and from_card(b, MIB + 1) == bytes(MIB + 1)
        g.cudaMemcpy2D(c_void_p(a), c_size_t(8), b"abcdef", c_size_t(3), c_size_t(3), c_size_t(2), 1)
        assert from_card(a, 11) == b"abc" + bytes(5) + b"def"
    """
    ghost(program)


@pytest.mark.parametrize("seed", range(3))
def test_values_equal_a_plain_model_of_them(seed: int, ghost: Ghost) -> None:
    program = f"""
        import random
        dice, size = random.Random({seed}), 4096
        card, model = malloc(size), [None] * size  # None: not known
        for _ in range(3000):
            start, count = dice.randrange(size), dice.randrange(1, 300)
            count = min(count, size - start)
            kind = dice.choice(["copy", "fill", "zero", "move", "read", "known", "large"])
            if kind == "copy":
                data = dice.randbytes(count)
                to_card(card + start, data)
                model[start : start + count] = data
            elif kind in ("fill", "zero"):
                value = dice.randrange(1, 256) if kind == "fill" else 0
                g.cudaMemsetAsync(c_void_p(card + start), value, c_size_t(count), None)
                model[start : start + count] = [value] * count
            elif kind == "move":
                target = dice.randrange(size - count + 1)
                g.cudaMemcpyAsync(c_void_p(card + target), c_void_p(card + start), c_size_t(count), 3, None)
                model[target : target + count] = model[start : start + count]
            elif kind == "read":
                assert from_card(card + start, count) == bytes(value or 0 for value in model[start : start + count])
            elif kind == "known":
                assert bool(g.ghost_known(card + start, count)) == (None not in model[start : start + count])
            elif dice.random() < 0.1:
                to_card(card, bytes(MIB + 1))
                model = [None] * size
    """
    ghost(program)


def test_known_bytes_are_told_from_computed_ones(ghost: Ghost) -> None:
    program = """
        a = malloc(64 * MIB)
        assert not g.ghost_known(a, 1)
        to_card(a, b"1234")
        to_card(a + 4, b"5678")
        assert g.ghost_known(a, 8) and not g.ghost_known(a, 9)
        g.cudaMemset(c_void_p(a + 8), 0, c_size_t(32 * MIB))
        assert g.ghost_known(a, 8 + 32 * MIB)
        g.ghost_forget(a)
        assert not g.ghost_known(a + 4, 1)
    """
    ghost(program)


def test_forgetting_reaches_to_the_next_block(ghost: Ghost) -> None:
    program = """
        a = malloc(4 * MIB)
        for block in (a, a + 512):
            g.ghost_forget(block)
            to_card(block, b"low")
            to_card(block + 500, b"high")
        g.ghost_forget(a)
        assert from_card(a, 3) == bytes(3) and from_card(a + 500, 4) == bytes(4)
        assert from_card(a + 512, 3) == b"low" and from_card(a + 1012, 4) == b"high"
        to_card(a, b"w" * 1024)  # one block now: its old inner start is out of date
        g.ghost_forget(a)
        assert from_card(a, 1024) == bytes(1024)
    """
    ghost(program)


def test_freed_memory_is_forgotten(ghost: Ghost) -> None:
    program = """
        a = malloc(2 * MIB)
        to_card(a, b"secret")
        g.cudaFree(c_void_p(a))
        assert malloc(2 * MIB) == a and from_card(a, 6) == bytes(6)
    """
    ghost(program)


def test_a_large_copy_to_the_host_takes_no_memory(ghost: Ghost) -> None:
    program = """
        import resource
        size = 8 << 30
        card, host = malloc(size), malloc(size, "cudaHostAlloc", 0)
        ctypes.memset(host, 1, 5000)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert g.cudaMemcpy(c_void_p(host), c_void_p(card), c_size_t(size), 2) == 0
        assert ctypes.string_at(host, 5000) == bytes(5000)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
    """
    ghost(program)


# ---- streams, events, graphs


def test_immediate_events_are_done(ghost: Ghost) -> None:
    program = """
        s, e = stream(), event()
        launch(s)
        assert g.cudaEventQuery(e) == 0
        assert g.cudaEventRecord(e, s) == 0 and g.cudaEventQuery(e) == 0 and g.cudaStreamQuery(s) == 0
    """
    ghost(program, events="immediate")


def test_an_event_is_done_when_a_kernel_was_launched_after_it(ghost: Ghost) -> None:
    program = """
        first, second, e = stream(), stream(), event()
        assert g.cudaEventRecord(e, first) == 0 and g.cudaEventQuery(e) == 0, "the card has had nothing to do"
        launch(first)
        g.cudaEventRecord(e, first)
        assert g.cudaEventQuery(e) == 600
        launch(second)
        assert g.cudaEventQuery(e) == 0
    """
    ghost(program)


def test_an_event_is_done_when_the_host_has_waited(ghost: Ghost) -> None:
    program = """
        s, a, b = stream(), event(), event()
        ways = (lambda: g.cudaStreamSynchronize(s), lambda: g.cudaEventSynchronize(a), g.cudaDeviceSynchronize)
        for wait in ways:
            launch(s)
            g.cudaEventRecord(a, s)
            assert g.cudaEventQuery(a) == 600
            wait()
            assert g.cudaEventQuery(a) == 0
        launch(s)
        g.cudaEventRecord(a, s)
        launch(s)
        g.cudaEventRecord(b, s)
        g.cudaEventSynchronize(a)
        assert [g.cudaEventQuery(e) for e in (a, b)] == [0, 600], "what came later is not waited for"
    """
    ghost(program)


def test_nobody_polls_for_ever(ghost: Ghost) -> None:
    program = """
        s, e = stream(), event()
        launch(s)
        g.cudaEventRecord(e, s)
        assert [g.cudaEventQuery(e) for _ in range(100)] == [600] * 99 + [0]
        g.cudaEventRecord(e, s)
        time.sleep(0.06)
        assert g.cudaEventQuery(e) == 600, "how long its own thread takes decides nothing"
        found = []
        watchdog = threading.Thread(target=lambda: found.append(g.cudaEventQuery(e)))
        watchdog.start()
        watchdog.join()
        assert found == [0]
    """
    ghost(program)


def test_lazy_events_wait_for_somebody_who_waits(ghost: Ghost) -> None:
    program = """
        first, second = stream(), stream()
        a, b, c = event(), event(), event()
        g.cudaEventRecord(a, first)
        g.cudaStreamWaitEvent(second, a, 0)
        g.cudaEventRecord(b, second)
        g.cudaEventRecord(c, first)
        assert [g.cudaEventQuery(e) for e in (a, b, c)] == [600] * 3
        assert g.cudaGetErrorName(600) == b"cudaErrorNotReady"
        milliseconds = c_float()
        assert g.cudaEventElapsedTime(byref(milliseconds), a, c) == 600
        g.cudaStreamSynchronize(second)  # it waited for a, which is done with it; c came later
        assert [g.cudaEventQuery(e) for e in (a, b, c)] == [0, 0, 600]
        g.cudaEventSynchronize(c)
        assert g.cudaEventQuery(c) == 0 and g.cudaEventElapsedTime(byref(milliseconds), a, c) == 0
        g.cudaEventRecord(a, first)
        g.cudaDeviceSynchronize()
        assert g.cudaEventQuery(a) == 0
    """
    ghost(program, events="lazy")


def test_capture_makes_a_graph_that_does_its_work_at_launch(ghost: Ghost) -> None:
    program = """
        s, other, e, joined = stream(), stream(), event(), event()
        status, id, graph, nodes = c_int(), c_ulonglong(), c_void_p(), c_size_t()
        called = []
        function = ctypes.CFUNCTYPE(None, c_void_p)(lambda argument: called.append(argument))
        a = malloc(1000)
        assert g.cudaStreamBeginCapture(s, 0) == 0
        g.cudaStreamGetCaptureInfo(s, byref(status), byref(id), None, None, None, None)
        assert status.value == 1 and id.value > 0
        g.cudaMemsetAsync(c_void_p(a), 7, c_size_t(4), s)
        g.cudaLaunchHostFunc(s, function, c_void_p(42))
        g.cudaEventRecord(e, s)
        g.cudaStreamWaitEvent(other, e, 0)
        g.cudaStreamIsCapturing(other, byref(status))
        assert status.value == 1  # drawn in by the event
        g.cudaMemsetAsync(c_void_p(a + 4), 8, c_size_t(4), other)
        g.cudaEventRecord(joined, other)
        g.cudaStreamWaitEvent(s, joined, 0)
        assert g.cudaEventQuery(e) == 907
        assert g.cudaStreamEndCapture(s, byref(graph)) == 0 and graph.value
        g.cudaStreamIsCapturing(other, byref(status))
        assert status.value == 0
        assert called == [] and from_card(a, 8) == bytes(8)
        assert g.cudaGraphGetNodes(graph, None, byref(nodes)) == 0 and nodes.value == 7
        executable = c_void_p()
        assert g.cudaGraphInstantiate(byref(executable), graph, c_ulonglong(0)) == 0
        assert g.cudaGraphDestroy(graph) == 0
        g.ghost_log_clear()
        assert g.cudaGraphLaunch(executable, s) == 0 and g.cudaGraphLaunch(executable, s) == 0
        assert called == [42, 42] and from_card(a, 8) == b"\\7" * 4 + b"\\x08" * 4
        log = records()
        assert [r["kind"] for r in log[:3]] == [17, 5, 18] and log[0]["grid_x"] == 7
        assert log[1]["flags"] & 0x8000
        assert g.cudaGraphExecDestroy(executable) == 0
    """
    ghost(program, log=1)


def test_an_executable_graph_takes_memory_until_it_is_destroyed(ghost: Ghost) -> None:
    program = """
        s, graph, executable, before = stream(), c_void_p(), c_void_p(), memory()[0]
        assert g.cudaStreamBeginCapture(s, 0) == 0 and g.cudaStreamEndCapture(s, byref(graph)) == 0
        assert g.cudaGraphInstantiate(byref(executable), graph, c_ulonglong(0)) == 0
        assert before - memory()[0] == 5_000_000
        more = c_void_p()
        assert g.cudaGraphInstantiate(byref(more), graph, c_ulonglong(0)) == 2 and not more.value
        assert g.cudaGraphExecDestroy(executable) == 0 and memory()[0] == before
    """
    ghost(program, graph_bytes=5_000_000, total_bytes=9_000_000)


def test_memory_is_taken_that_nothing_here_allocates(ghost: Ghost) -> None:
    ghost(
        """
        g.ghost_take_outside.argtypes = [ctypes.c_int64]
        before = memory()[0]
        assert g.ghost_take_outside(3 * MIB) == 0 and before - memory()[0] == 3 * MIB
        assert g.ghost_take_outside(9 * MIB) == 1 and g.ghost_take_outside(-3 * MIB) == 0
        assert memory()[0] == before
        """,
        total_bytes=10 << 20,
    )


def test_waiting_for_a_capturing_stream_breaks_the_capture(ghost: Ghost) -> None:
    program = """
        s, graph, ids = stream(), c_void_p(), set()
        for _ in range(2):
            id, status = c_ulonglong(), c_int()
            assert g.cudaStreamBeginCapture(s, 2) == 0
            g.cudaStreamGetCaptureInfo(s, byref(status), byref(id))
            ids.add(id.value)
            assert g.cudaStreamSynchronize(s) == 900
            assert g.cudaStreamEndCapture(s, byref(graph)) == 901 and graph.value is None
        assert len(ids) == 2
        assert g.cudaStreamSynchronize(s) == 0
        assert g.cudaStreamBeginCapture(None, 0) == 900
    """
    ghost(program, major=12)


# ---- the log


def test_the_log_says_what_was_submitted_and_under_which_mark(ghost: Ghost) -> None:
    program = """
        g["__cudaRegisterFunction"](None, c_void_p(0x77), None, b"my_kernel", -1, *[None] * 5)
        s, a = stream(), malloc(3 * MIB)
        mark = ctypes.c_uint32.in_dll(g, "ghost_current_mark")
        mark.value = 5
        g.cudaLaunchKernel(0x77, Size(3, 4, 5), Size(32, 2, 1), None, 1024, s)
        mark.value = 6
        g.cudaMemcpyAsync(c_void_p(a), b"abc", c_size_t(3), 1, s)
        handle = c_void_p()
        g.cublasCreate_v2(byref(handle))
        g.cublasSetStream_v2(handle, s)
        g.cublasSgemm_v2(handle, 0, 0, 10, 20, 30, None, None, 10, None, 30, None, None, 10)
        g.ghost_log_enable(0)
        g.cudaMemset(c_void_p(a), 1, c_size_t(3))
        log = records()
        assert [r["kind"] for r in log] == [6, 1, 2, 13], log
        allocation, kernel, copy, product = log
        assert (allocation["address"], allocation["bytes"], allocation["mark"]) == (a, 3 * MIB, 0)
        shape = [kernel[k] for k in ("grid_x", "grid_y", "grid_z", "block", "shared", "mark")]
        assert shape == [3, 4, 5, 64, 1024, 5]
        assert kernel["stream"] == s.value == copy["stream"] == product["stream"]
        assert g.ghost_name(kernel["name"]) == b"my_kernel" and g.ghost_launches() == 1
        assert (copy["bytes"], copy["address"], copy["mark"]) == (3, a, 6)
        assert [product[k] for k in ("grid_x", "grid_y", "grid_z", "block")] == [10, 20, 30, 1]
        assert g.ghost_name(product["name"]) == b"cublasSgemm_v2"
        g.ghost_log_clear()
        assert g.ghost_log_count() == 0
    """
    ghost(program, log=1)


def test_requests_are_made_until_one_is_not_for_this_loop(ghost: Ghost) -> None:
    """An allocator that asks the card for each block; what the log says of the card carries the block's number."""
    program = """
        Take = ctypes.CFUNCTYPE(c_int, c_uint64, ctypes.POINTER(c_void_p))
        Give = ctypes.CFUNCTYPE(c_int, c_void_p)
        Enter = ctypes.CFUNCTYPE(c_int, c_void_p, ctypes.c_int32, ctypes.POINTER(c_void_p))
        given, streams = [], []

        @Take
        def take(count, address):
            streams.append(entered[-1] if entered else 0)
            return g.cudaMalloc(address, c_size_t(count))

        entered = []

        @Enter
        def enter(stream, device, guard):
            if stream == 9:
                return 1
            guard[0] = 100 + stream
            entered.append(stream)
            return 0

        @Give
        def leave(guard):
            assert guard == 100 + entered.pop()
            return 0

        @Give
        def give(address):
            given.append(address)
            return g.cudaFree(c_void_p(address))

        class Asked(ctypes.Structure):
            _fields_ = [("rows", c_void_p), ("count", c_uint64), ("made", c_uint64),
                        ("addresses", c_void_p), ("blocks", c_uint64)]

        allocator = (c_void_p * 4)(*(ctypes.cast(each, c_void_p) for each in (take, give, enter, leave)))

        def made(*rows):
            numbers = (ctypes.c_int64 * (3 * len(rows)))(*(number for row in rows for number in row))
            addresses = (c_uint64 * 8)()
            asked = Asked(ctypes.addressof(numbers), len(rows), 0, ctypes.addressof(addresses), 0)
            g.ghost_make_requests(byref(asked), byref(allocator))
            return asked.made, list(addresses)[:asked.blocks]

        MARK, ALLOC, FREE, CONNECT = range(4)
        two = ((ALLOC, 2 * MIB, 0), (ALLOC, 3 * MIB, 0))
        count, (first, second) = made((MARK, 0, 0), *two, (FREE, 0, 0), (MARK, 1, 0))
        assert count == 5 and given == [first] and first != second
        told = [(r["kind"], r["mark"], r["bytes"], r["address"]) for r in records()]
        assert told == [(6, 0, 2 * MIB, first), (6, 1, 3 * MIB, second), (7, 2, 2 * MIB, first)], told
        assert made((ALLOC, MIB, 0), (CONNECT, 8, 7), (MARK, 0, 0))[0] == 1
        streams.clear()
        assert made((ALLOC, MIB, 7), (ALLOC, MIB, 0), (MARK, 0, 0))[0] == 3 and streams == [7, 0] and not entered
        assert made((ALLOC, MIB, 9), (MARK, 0, 0))[0] == 0, "a stream that cannot be entered"
        free, _ = memory()
        assert made((ALLOC, (free - 65 * MIB) // 2, 0))[0] == 1
        free, _ = memory()
        assert made((MARK, 0, 0), (ALLOC, (free - 63 * MIB) // 2, 0))[0] == 1, "it might not fit"
        g.ghost_log_cut(1)
        assert [r["mark"] for r in records()] == [0]
    """
    ghost(program, log=1, total_bytes=2000 << 20)


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="this Linux has no huge pages")
def test_python_keeps_its_objects_where_the_ghost_says(ghost: Ghost) -> None:
    program = """
        g.ghost_arena_take.restype = c_void_p
        one, two = (g.ghost_arena_take(None, c_size_t(MIB)) for _ in range(2))
        assert two == one + MIB
        ctypes.memset(one, 1, 2 * MIB)
        g.ghost_arena_give(None, c_void_p(one), c_size_t(MIB))
        assert ctypes.string_at(two, MIB) == b"\\1" * MIB
        large = g.ghost_arena_take(None, c_size_t(5 << 30))
        assert large and not one <= large < one + (4 << 30)
        functions = [ctypes.cast(each, c_void_p) for each in (g.ghost_arena_take, g.ghost_arena_give)]
        ctypes.pythonapi.PyObject_SetArenaAllocator((c_void_p * 3)(None, *functions))
        lists = [[number] for number in range(100000)]
        assert any(two <= id(each) < one + (4 << 30) for each in lists), "the last of them are in new arenas"
        del lists
        assert sum(map(len, [[number] for number in range(100000)])) == 100000
    """
    ghost(program)


def test_cublas_handles_are_told_apart_and_lt_has_one_answer(ghost: Ghost) -> None:
    program = """
        a, b, count = c_void_p(), c_void_p(), c_int()
        g.cublasCreate_v2(byref(a)), g.cublasCreate_v2(byref(b))
        assert a.value != b.value
        results = ctypes.create_string_buffer(b"\\xee" * 96 * 3, 96 * 3)
        g.cublasLtMatmulAlgoGetHeuristic(None, None, None, None, None, None, None, 3, results, byref(count))
        assert count.value == 1 and struct.unpack_from("<Q", results.raw, 64) == (0,)
        assert results.raw[96:] == b"\\xee" * 192
    """
    ghost(program)


def test_what_transformer_engine_loads_is_there(ghost: Ghost) -> None:
    program = """
        for part in ("adv", "cnn", "engines_precompiled", "engines_runtime_compiled", "graph", "heuristic", "ops"):
            ctypes.CDLL(f"{FOLDER}/libcudnn_{part}.so.9")
        count, found = c_int(), (c_int * 16)()
        assert g.nvrtcGetNumSupportedArchs(byref(count)) == 0 == g.nvrtcGetSupportedArchs(found)
        architectures = list(found)[: count.value]
        assert {80, 90, 100} < set(architectures) and architectures == sorted(architectures)
        assert not found[count.value]
    """
    ghost(program)


# ---- what is not modelled


def test_unknown_calls_succeed_and_are_counted(ghost: Ghost) -> None:
    program = """
        import json
        solver = ctypes.CDLL(f"{FOLDER}/libcusolver.so.12")
        runtime = ctypes.CDLL(f"{FOLDER}/libcudart.so.13")
        size = c_int(77)
        assert solver.cusolverDnSgetrf_bufferSize(None, 8, 8, None, 8, byref(size)) == 0 and size.value == 0
        assert runtime.cudaGraphAddEmptyNode(None, None, None, None) == 0
        assert runtime.cudaGraphAddEmptyNode(None, None, None, None) == 0
        found = c_void_p()
        ctypes.CDLL(f"{FOLDER}/libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        assert g.cudaGetDriverEntryPointByVersion(b"cuBrandNew", byref(found), 13000, c_uint64(0), None) == 0
        assert ctypes.CFUNCTYPE(c_int)(found.value)() == 0
        assert json.loads(text_of("ghost_unknown_calls")) == {
            "libcudart.so.13:cudaGraphAddEmptyNode": 2, "by name:cuBrandNew": 1}
        assert json.loads(text_of("ghost_unknown_workspaces")) == {"libcusolver.so.12:cusolverDnSgetrf_bufferSize": 1}
    """
    ghost(program)


def test_recurrent_networks_have_the_bytes_that_real_cards_showed(ghost: Ghost) -> None:
    """Two layers of 512 on an H200, one of 800 both ways, four of 320 on a P100: what is kept for backward."""
    program = """
        import json
        dnn = ctypes.CDLL(f"{FOLDER}/libcudnn.so.9")
        LSTM, GRU, FP32, BF16 = 2, 3, 0, 9
        def sizes(cell, kind, wide, hidden, layers, steps, batch, both=0):
            network, sequences = c_void_p(), c_void_p()
            dnn.cudnnCreateRNNDescriptor(byref(network))
            shape = (wide, hidden, hidden, layers)
            dnn.cudnnSetRNNDescriptor_v8(network, 0, cell, 2, both, 0, kind, kind, 0, *shape, None, 0)
            dnn.cudnnCreateRNNDataDescriptor(byref(sequences))
            dnn.cudnnSetRNNDataDescriptor(sequences, kind, 0, steps, batch, wide, None, None)
            found = [c_uint64(), c_uint64(), c_uint64(), c_uint64()]
            weights, work, trained, inferred = map(byref, found)
            dnn.cudnnGetRNNWeightSpaceSize(None, network, weights)
            dnn.cudnnGetRNNTempSpaceSizes(None, network, 1, sequences, work, trained)
            dnn.cudnnGetRNNTempSpaceSizes(None, network, 0, sequences, None, inferred)
            return [each.value for each in found]
        assert sizes(LSTM, FP32, 512, 512, 2, 128, 16) == [16809984, 0, 46137600, 0]
        assert sizes(LSTM, BF16, 512, 512, 2, 128, 16) == [8404992, 0, 23068928, 0]
        assert sizes(GRU, FP32, 512, 512, 2, 128, 16) == [12607488, 0, 54526208, 0]
        assert sizes(GRU, BF16, 512, 512, 2, 128, 16) == [6303744, 0, 27263232, 0]
        assert sizes(LSTM, FP32, 123, 320, 4, 1000, 25)[2] == 736000000 + 256
        assert sizes(GRU, FP32, 123, 320, 4, 1000, 25)[2] == 864000000 + 256
        assert sizes(GRU, FP32, 672, 800, 1, 326, 64, both=1)[2] == 801177600 + 256
        assert sizes(1, FP32, 123, 320, 4, 1000, 25)[2] == 0
        assert json.loads(text_of("ghost_unknown_workspaces")) == {
            "modelled:cudnnGetRNNTempSpaceSizes, workspace": 8,
            "modelled:cudnnGetRNNTempSpaceSizes, kept for backward": 1}
    """
    ghost(program)


def test_driver_functions_are_found_by_name_and_version(ghost: Ghost) -> None:
    program = """
        driver = ctypes.CDLL(f"{FOLDER}/libcuda.so.1")
        def find(name, version):
            found = c_void_p()
            assert g.cuGetProcAddress_v2(name, byref(found), version, c_uint64(0), None) == 0
            return found.value
        address = lambda name: ctypes.cast(driver[name], c_void_p).value
        assert find(b"cuMemAlloc", 12000) == address("cuMemAlloc_v2")
        assert find(b"cuMemCreate", 12000) == address("cuMemCreate")
        assert find(b"cuGetProcAddress", 12000) == address("cuGetProcAddress_v2")
        assert find(b"cuGetProcAddress", 11030) == address("cuGetProcAddress")
    """
    ghost(program)


def test_per_thread_variants_are_the_same_functions(ghost: Ghost) -> None:
    program = """
        runtime = ctypes.CDLL(f"{FOLDER}/libcudart.so.13")
        a = malloc(100)
        assert runtime.cudaMemcpyAsync_ptsz(c_void_p(a), b"abc", c_size_t(3), 1, None) == 0
        assert from_card(a, 3) == b"abc"
        nccl = ctypes.CDLL(f"{FOLDER}/libnccl.so.2")
        version = c_int()
        assert nccl.pncclGetVersion(byref(version)) == 0 and version.value > 22000
    """
    ghost(program)


def test_the_report_is_a_line_of_json_of_each_process(ghost: Ghost, tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    for _ in range(2):
        ghost("malloc(3 * MIB)", report=report)
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    assert [line["device_peak_bytes"] for line in lines] == [[4 << 20]] * 2
    assert len({line["pid"] for line in lines}) == 2
    assert lines[0]["unknown_calls"] == {}


# ---- settings


def test_settings_are_refused_once_a_device_is_used(ghost: Ghost) -> None:
    program = """
        assert g.ghost_set(b"TOTAL_BYTES", b"%d" % (50 * MIB)) == 0
        assert g.ghost_set(b"TOTAL_BYTES", b"many") == 1 and g.ghost_set(b"COLOUR", b"red") == 1
        assert memory() == (50 * MIB, 50 * MIB)
        assert g.ghost_set(b"TOTAL_BYTES", b"1000") == 2
        assert memory() == (50 * MIB, 50 * MIB)
    """
    ghost(program)


def test_each_forked_child_has_its_own_card(ghost: Ghost) -> None:
    program = """
        count = c_int()
        g.cudaGetDeviceCount(byref(count))
        for size in (30, 60):
            child = os.fork()
            if child == 0:
                ok = g.ghost_set(b"TOTAL_BYTES", b"%d" % (size * MIB)) == 0 and malloc(20 * MIB)
                os._exit(0 if ok and memory() == ((size - 20) * MIB, size * MIB) else 1)
            assert os.waitpid(child, 0)[1] == 0
        assert g.ghost_device_used(0) == 0
    """
    ghost(program)


# ---- cards that processes share


@pytest.fixture
def account(tmp_path: Path) -> Path:
    cards.create(tmp_path / "cards")
    return tmp_path / "cards"


HOLDS = """
    import sys
    assert g.cudaSetDevice(1) == 0 and malloc(20 * MIB)
    print("held", flush=True)
    sys.stdin.read()
"""


def test_processes_on_one_card_have_its_memory_between_them(ghost: Ghost, account: Path) -> None:
    program = """
        import signal, subprocess, sys, time
        other = subprocess.Popen([sys.executable, "-c", os.environ["GHOST_HOLDS"]], stdin=-1, stdout=-1)
        assert other.stdout.readline() == b"held\\n"
        device, count, processes = c_void_p(), ctypes.c_uint(5), ctypes.create_string_buffer(24 * 5)
        g.nvmlDeviceGetHandleByIndex_v2(1, byref(device))
        assert g.nvmlDeviceGetComputeRunningProcesses_v3(device, byref(count), processes) == 0
        assert (count.value, struct.unpack_from("<IxxxxQ", processes.raw)) == (1, (other.pid, 21 * MIB))
        malloc(30 * MIB)
        assert memory() == (19 * MIB, 50 * MIB), "nobody else is on the first card"
        assert g.cudaSetDevice(1) == 0 and memory() == (28 * MIB, 50 * MIB)
        place = malloc(18 * MIB)
        pointer = c_void_p()
        assert g.cudaMalloc(byref(pointer), c_size_t(12 * MIB)) == 2
        assert g.cudaFree(c_void_p(place)) == 0
        other.kill()
        while open(f"/proc/{other.pid}/stat").read().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        assert malloc(40 * MIB) and memory() == (9 * MIB, 50 * MIB), "what a process had that was killed is free"
        assert g.nvmlDeviceGetComputeRunningProcesses_v3(device, byref(count), processes) == 0
        assert (count.value, struct.unpack_from("<IxxxxQ", processes.raw)) == (1, (os.getpid(), 41 * MIB))
        print(other.pid, os.getpid())
    """
    holds = "from native_prelude import *\n" + textwrap.dedent(HOLDS)
    settings = {"devices": 2, "total_bytes": 50 << 20, "context_bytes": 1 << 20, "cards": account}
    other, mine = map(int, ghost(program, holds=holds, **settings).split())
    first, second = cards.read(account)
    assert (first.index, first.peak_bytes, [each.process for each in first.holders]) == (0, 31 << 20, [mine])
    assert (second.index, second.peak_bytes) == (1, 41 << 20)
    assert [(each.process, each.held_bytes >> 20, each.peak_bytes >> 20) for each in second.holders] == [
        (other, 0, 21),
        (mine, 41, 41),
    ]


def test_a_full_card_has_no_room_for_another_context(ghost: Ghost, account: Path) -> None:
    program = """
        if os.fork() == 0:
            os._exit(0 if malloc(46 * MIB) else 1)
        assert os.wait()[1] == 0
        assert memory() == (47 * MIB, 50 * MIB), "the first has ended"
        child = os.fork()
        if child == 0:
            os.execv(sys.executable, [sys.executable, "-c", os.environ["GHOST_LATER"]])
        malloc(45 * MIB)
        os.kill(child, 10)
        assert os.wait()[1] == 0
    """
    later = """
        import signal
        signal.sigwait([10])
        assert g.cudaSetDevice(0) == 2 and g.cudaMalloc(byref(c_void_p()), c_size_t(2 * MIB)) == 2
    """
    program = "import signal, sys\nsignal.pthread_sigmask(signal.SIG_BLOCK, [10])\n" + textwrap.dedent(program)
    settings = {"total_bytes": 50 << 20, "context_bytes": 3 << 20, "cards": account}
    ghost(program, later="from native_prelude import *\n" + textwrap.dedent(later), **settings)


def test_processes_that_end_leave_room_for_any_number_of_others(ghost: Ghost, account: Path) -> None:
    program = """
        for _ in range(300):
            if os.fork() == 0:
                os._exit(0 if malloc(30 * MIB) else 1)
            assert os.wait()[1] == 0
    """
    ghost(program, total_bytes=50 << 20, cards=account)


def test_many_processes_at_once_never_take_more_than_there_is(ghost: Ghost, account: Path) -> None:
    program = """
        children = []
        for _ in range(4):
            children.append(os.fork())
            if not children[-1]:
                pointer, taken = c_void_p(), 0
                for _ in range(500):
                    if g.cudaMalloc(byref(pointer), c_size_t(2 * MIB)) == 0:
                        assert memory()[0] <= 46 * MIB
                        assert g.cudaFree(pointer) == 0
                os._exit(0)
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
        assert memory() == (48 * MIB, 48 * MIB)
    """
    ghost(program, total_bytes=48 << 20, cards=account)
    (card,) = cards.read(account)
    assert 2 << 20 <= card.peak_bytes <= 8 << 20
    assert sum(each.held_bytes for each in card.holders) == card.peak_bytes


def test_a_file_of_another_size_is_not_used(ghost: Ghost, tmp_path: Path) -> None:
    (tmp_path / "cards").write_bytes(b"x")
    process = ghost.start("assert memory() == (5 * MIB, 5 * MIB)", total_bytes=5 << 20, cards=tmp_path / "cards")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "this process has cards of its own" in err


# ---- NVML


def test_nvml_shows_the_card_and_this_process(ghost: Ghost) -> None:
    program = """
        device, count = c_void_p(), ctypes.c_uint(5)
        assert g.nvmlInit_v2() == 0 and g.nvmlDeviceGetHandleByIndex_v2(1, byref(device)) == 0
        assert g.nvmlDeviceGetHandleByIndex_v2(2, byref(c_void_p())) == 2
        values = (c_uint64 * 3)()
        g.cudaSetDevice(1)
        malloc(10 * MIB)
        assert g.nvmlDeviceGetMemoryInfo(device, values) == 0
        total, free, used = values
        assert total == 1 << 30 and free == 990 * MIB and used == total - free
        processes = ctypes.create_string_buffer(24 * 5)
        assert g.nvmlDeviceGetComputeRunningProcesses_v3(device, byref(count), processes) == 0
        assert count.value == 1
        assert struct.unpack_from("<IxxxxQ", processes.raw) == (os.getpid(), 10 * MIB)
        fabric = ctypes.create_string_buffer(struct.pack("<I", 2 << 24 | 40) + b"\\xee" * 36, 40)
        assert g.nvmlDeviceGetGpuFabricInfoV(device, fabric) == 0 and fabric.raw[4:] == bytes(36)
    """
    ghost(program, devices=2, total_bytes=1000 << 20)


@pytest.mark.parametrize(
    ("visible", "cards"),
    [("2,0", [2, 0]), ("1", [1]), ("", []), ("0,9,1", [0]), ("-1", []), ("1,1", []),
     ("GPU-67686f73-7420-4750-5520-6e756d626503", [3])],
)  # fmt: skip
def test_cuda_visible_devices_chooses_among_the_cards(visible: str, cards: list[int], ghost: Ghost) -> None:
    program = f"""
        os.environ["CUDA_VISIBLE_DEVICES"] = {visible!r}  # as scripts do, before the first question
        count, cards = c_int(), {cards!r}
        assert g.cudaGetDeviceCount(byref(count)) == (0 if cards else 100) and count.value == len(cards)
        for device, card in enumerate(cards):
            text = ctypes.create_string_buffer(20)
            assert g.cudaDeviceGetPCIBusId(text, 20, device) == 0
            assert text.value == b"0000:%02x:00.0" % (card + 1)
        everything, handle, memory_info = ctypes.c_uint(), c_void_p(), (c_uint64 * 3)()
        assert g.nvmlDeviceGetCount_v2(byref(everything)) == 0 and everything.value == 4
        if cards:
            malloc(6 * MIB)  # on the first visible card
        for card in range(4):
            g.nvmlDeviceGetHandleByIndex_v2(card, byref(handle))
            g.nvmlDeviceGetMemoryInfo(handle, memory_info)
            assert memory_info[1] == (94 if cards and card == cards[0] else 100) * MIB
    """
    ghost(program, devices=4, total_bytes=100 << 20)


# ---- NCCL


def test_one_rank_of_1024_has_equals(ghost: Ghost) -> None:
    program = """
        c = communicator(1024, 3, "alone")
        count = c_int()
        assert g.ncclCommCount(c, byref(count)) == 0 and count.value == 1024
        a, result = put_numbers(5, 6), malloc(8 * 2 * 1024)
        g.ncclAllReduce(c_void_p(a), c_void_p(result), c_size_t(2), INT64, SUM, c, None)
        assert numbers(result, 2) == [5 * 1024, 6 * 1024]
        g.ncclAllReduce(c_void_p(a), c_void_p(result), c_size_t(2), INT64, AVG, c, None)
        assert numbers(result, 2) == [5, 6]
        g.ncclAllGather(c_void_p(a), c_void_p(result), c_size_t(2), INT64, c, None)
        assert numbers(result, 2048) == [5, 6] * 1024
        collective = [r for r in records() if r["kind"] == 12][-1]
        assert g.ghost_name(collective["name"]) == b"AllGather"
        assert [collective[k] for k in ("flags", "bytes", "grid_x", "grid_z")] == [INT64, 16, 1024, 3]
        part = c_void_p()
        g.ghost_nccl_next_split(8)
        assert g.ncclCommSplit(c, 1, 2, byref(part), None) == 0
        g.ncclCommCount(part, byref(count))
        assert count.value == 8
        assert g.ncclCommSplit(c, -1, 0, byref(part), None) == 0 and part.value is None
        assert g.ncclCommDestroy(c) == 0
    """
    ghost(program, log=1)


def test_broadcasts_from_every_rank_in_one_group_are_a_gathering(ghost: Ghost) -> None:
    program = """
        c = communicator(4, 2, "pieces")
        mine, parts, other = put_numbers(146), malloc(8 * 8), malloc(8)
        g.ncclGroupStart()
        for gathering in range(2):
            for root in range(4):
                part = c_void_p(parts + 8 * (4 * gathering + root))
                send = c_void_p(mine) if root == 2 else part
                assert g.ncclBroadcast(send, part, c_size_t(1), INT64, root, c, None) == 0
        assert g.ncclGroupEnd() == 0
        assert numbers(parts, 8) == [146] * 8
        g.ncclGroupStart()
        assert g.ncclBroadcast(c_void_p(mine), c_void_p(mine), c_size_t(1), INT64, 2, c, None) == 0
        assert g.ncclBroadcast(c_void_p(other), c_void_p(other), c_size_t(1), INT64, 0, c, None) == 0
        assert g.ncclGroupEnd() == 0
        assert numbers(other, 1) == [0], "what another rank alone sends is not known"
    """
    ghost(program)


RANKS = """
    import sys
    rank, ranks = int(os.environ["GHOST_TEST_RANK"]), 3
    assert g.cudaSetDevice(rank) == 0
    c = communicator(ranks, rank, "together")
    a, out = put_numbers(rank + 1, 10 * rank, 7), malloc(8 * 9)
    sums = {SUM: [6, 30, 21], PROD: [6, 0, 343], MAX: [3, 20, 7], MIN: [1, 0, 7], AVG: [2, 10, 7]}
    for op, expected in sums.items():
        assert g.ncclAllReduce(c_void_p(a), c_void_p(out), c_size_t(3), INT64, op, c, None) == 0
        assert numbers(out, 3) == expected, (op, numbers(out, 3))
    assert g.ncclBroadcast(c_void_p(a), c_void_p(out), c_size_t(3), INT64, 2, c, None) == 0
    assert numbers(out, 3) == [3, 20, 7]
    assert g.ncclAllGather(c_void_p(a), c_void_p(out), c_size_t(3), INT64, c, None) == 0
    assert numbers(out, 9) == [1, 0, 7, 2, 10, 7, 3, 20, 7]
    assert g.ncclReduceScatter(c_void_p(a), c_void_p(out), c_size_t(1), INT64, SUM, c, None) == 0
    assert numbers(out, 1) == [[6], [30], [21]][rank]
    assert g.ncclAlltoAll(c_void_p(a), c_void_p(out), c_size_t(1), INT64, c, None) == 0
    assert numbers(out, 3) == [[1, 2, 3], [0, 10, 20], [7, 7, 7]][rank]
    half = malloc(2)
    to_card(half, struct.pack("<f", rank + 0.5)[2:])
    assert g.ncclAllReduce(c_void_p(half), c_void_p(half), c_size_t(1), BFLOAT16, SUM, c, None) == 0
    assert struct.unpack("<f", bytes(2) + from_card(half, 2)) == (4.5,)
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    for message in range(3):  # sends run ahead of their receivers
        here = put_numbers(100 * rank + message)
        assert g.ncclSend(c_void_p(here), c_size_t(1), INT64, right, c, None) == 0
    g.ncclGroupStart()
    for message in range(3):
        assert g.ncclRecv(c_void_p(out + 8 * message), c_size_t(1), INT64, left, c, None) == 0
    assert g.ncclGroupEnd() == 0
    assert numbers(out, 3) == [100 * left + message for message in range(3)]
    large = malloc(16 * MIB)
    assert g.ncclAllReduce(c_void_p(large), c_void_p(large), c_size_t(MIB), INT64, SUM, c, None) == 0
    part, count, mine = c_void_p(), c_int(), c_int()
    assert g.ncclCommSplit(c, rank == 1, -rank, byref(part), None) == 0
    g.ncclCommCount(part, byref(count)), g.ncclCommUserRank(part, byref(mine))
    assert (count.value, mine.value) == [(2, 1), (1, 0), (2, 0)][rank], (count.value, mine.value)
    assert g.ncclAllReduce(c_void_p(a), c_void_p(out), c_size_t(1), INT64, SUM, part, None) == 0
    assert numbers(out, 1) == [4 if rank != 1 else 2]
"""


def test_real_ranks_exchange_small_payloads(ghost: Ghost, tmp_path: Path) -> None:
    settings = {"real_ranks": 3, "devices": 3, "shm": f"test-{os.getpid()}"}
    processes = [ghost.start(RANKS, test_rank=rank, **settings) for rank in range(3)]
    for process in processes:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    left = [path.name for path in Path("/dev/shm").glob(f"ghost-test-{os.getpid()}-*")]
    assert left == []


def test_a_rank_that_ends_is_named_and_does_not_hang_the_others(ghost: Ghost) -> None:
    program = """
        rank = int(os.environ["GHOST_TEST_RANK"])
        assert g.cudaSetDevice(rank) == 0
        c = communicator(2, rank, "one leaves")
        if rank == 1:
            os._exit(0)
        a = put_numbers(1)
        assert g.ncclAllReduce(c_void_p(a), c_void_p(a), c_size_t(1), INT64, SUM, c, None) == 6
    """
    settings = {"real_ranks": 2, "devices": 2, "shm": f"test-{os.getpid()}"}
    processes = [ghost.start(program, test_rank=rank, **settings) for rank in range(2)]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert "rank 0 of 2 waits in AllReduce for rank 1" in errors[0]
    assert "has ended" in errors[0]


NCCL = {"nccl_bytes": f"1:{4 << 20},2:{8 << 20},8:{16 << 20},1000:{64 << 20}", "nccl_peer_bytes": 2 << 20}


def test_a_communicator_takes_its_buffers_at_its_first_collective_and_gives_them_back(ghost: Ghost) -> None:
    program = """
        a, other, free = put_numbers(1), malloc(8), memory()[0]
        for ranks, taken in ((1, 4), (2, 8), (3, 16), (8, 16), (9, 64), (1000, 64), (1001, 0)):
            c = communicator(ranks, 0, f"of {ranks}")
            assert memory()[0] == free, "before it is used"
            for _ in range(2):
                assert g.ncclAllReduce(c_void_p(a), c_void_p(a), c_size_t(1), INT64, SUM, c, None) == 0
                assert memory()[0] == free - taken * MIB, ranks
            assert g.ncclCommDestroy(c) == 0
            assert memory()[0] == free
    """
    ghost(program, **NCCL)


def test_direct_messages_take_buffers_for_each_peer_once_and_for_so_many_at_most(ghost: Ghost) -> None:
    program = """
        a, free = malloc(8 * 8), memory()[0]
        def taken():
            return (free - memory()[0]) // MIB
        c, pair = communicator(8, 2, "eight"), communicator(2, 0, "two")
        send = lambda peer, to: g.ncclSend(c_void_p(a), c_size_t(1), INT64, peer, to, None)
        assert send(1, pair) == 0 and taken() == 8, "the communicator's own serve two"
        assert send(5, c) == 0 and taken() == 8 + 16 + 2
        assert send(2, c) == 0 and send(5, c) == 0 and taken() == 8 + 16 + 2, "itself, and one met before"
        assert g.ncclRecv(c_void_p(a), c_size_t(1), INT64, 5, c, None) == 0 and taken() == 26
        assert g.ncclAlltoAll(c_void_p(a), c_void_p(a), c_size_t(1), INT64, c, None) == 0
        assert taken() == 8 + 16 + 5 * 2, "seven others, of which five are counted"
        other = communicator(8, 2, "eight more")
        assert send(0, other) == 0 and taken() == 34 + 16
        assert g.ncclCommDestroy(c) == 0 and taken() == 8 + 16
        assert g.ncclCommDestroy(other) == 0 and g.ncclCommDestroy(pair) == 0 and taken() == 0
    """
    ghost(program, nccl_peers=5, total_bytes=1 << 30, **NCCL)


def test_a_card_too_full_for_nccls_buffers_is_an_error_in_its_words(ghost: Ghost) -> None:
    program = """
        g.ncclGetLastError.restype = c_char_p
        a = put_numbers(1)
        full, c = malloc(memory()[0] - 10 * MIB), communicator(8, 0, "late")
        reduce = lambda: g.ncclAllReduce(c_void_p(a), c_void_p(a), c_size_t(1), INT64, SUM, c, None)
        before = g.ghost_log_count()
        assert reduce() == 1 and g.ncclGetLastError(c) == b"Cuda failure 2 'out of memory'"
        assert g.ncclGroupStart() == 0 and reduce() == 0 and g.ncclGroupEnd() == 1, "a group tells it at its end"
        assert g.ghost_log_count() == before, "it is not done"
        assert memory()[0] == 10 * MIB
        g.cudaFree(c_void_p(full))
        assert g.ncclGroupStart() == 0 and reduce() == 0 and g.ncclGroupEnd() == 0 and reduce() == 0
        assert numbers(a, 1) == [64]
    """
    ghost(program, log=1, total_bytes=1 << 30, **NCCL)


def test_steps_made_without_their_exchanges_take_what_nccl_does(ghost: Ghost) -> None:
    program = """
        free = memory()[0]
        for ranks, peers, taken in ((8, 0, 16), (0, 3, 22), (2, 9, 34), (0, 1, 34)):
            assert g.ghost_nccl_take(ranks, peers) == 0
            assert memory()[0] == free - taken * MIB
        malloc(memory()[0])
        assert g.ghost_nccl_take(1, 0) == 1 and g.ghost_nccl_take(0, 0) == 0
    """
    ghost(program, nccl_peers=5, total_bytes=1 << 30, **NCCL)


@pytest.mark.parametrize("gpu", ["h100", "2xh100", "8xh100", "4x8xh100", "2x4xh100", "4x1xh100"])
def test_what_nccl_takes_is_what_the_catalog_reckons_with(ghost: Ghost, gpu: str) -> None:
    cluster = parse_cluster(gpu)
    settings = {name.removeprefix("GHOST_").lower(): value for name, value in ghost_settings(cluster).items()}
    out = ghost(
        """
        a, free = malloc(8 * 64), memory()[0]
        for ranks in (1, 2, 3, 4, 8, 9, 32):
            c = communicator(ranks, 0, f"of {ranks}")
            assert g.ncclAllReduce(c_void_p(a), c_void_p(a), c_size_t(1), INT64, SUM, c, None) == 0
            print(ranks, 0, free - memory()[0])
            assert g.ncclAlltoAll(c_void_p(a), c_void_p(a), c_size_t(1), INT64, c, None) == 0
            print(ranks, ranks - 1 if ranks > 2 else 0, free - memory()[0])
            assert g.ncclCommDestroy(c) == 0
        """,
        **settings,
    )
    lines = out.splitlines()
    assert len(lines) == 14
    for ranks, peers, taken in (map(int, line.split()) for line in lines):
        per_node = cluster.gpus_per_node
        reckoned = overheads(cluster.device, [ranks], gpus_per_node=per_node, send_recv_peers=peers)
        assert taken == reckoned.nccl_bytes, (ranks, peers)


def test_two_ranks_on_one_card_are_refused_as_nccl_does(ghost: Ghost) -> None:
    program = """
        rank, made = int(os.environ["GHOST_TEST_RANK"]), c_void_p()
        g.ncclGetLastError.restype = c_char_p
        assert g.ncclCommInitRank(byref(made), 2, UniqueId(b"one card"), rank) == 5
        said = f"Duplicate GPU detected : rank {rank} and rank {1 - rank} both on CUDA device 1000"
        assert g.ncclGetLastError(None) == said.encode()
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        communicator(2, rank, "of several on one card")
    """
    settings = {"real_ranks": 2, "shm": f"test-{os.getpid()}"}
    processes = [ghost.start(program, test_rank=rank, **settings) for rank in range(2)]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors


def test_a_rank_that_never_comes_is_said_after_the_time_out(ghost: Ghost) -> None:
    program = """
        made = c_void_p()
        assert g.ncclCommInitRank(byref(made), 2, UniqueId(b"nobody"), 0) == 2
    """
    process = ghost.start(program, real_ranks=2, timeout_seconds=1, shm=f"test-{os.getpid()}")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0
    assert "did not come in time" in err
    assert list(Path("/dev/shm").glob(f"ghost-test-{os.getpid()}-*")) == []


@pytest.mark.skipif(
    tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14), reason="Linux before 5.14 cannot be asked for pages"
)
def test_a_full_shared_memory_is_said_and_kills_nobody(ghost: Ghost) -> None:
    """In a name space of its own, with a /dev/shm of one page that is taken."""
    program = """
        libc, new_mounts, new_users = ctypes.CDLL(None), 0x00020000, 0x10000000
        maps = {"uid_map": f"0 {os.getuid()} 1", "setgroups": "deny", "gid_map": f"0 {os.getgid()} 1"}
        made = libc.unshare(new_mounts | new_users) == 0
        for name, text in maps.items() if made else ():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        if not made or libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, b"size=4k"):
            print("not here")
            raise SystemExit
        with open("/dev/shm/other", "wb") as file:
            file.write(bytes(4096))
        made = c_void_p()
        assert g.ncclCommInitRank(byref(made), 2, UniqueId(b"full"), 0) == 2
        assert os.listdir("/dev/shm") == ["other"]
    """
    process = ghost.start(program, real_ranks=2, shm=f"test-{os.getpid()}")
    out, err = process.communicate(timeout=300)
    if "not here" in out:
        pytest.skip("this machine lets nobody mount a file system of his own")
    assert process.returncode == 0, err
    assert "/dev/shm has no room for 12288 bytes that ranks exchange; enlarge it or empty it" in err


def test_registers_and_names_are_those_of_the_machine_code(
    ghost: Ghost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cubin as ptxas writes it: sections, symbols, and the attribute that has a kernel's registers."""
    monkeypatch.chdir(tmp_path)
    out = ghost("""
        names, strings = b"\\0.nv.info\\0.symtab\\0.strtab\\0.shstrtab\\0", b"\\0small\\0large\\0inner\\0"
        flags = {0: 0, 1: 0x10, 7: 0x10, 13: 0}  # the last one is called by kernels only
        symbols = b"".join(struct.pack("<IBBHQQ", name, 2, flag, 0, 0, 0) for name, flag in flags.items())
        info = struct.pack("<BBH", 1, 0x13, 0)  # an attribute without values
        info += b"".join(struct.pack("<BBHII", 4, 0x2F, 8, index, count) for index, count in ((2, 168), (1, 40)))
        info += struct.pack("<BBHII", 4, 0x11, 8, 1, 0)  # another one
        parts, offset, sections = [info, symbols, strings, names], 64, [bytes(64)]
        for (kind, link, name), part in zip(((1, 0, 1), (2, 3, 10), (3, 0, 18), (3, 0, 26)), parts):
            sections.append(struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, offset, len(part), link, 0, 1, 0))
            offset += len(part)
        header = b"\\x7fELF\\x02\\x01\\x01" + bytes(9)
        header += struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, offset, 0, 64, 0, 0, 64, 5, 4)
        image = header + b"".join(parts) + b"".join(sections)
        module, function, value = c_void_p(), c_void_p(), c_int()
        for code in (image, b"no machine code" * 8):
            assert g.cuModuleLoadData(byref(module), code) == 0
            for kernel in (b"small", b"large", b"other"):
                assert g.cuModuleGetFunction(byref(function), module, kernel) == 0
                assert g.cuFuncGetAttribute(byref(value), 4, function) == 0
                print(value.value)
        with open("code.cubin", "wb") as file:
            file.write(image)
        library, count, kernels, text = c_void_p(), c_int(), (c_void_p * 4)(), c_char_p()
        path = c_char_p(b"code.cubin")
        assert g.cuLibraryLoadFromFile(byref(library), path, None, None, 0, None, None, 0) == 0
        assert g.cuLibraryGetKernelCount(byref(count), library) == 0
        assert g.cuLibraryEnumerateKernels(kernels, 4, library) == 0
        for kernel in kernels[: count.value]:
            assert g.cuKernelGetName(byref(text), c_void_p(kernel)) == 0
            print(text.value.decode())
        assert g.cuModuleLoad(byref(module), c_char_p(b"none.cubin")) == 301
    """)
    assert out.split() == ["40", "168", "32", "32", "32", "32", "small", "large"]


@pytest.mark.parametrize("major", build.MAJORS)
def test_programs_that_link_the_driver_find_it(major: int, libraries: Path, tmp_path: Path) -> None:
    """triton up to 3.4 compiles a small library with `-lcuda`."""
    source, target, folder = tmp_path / "a.c", tmp_path / "a.so", libraries / f"cuda{major}"
    source.write_text("int cuInit(unsigned); int begin(void) { return cuInit(0); }")
    link = ["-shared", "-fPIC", f"-L{folder}", "-lcuda", f"-Wl,-rpath,{folder}"]
    build.run([*build.compiler(), "-o", str(target), str(source), *link])
    program = f"""
import ctypes, sys
ctypes.CDLL({str(folder / "libghost.so")!r}, mode=ctypes.RTLD_GLOBAL)  # as in a ghosted process
sys.exit(ctypes.CDLL({str(target)!r}).begin())
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
