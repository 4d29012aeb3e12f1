"""A serving plan in a file that people keep, edit and export.

    schema_version = 1
    task = "serve"
    model = "llama-3.1-8b"
    gpu = "4xh100-80gb"

    [serve]
    tp = 2
    max_len = 8192

Reading executes nothing; a key that is unknown or has a value of another type is refused.
"""

import json
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from tonnage.errors import UnreadableFile, UsageError
from tonnage.files import read_text
from tonnage.serving.settings import ServeSettings

SCHEMA_VERSION: Final = 1
_MOST_BYTES: Final = 2**20
_TYPES: Final = {
    "gpu_memory_utilization": float,
    "kv_dtype": str,
    "quantization": str,
    "engine": str,
    "eager": bool,
    "warm": bool,
    "draft": str,
    "mm_encoder_tp_mode": str,
    "acceptance": float,
    "no_prefix_caching": bool,
    "sleep_mode": bool,
}
"""Types of the settings that are no whole numbers."""

_KEYS: Final = ("task", "model", "gpu", "gpu_memory_bytes", "serve")


@dataclass(frozen=True, kw_only=True)
class ServeFile:
    """Content of a file."""

    model: str
    gpu: str
    gpu_memory_bytes: int | None
    settings: ServeSettings


def text(settings: ServeSettings, *, model: str, gpu: str, gpu_memory_bytes: int | None, remark: str) -> str:
    """Return the content of the file; the remark is its first line."""
    lines = [
        f"# {remark}",
        "# tonnage export FILE --to vllm|sglang|compose|kubernetes writes what starts it.",
        f"schema_version = {SCHEMA_VERSION}",
        'task = "serve"',
        f"model = {json.dumps(model, ensure_ascii=False)}",
        f"gpu = {json.dumps(gpu)}",
    ]
    if gpu_memory_bytes is not None:
        lines.append(f"gpu_memory_bytes = {gpu_memory_bytes}")
    lines += ["", "[serve]", *(f"{name} = {json.dumps(value)}" for name, value in settings.stated().items())]
    return "\n".join(lines) + "\n"


def is_serve_file(path: Path) -> bool:
    """Return True for a TOML file whose task is serving."""
    try:
        return tomllib.loads(read_text(path, _MOST_BYTES)).get("task") == "serve"
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError):
        return False


def read(path: Path) -> ServeFile:
    """Return the content of a file for which `is_serve_file` is true.  Raises UnreadableFile, UsageError."""
    document = tomllib.loads(read_text(path, _MOST_BYTES))
    if document.pop("schema_version", None) != SCHEMA_VERSION:
        raise UnreadableFile(f"{path} has no schema_version {SCHEMA_VERSION}; this tonnage reads no other.")
    _check_keys(document, _KEYS, f"{path}")
    model, gpu, memory = document.get("model"), document.get("gpu"), document.get("gpu_memory_bytes")
    for name, value in (("model", model), ("gpu", gpu)):
        if not isinstance(value, str) or not value:
            raise UsageError(f"{path}: {name} must be a text.")
    if memory is not None and (type(memory) is not int or memory < 1):
        raise UsageError(f"{path}: gpu_memory_bytes must be a whole number above zero.")
    values = document.get("serve", {})
    if not isinstance(values, dict):
        raise UsageError(f"{path}: [serve] must be a table.")
    _check_keys(values, tuple(item.name for item in fields(ServeSettings)), f"{path}, [serve]")
    return ServeFile(
        model=str(model),
        gpu=str(gpu),
        gpu_memory_bytes=memory,
        settings=ServeSettings(**{name: _value(path, name, value) for name, value in values.items()}),
    )


def _check_keys(values: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    wrong = next((name for name in values if name not in known), None)
    if wrong is not None:
        raise UsageError(f"{where}: unknown key {wrong!r}; possible: {', '.join(known)}.")


def _value(path: Path, name: str, value: Any) -> Any:
    """Return a value of the type of its field.  Raises UsageError for another type."""
    wanted = _TYPES.get(name, int)
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        raise UsageError(f"{path}: {name} is {value!r}; it must be a value of the kind {wanted.__name__}.")
    return value
