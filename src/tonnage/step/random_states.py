"""The random states of a process: what decides dropout, and whatever else a network draws in its forward."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch


def take(device: torch.device) -> dict[str, torch.Tensor]:
    """Return this process's random states, of torch on the host and on the device, of Python and of NumPy."""
    version, numbers, spare = random.getstate()
    found = {"cpu": torch.get_rng_state(), "python": torch.tensor([version, *numbers])}
    if spare is not None:
        found["python_spare"] = torch.tensor([spare], dtype=torch.float64)
    if (numpy := sys.modules.get("numpy")) is not None:
        _, words, position, has_spare, spare = numpy.random.get_state()
        found["numpy"] = torch.tensor([position, has_spare, *words.tolist()])
        found["numpy_spare"] = torch.tensor([spare], dtype=torch.float64)
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def put(device: torch.device, saved: Mapping[str, torch.Tensor]) -> None:
    """Set the random states that `take` returned."""
    torch.set_rng_state(saved["cpu"])
    version, *numbers = saved["python"].tolist()
    spare = saved["python_spare"].item() if "python_spare" in saved else None
    random.setstate((version, tuple(numbers), spare))
    if "numpy" in saved and (numpy := sys.modules.get("numpy")) is not None:
        position, has_spare, *words = saved["numpy"].tolist()
        words = numpy.array(words, dtype="uint32")
        numpy.random.set_state(("MT19937", words, position, has_spare, saved["numpy_spare"].item()))
    if device.type == "cuda" and "cuda" in saved:
        torch.cuda.set_rng_state(saved["cuda"], device)


@contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """Set the random states back on leaving to what they were."""
    drawn = take(device)
    try:
        yield
    finally:
        put(device, drawn)
