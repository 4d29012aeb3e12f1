"""A model folder, loaded for real: measured bytes beside the predicted ones.

check_folder("llama", quantization="nf4").figures[0]   # Figure(name="weights, ...", predicted_bytes=..., ...)
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from tonnage.errors import CannotEstimate, OutOfDeviceMemory, TrialFailed, UnreadableModel, UsageError
from tonnage.ghost import termination
from tonnage.options import check_number
from tonnage.serving.cache_layers import read_layers
from tonnage.serving.network import ServedNetwork, read_network
from tonnage.serving.quantization import (
    BITSANDBYTES,
    NONE,
    Quantization,
    describe_format,
    find_quantization,
    made_by_transformers,
)
from tonnage.serving.stored_weights import Share, stored_bytes

PROMPT: Final = 8
"""Tokens of the prompt."""

_SCALES: Final = re.compile(r"\.(?:nested_)?(?:absmax|quant_map|quant_state|SCB)")
"""Tensors of a checkpoint that bitsandbytes keeps beside the weights."""

DEVICES: Final = ("auto", "cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A predicted and a measured size; None: not known, or not measured on this device."""

    name: str
    predicted_bytes: int | None
    measured_bytes: int | None

    @property
    def error(self) -> float | None:
        """Return the predicted size over the measured one, less 1."""
        if not self.predicted_bytes or not self.measured_bytes:
            return None
        return self.predicted_bytes / self.measured_bytes - 1

    def to_json(self) -> dict[str, Any]:
        """Return the figure as a document."""
        return {**asdict(self), "error": self.error}


@dataclass(frozen=True, kw_only=True)
class FolderCheck:
    """A folder that was loaded and generated."""

    name: str
    quantization: str
    device: str
    """Name of the device that ran it."""
    generated: int
    """Tokens that were generated."""
    versions: dict[str, str]
    figures: tuple[Figure, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the document that `--json` prints."""
        plain = {"schema_version": 1, "source": "real", **asdict(self)}
        return plain | {"figures": [figure.to_json() for figure in self.figures]}


def check_folder(
    folder: str,
    *,
    quantization: str | None = None,
    device: str = "auto",
    tokens: int = 8,
    timeout_seconds: float = 900.0,
) -> FolderCheck:
    """Return the bytes of a folder that transformers loads, and of the keys and values of `tokens` tokens.

    Raises UsageError, UnreadableModel or CannotEstimate for a folder or a format that cannot be loaded,
    OutOfDeviceMemory where the device has no room, TrialFailed for any other failure.
    """
    check_number("tokens", tokens)
    if device not in DEVICES:
        raise UsageError(f"Unknown device {device!r}; possible: {', '.join(DEVICES)}.")
    if not Path(folder).is_dir():
        raise UsageError(f"{folder!r} is no folder; give one with config.json and safetensors files.")
    network = read_network(folder, offline=True)
    if not network.stored:
        raise CannotEstimate(f"{folder!r} has no safetensors files; other weights are not loaded.")
    wanted = network.published if quantization is None else find_quantization(quantization)
    how = _how_to_load(network, wanted)
    if how is not None:
        wanted = made_by_transformers(wanted, _transformers_version())
    found = _load(folder, how, device, tokens, timeout_seconds)
    weights = _weights_bytes(network, wanted)
    cached = _cache_bytes(network, PROMPT + tokens - 1)
    figures = (
        ("weights, with their scales", weights, found["weights_bytes"]),
        ("weights by get_memory_footprint", weights - _unseen_bytes(network, wanted), found["footprint_bytes"]),
        ("allocated after loading", weights, found["allocated_bytes"]),
        (f"KV cache of {PROMPT + tokens - 1} tokens", cached, found["kv_cache_bytes"]),
        ("most allocated", None, found["peak_allocated_bytes"]),
        ("most reserved", None, found["peak_reserved_bytes"]),
    )
    return FolderCheck(
        name=network.name,
        quantization=wanted.name,
        device=found["device"],
        generated=found["generated"],
        versions=found["versions"],
        figures=tuple(
            Figure(name=name, predicted_bytes=predicted, measured_bytes=measured)
            for name, predicted, measured in figures
            if measured is not None
        ),
    )


def _transformers_version() -> tuple[int, ...]:
    """Return the first two numbers of the version of transformers; (0,) where there is none, which loading says."""
    try:
        return tuple(int(number) for number in version("transformers").split(".")[:2])
    except (PackageNotFoundError, ValueError):
        return (0,)


def _how_to_load(network: ServedNetwork, wanted: Quantization) -> str | None:
    """Return the format to which transformers quantizes the folder's weights; None: they stay as they are.

    Raises UsageError for a format into which it does not turn them.
    """
    if wanted.name == network.published.name:
        return None
    if network.published.name == NONE.name and wanted.name in BITSANDBYTES:
        return wanted.name
    possible = [network.published.name]
    possible += BITSANDBYTES if network.published.name == NONE.name else []
    raise UsageError(
        f"transformers does not turn the {describe_format(network.published)} weights of this folder into "
        f"{describe_format(wanted)} ones; "
        f"possible: {', '.join(possible)}. Other formats need a checkpoint in them."
    )


def _load(folder: str, quantization: str | None, device: str, tokens: int, timeout_seconds: float) -> dict[str, Any]:
    """Return what a process that loads the folder measured."""
    wanted = {"folder": folder, "quantization": quantization, "device": device, "prompt": PROMPT, "tokens": tokens}
    with tempfile.TemporaryDirectory(prefix="tonnage-") as scratch:
        file = Path(scratch) / "measured.json"
        process = subprocess.Popen(
            [sys.executable, "-m", "tonnage.serving.loading", json.dumps(wanted), str(file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            preexec_fn=termination.ends_with(os.getpid()),
        )
        try:
            ended = process.wait(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            raise TrialFailed(f"{folder!r} was not loaded after {timeout_seconds:.0f} s.") from None
        finally:
            process.kill()
            process.wait()
        if not file.is_file():
            how = f"by signal {-ended}" if ended < 0 else f"with exit code {ended}"
            if ended == -signal.SIGKILL:
                raise OutOfDeviceMemory(f"Loading {folder!r} was killed, as the system does when memory runs out.")
            raise TrialFailed(f"Loading {folder!r} was ended {how}.")
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if found.get("out_of_memory"):
        raise OutOfDeviceMemory(f"{folder!r} does not fit on the device: {found['error']}")
    if found.get("lacks_card"):
        raise UsageError(f"--device {device}: {found['error'].partition(': ')[2]}; leave it out, or give cpu.")
    if found.get("is_incomplete"):
        raise UnreadableModel(f"{folder!r} is incomplete: {found['error']}")
    if "error" in found:
        raise TrialFailed(f"transformers cannot load {folder!r}: {found['error']}")
    return found


def _cache_bytes(network: ServedNetwork, tokens: int) -> int | None:
    """Return the bytes that transformers keeps of a short request; None for latent attention and states.

    It keeps keys and values of latent attention as they are after their expansion.
    """
    if network.shape is not None and network.shape.latent_rank:
        return None
    try:
        layers = read_layers(network.config, element_bytes=2)
    except (CannotEstimate, UsageError):
        return None
    if any(layer.kind == "state" for layer in layers):
        return None
    held = (layer.token_bytes * (min(tokens, layer.window) if layer.window else tokens) for layer in layers)
    return sum(held)


def _weights_bytes(network: ServedNetwork, wanted: Quantization) -> int:
    """Return the bytes of the weights in a format, with its scales."""
    whole = Share(tied=network.shape is not None and network.shape.tied)
    return sum(stored_bytes(network.stored, wanted, network.published, whole).values())


def _unseen_bytes(network: ServedNetwork, wanted: Quantization) -> int:
    """Return the bytes that `get_memory_footprint` does not see: bitsandbytes keeps scales beside the parameters."""
    if wanted.name not in BITSANDBYTES:
        return 0
    if network.published.name == wanted.name:
        return sum(tensor.bytes for tensor in network.stored if _SCALES.search(tensor.name))
    return _weights_bytes(network, wanted) - _weights_bytes(network, replace(wanted, scale_bytes=0))
