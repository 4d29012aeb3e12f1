"""Memory of a reduction on a GPU besides its result: partial results of blocks that share an output.

Column sums (the gradients of biases and of norms' weights) are the case that matters: partial sums of up to 130 MB.
The rules are those of ATen/native/cuda/Reduce.cuh (`setReduceConfig`); tests compare them with sizes seen on ghosts
and on a real H100.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tonnage.cluster import Device

_WARP: Final = 32
_MOST_THREADS: Final = 512
_VECTOR: Final = 4
_LEAST_VALUES, _MOST_VALUES = 16, 256
"""Fewest and most values that a thread should add up."""
_SEMAPHORE_BYTES: Final = 4


@dataclass(frozen=True)
class Input:
    """A tensor to be reduced, in elements; dimensions of one element are left out."""

    kept: tuple[tuple[int, int], ...]
    """(size, stride) of the dimensions that the result has, fastest first."""
    reduced: tuple[tuple[int, int], ...]
    """(size, stride) of the others, fastest first."""


def of(shape: Sequence[int], strides: Sequence[int], dims: Sequence[int] | None) -> Input:
    """Return the input of a reduction over these dimensions; None or empty: over all."""
    reduced_dims = {dim % len(shape) for dim in dims} if dims else set(range(len(shape)))
    sides: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    for place, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        if size != 1:
            sides[place in reduced_dims].append((size, stride))
    kept, reduced = (_merge_neighbours(sorted(side, key=lambda dimension: dimension[1])) for side in sides)
    return Input(kept, reduced)


def _merge_neighbours(side: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the dimensions with neighbours in memory merged into one."""
    merged: list[tuple[int, int]] = []
    for size, stride in side:
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, stride))
    return tuple(merged)


def temporaries(tensor: Input, accumulator_bytes: int, device: Device) -> tuple[int, ...]:
    """Return the bytes of the partial results and the semaphores; nothing if each output has a block of its own."""
    outputs = math.prod(size for size, _ in tensor.kept)
    inputs = math.prod(size for size, _ in tensor.reduced)
    if not outputs or not inputs:
        return ()
    along_fastest = not tensor.kept or (bool(tensor.reduced) and tensor.reduced[0][1] < tensor.kept[0][1])
    width, height = (inputs, outputs) if along_fastest else (outputs, inputs)
    vector = 1
    if along_fastest and tensor.reduced and tensor.reduced[0][1] == 1 and width > 128 and not tensor.kept:
        width //= _VECTOR
    elif not along_fastest and tensor.kept[0][1] == 1:
        vector = _output_vector(tensor)
        width //= vector
    columns, rows = _block_shape(width, height, _MOST_THREADS // vector)
    step_input, step_output = (columns, 1) if along_fastest else (1, columns)
    values = -(-inputs // step_input)
    if values < rows * 16 and values < _MOST_VALUES:  # each row of threads has an output of its own
        return ()
    step_input *= rows
    values = -(-inputs // step_input)
    grid = -(-(outputs // vector) // step_output)
    blocks = device.sms * (device.threads_per_sm // (columns * rows))
    if values < _MOST_VALUES or grid > blocks:
        return ()
    sharing = max(min(-(-blocks // grid), -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES))
    if sharing == 1:
        return ()
    partial = accumulator_bytes * outputs * sharing * (1 if along_fastest else columns * vector)
    return partial, _SEMAPHORE_BYTES * grid


def _output_vector(tensor: Input) -> int:
    """Return how many neighbouring outputs a thread loads at once."""
    numbers = (tensor.kept[0][0], *(stride for _, stride in (*tensor.reduced, *tensor.kept[1:])))
    return math.gcd(_VECTOR, *numbers)


def _block_shape(width: int, height: int, most: int) -> tuple[int, int]:
    """Return the threads of a block, in powers of two: along the fastest dimension, and across."""
    wide, high = (min(most, 1 << (size.bit_length() - 1)) if size else 1 for size in (width, height))
    columns = min(wide, _WARP)
    rows = min(high, most // columns)
    return min(wide, most // rows), rows
