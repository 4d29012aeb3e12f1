"""The options of PYTORCH_ALLOC_CONF that change device memory, and the sizes of blocks and segments.

Accepted values and their meaning were compared with the parser inside the torch 2.13 binary
(`tests/allocator/test_allocator_against_torch.py`).  This parser is stricter: it also refuses fractions such as
`128.5` and signs, which torch silently truncates or wraps around.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from tonnage.errors import UsageError
from tonnage.units import MIB

MIN_BLOCK_BYTES: Final = 512
"""Unit of block sizes: each is a multiple of it (kMinBlockSize)."""
SMALL_BYTES: Final = MIB
"""Largest rounded size that the small pool serves (kSmallSize)."""
SMALL_SEGMENT_BYTES: Final = 2 * MIB
"""Size of a segment of the small pool (kSmallBuffer), and page size of its expandable segments."""
MIN_LARGE_BYTES: Final = 10 * MIB
"""Smallest request that gets a segment of its own size (kMinLargeAlloc)."""
LARGE_ROUNDING_BYTES: Final = 2 * MIB
"""Unit to which segments of a request's own size are rounded (kRoundLarge)."""
LARGE_SEGMENT_BYTES: Final = 20 * MIB
"""Size of a segment for requests between 1 and 10 MiB, and page size of large expandable segments."""

VARIABLE: Final = "PYTORCH_ALLOC_CONF"
"""Environment variable from which torch reads the options."""
OLD_VARIABLE: Final = "PYTORCH_CUDA_ALLOC_CONF"
"""Its name before torch 2.10; torch 2.9 calls it deprecated, but its CUDA allocator reads no other."""
_RENAMED: Final = (2, 10)

_DIVISION_ENTRIES: Final = 16  # one for each power of two from 1 MiB to 32 GiB; the last one also for larger sizes

TieRule = Literal["address", "block", "segment"]
"""Rule that chooses between free blocks of equal size: see `tie_rule`."""


def version_numbers(torch_version: str) -> tuple[int, int]:
    """Return (2, 13) for `2.13.0+cu130`, `2.13` or `2.13.0a0`.  Raises UsageError."""
    match = re.match(r"(\d+)\.(\d+)", torch_version)
    if match is None:
        raise UsageError(f"{torch_version!r} is not a torch version such as 2.13.0.")
    return int(match[1]), int(match[2])


def tie_rule(torch_version: str) -> TieRule:
    """Return the rule by which this torch chooses among free blocks of equal size on one stream.

    Up to 2.11 it takes the lowest address; 2.12 the Block object created first; since 2.13 the segment obtained
    first, then the lowest address.  Sources: the comparators' names in the binaries (`BlockComparatorSize`,
    `BlockComparatorRegistrationCounter`, `BlockComparatorSizeCounterAddress`); pull requests 178362 and 183591.
    """
    version = version_numbers(torch_version)
    if version <= (2, 11):
        return "address"
    return "block" if version == (2, 12) else "segment"


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """Options of the caching allocator, with torch's defaults."""

    expandable_segments: bool = False
    """True for one growing address range for each stream and pool, instead of one segment for each cudaMalloc."""
    max_split_bytes: int | None = None
    """Size from which blocks are never split; None: all blocks may be split."""
    max_non_split_rounding_bytes: int = 20 * MIB
    """Maximum by which a block that may not be split can exceed the request that it serves."""
    roundup_power2_divisions: tuple[int, ...] = (0,) * _DIVISION_ENTRIES
    """Steps between powers of two for sizes from 1, 2, 4 ... MiB; 0 and 1: multiples of 512 bytes."""
    garbage_collection_threshold: float | None = None
    """Fraction of the allowed memory above which old unsplit blocks are given back before new segments."""
    per_process_memory_fraction: float = 1.0
    """Fraction of the device's total memory that may be reserved; 1.0: no limit."""
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    """Size of segments for requests between 1 and 10 MiB, and page size of large expandable segments."""
    throw_on_cudamalloc_oom: bool = False
    """True to refuse a request that would exceed the fraction at once, before cached memory is given back."""

    @classmethod
    def parse(cls, text: str, *, torch_version: str | None = None) -> "AllocatorSettings":
        """Return the settings of a PYTORCH_ALLOC_CONF text, e.g. `expandable_segments:True,max_split_size_mb:128`.

        With `torch_version`, options that this torch does not know yet are refused, as that torch does.
        Raises UsageError.
        """
        settings = cls()
        for name, value in _split_pairs(_split_tokens(text)):
            if torch_version is not None:
                _check_known(name, torch_version)
            settings = replace(settings, **_parse_option(name, value))
        _check_split_size(settings)
        return settings

    def round_size(self, size_bytes: int) -> int:
        """Return the block size for a request of `size_bytes` (round_size in the C++ source)."""
        if size_bytes < MIN_BLOCK_BYTES:
            return MIN_BLOCK_BYTES
        divisions = self._divisions(size_bytes)
        if divisions > 1 and size_bytes > MIN_BLOCK_BYTES * divisions:
            return _round_up_between_powers(size_bytes, divisions)
        return round_up(size_bytes, MIN_BLOCK_BYTES)

    def segment_size(self, block_bytes: int) -> int:
        """Return the size of the segment that is requested from the driver for a block of this (rounded) size."""
        if block_bytes <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if block_bytes < MIN_LARGE_BYTES:
            return self.large_segment_bytes
        return round_up(block_bytes, LARGE_ROUNDING_BYTES)

    def _divisions(self, size_bytes: int) -> int:
        entry = size_bytes.bit_length() - 21  # 2**20 is the first entry
        return self.roundup_power2_divisions[min(max(entry, 0), _DIVISION_ENTRIES - 1)]


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def _round_up_between_powers(size_bytes: int, divisions: int) -> int:
    """Return the size rounded up to a step between two powers of two.

    With 4 divisions, 1200 becomes 1280: the steps between 1024 and 2048 are 1280, 1536 and 1792.
    """
    if size_bytes & (size_bytes - 1) == 0:
        return size_bytes
    power = 1 << (size_bytes.bit_length() - 1)
    step = power >> (divisions.bit_length() - 1)
    return round_up(size_bytes, step) if step else 2 * power


# --- parser ---------------------------------------------------------------------------------------------------


def _split_tokens(text: str) -> list[str]:
    return re.findall(r"[,:\[\]]|[^,:\[\]]+", re.sub(r"\s", "", text))


def _split_pairs(tokens: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the value's tokens of each `name:value` and `name:[a:1,b:2]`.

    A comma at the very end is allowed.
    """
    position = 0
    while position < len(tokens):
        name = tokens[position]
        if name in ",:[]" or tokens[position + 1 : position + 2] != [":"] or position + 2 >= len(tokens):
            part = "".join(tokens[position : position + 3])
            raise UsageError(f"An allocator option must be name:value, and {part!r} is not.")
        start = position + 2
        end = start + 1
        if tokens[start] == "[":
            if "]" not in tokens[start:]:
                raise UsageError(f"Allocator option {name}: the list has no closing bracket.")
            end = tokens.index("]", start) + 1
        yield name, tokens[start:end]
        if tokens[end : end + 1] not in ([], [","]):
            raise UsageError(f"Allocator option {name}: expected a comma after it, got {tokens[end]!r}.")
        position = end + 1


def _parse_option(name: str, value: list[str]) -> dict[str, Any]:
    """Return the field that an option sets, as arguments of `replace`; none if it does not change device memory."""
    if name == "roundup_power2_divisions":
        return {name: _parse_divisions(value)}
    if name not in _OPTIONS:
        raise UsageError(f"Unknown allocator option {name!r}; possible: {', '.join(sorted(OPTION_NAMES))}.")
    if len(value) != 1:
        raise UsageError(f"Allocator option {name} takes one value, not a list.")
    return _OPTIONS[name](name, value[0])


def _parse_boolean(name: str, text: str) -> dict[str, Any]:
    if text not in ("True", "False"):
        raise UsageError(f"Allocator option {name}: {text!r} is neither True nor False.")
    return {name: text == "True"}


def _mebibytes_parser(field: str, minimum: int) -> Callable[[str, str], dict[str, Any]]:
    def parse(name: str, text: str) -> dict[str, Any]:
        value = _parse_whole(name, text)
        if value < minimum:
            raise UsageError(f"Allocator option {name}: {value} is too small; at least {minimum} (MiB).")
        return {field: value * MIB}

    return parse


def _fraction_parser(closed: bool) -> Callable[[str, str], dict[str, Any]]:
    def parse(name: str, text: str) -> dict[str, Any]:
        try:
            value = float(text)
        except ValueError:
            raise UsageError(f"Allocator option {name}: {text!r} is not a number.") from None
        if not (0 <= value <= 1 if closed else 0 < value < 1):
            raise UsageError(
                f"Allocator option {name}: {text} is not {'in [0, 1]' if closed else 'between 0 and 1'}."
            )
        return {name: value}

    return parse


def _ignore(name: str, text: str) -> dict[str, Any]:
    """Accept an option of locks or pinned host memory, which does not change device memory."""
    return {}


def _parse_backend(name: str, text: str) -> dict[str, Any]:
    if text == "cudaMallocAsync":
        raise UsageError(
            "Allocator option backend:cudaMallocAsync leaves memory management to the CUDA driver, whose rules "
            "are not published; only backend:native can be replayed."
        )
    if text != "native":
        raise UsageError(f"Allocator option backend: {text!r} is unknown; possible: native, cudaMallocAsync.")
    return {}


def _parse_whole(name: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]+", text):
        raise UsageError(f"Allocator option {name}: {text!r} is not a whole number.")
    return int(text)


def _parse_divisions(value: list[str]) -> tuple[int, ...]:
    """Return the divisions of `4` (for all sizes) or of `[256:1,512:2,>:8]`: sizes in MiB with their divisions.

    The first listed size also sets all smaller ones, and `>` all sizes above the last listed one; sizes that are
    left out in between keep multiples of 512 bytes.  These are torch's rules, compared with its parser.
    """
    name = "roundup_power2_divisions"
    if value[0] != "[":
        return (_parse_division(name, value[0], zero=False),) * _DIVISION_ENTRIES
    table = [0] * _DIVISION_ENTRIES
    last, first = 0, True
    for bound, divisions in _split_pairs(value[1:-1]):
        count = _parse_division(name, divisions[0], zero=True)
        if bound == ">":
            table[last + 1 :] = [count] * (_DIVISION_ENTRIES - last - 1)
            continue
        size = _parse_whole(name, bound)
        if size == 0 or size & (size - 1):
            raise UsageError(f"Allocator option {name}: the size {size} is not a power of two (MiB).")
        last = min(size.bit_length() - 1, _DIVISION_ENTRIES - 1)
        if first:
            table[:last] = [count] * last
            first = False
        table[last] = count
    return tuple(table)


def _parse_division(name: str, text: str, *, zero: bool) -> int:
    value = _parse_whole(name, text)
    if value & (value - 1) or (value == 0 and not zero):
        raise UsageError(f"Allocator option {name}: {value} divisions are not a power of two.")
    return value


def _check_split_size(settings: AllocatorSettings) -> None:
    split, segment = settings.max_split_bytes, settings.large_segment_bytes
    if split is not None and split < segment:
        raise UsageError(
            f"Allocator option max_split_size_mb: {split // MIB} is too small; at least {segment // MIB}, the size "
            "of a large segment."
        )


def variable(torch_version: str | None) -> str:
    """Return the environment variable that this torch's CUDA allocator reads; None stands for a current torch."""
    is_old = torch_version is not None and version_numbers(torch_version) < _RENAMED
    return OLD_VARIABLE if is_old else VARIABLE


def _check_known(name: str, torch_version: str) -> None:
    first = _SINCE.get(name)
    if first is not None and version_numbers(torch_version) < first:
        raise UsageError(
            f"Allocator option {name} came with torch {first[0]}.{first[1]}; torch {torch_version} would refuse it."
        )


_OPTIONS: Final[dict[str, Callable[[str, str], dict[str, Any]]]] = {
    "backend": _parse_backend,
    "expandable_segments": _parse_boolean,
    "garbage_collection_threshold": _fraction_parser(closed=False),
    "graph_capture_record_stream_reuse": _ignore,
    "large_segment_size_mb": _mebibytes_parser("large_segment_bytes", 11),
    "max_non_split_rounding_mb": _mebibytes_parser("max_non_split_rounding_bytes", 20),
    "max_split_size_mb": _mebibytes_parser("max_split_bytes", 0),
    "per_process_memory_fraction": _fraction_parser(closed=True),
    "pinned_free_catch_all": _ignore,
    "pinned_num_register_threads": _ignore,
    "pinned_reserve_segment_size_mb": _ignore,
    "pinned_use_background_threads": _ignore,
    "pinned_use_cuda_host_register": _ignore,
    "release_lock_on_cudamalloc": _ignore,
    "throw_on_cudamalloc_oom": _parse_boolean,
}
OPTION_NAMES: Final = frozenset({*_OPTIONS, "roundup_power2_divisions"})
"""Names of all options that `AllocatorSettings.parse` knows."""

_SINCE: Final = {  # from the headers of the wheels 2.1 to 2.13
    "max_non_split_rounding_mb": (2, 6),
    "graph_capture_record_stream_reuse": (2, 9),
    "per_process_memory_fraction": (2, 10),
    "large_segment_size_mb": (2, 11),
    "throw_on_cudamalloc_oom": (2, 12),
}
