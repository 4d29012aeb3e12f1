"""Checkpoints of a run: folders that hold everything from which training goes on as if it had never stopped.

A checkpoint is written into a hidden folder beside its own name, by torch.distributed.checkpoint, and renamed when
all ranks have finished: a kill at any moment leaves whole checkpoints alone.  `checkpoint.json` is its last file and
lists the others with their sizes and checksums.  Another number of ranks, and another way of sharding, reads the same
folder.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata

from tonnage import __version__
from tonnage.errors import TonnageError, UnreadableFile, UnwritableFile, UsageError
from tonnage.options import spell_option
from tonnage.train import states

if TYPE_CHECKING:
    from tonnage.step.step import ReadyStep

SCHEMA: Final = 1
MANIFEST: Final = "checkpoint.json"
_METADATA: Final = ".metadata"
_PARTIAL: Final = ".partial"
"""End of the name of a folder that is still being written."""

_MOST_MANIFEST_BYTES: Final = 1 << 28
_READ_BYTES: Final = 1 << 24

MAY_DIFFER: Final = ("shard", "param_offload", "micro_batch", "grad_accum")
"""Options under which the same states are divided otherwise, or the same batches."""

_KINDS: Final = {
    **{
        ("torch.distributed.checkpoint.metadata", name): getattr(dcp_metadata, name)
        for name in (
            *("Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
            *("StorageMeta", "_MEM_FORMAT_ENCODING"),
        )
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): dcp.filesystem._StorageInfo,
    ("pathlib", "PosixPath"): PurePath,  # of the folder as it was named while it was written
    ("pathlib", "WindowsPath"): PurePath,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
}
"""What the pickle of torch's metadata may name; any other name is refused unread."""


def save(ready: ReadyStep, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
    """Write a checkpoint into a new folder, whole or not at all.  All ranks must call it with the same folder.

    `extra` is what the caller wants back, as JSON can hold it.  Raises UsageError for a folder that exists, and
    UnwritableFile on every rank if any of them could not write.
    """
    partial = folder.with_name(f".{folder.name}{_PARTIAL}")
    with _together(ready, f"{folder} cannot be written"):
        if folder.exists():
            raise UsageError(f"{folder} exists; save into a new folder.")
        if _is_first():
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    try:
        content = {**states.weights(ready), **states.states(ready)}
        _check_plain(content)
        device = ready.step.world.device
        content |= {f"random.{_rank()}.{name}": value for name, value in states.random_states(device).items()}
        with _together(ready, f"{folder} cannot be written"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about a single process
            dcp.save(content, storage_writer=dcp.FileSystemWriter(partial))
        with _together(ready, f"{folder} cannot be written"):
            if _is_first():
                _write_manifest(ready, partial, extra)
                partial.rename(folder)
                _flush(folder.parent)
    except BaseException:
        if _is_first():
            shutil.rmtree(partial, ignore_errors=True)
        raise


def resume(ready: ReadyStep, folder: Path) -> dict[str, Any]:
    """Load a checkpoint into a step that was just made, and return its `extra`.  All ranks must call it.

    With as many ranks as it was saved by, training goes on bit for bit; with others random states are those of the
    new processes.  Raises UsageError if it was saved under another plan, and UnreadableFile if it is not whole.
    """
    with _together(ready, f"{folder} cannot be read"):
        manifest = read_manifest(folder)
        _check_same(ready, manifest)
        check_whole(folder, manifest, part=_rank(), parts=_ranks())
        reader = _Reader(folder)
        sizes = _stored_sizes(reader)
        content = {**states.weights(ready), **states.empty_states(ready, sizes)}
        own = f"random.{_rank()}."
        if manifest["ranks"] == _ranks():
            content |= {
                key: torch.empty(size, dtype=dtype) for key, (size, dtype) in sizes.items() if key.startswith(own)
            }
        missing = [key for key in content if key not in sizes]
        if missing:
            raise UnreadableFile(f"{folder} lacks {missing[0]}; resume another checkpoint.")
    with _together(ready, f"{folder} cannot be read"), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(content, storage_reader=reader)
    states.put_states(ready, content)
    states.put_groups(ready, manifest["groups"])
    if ready.scaler is not None and manifest["scaler"]:
        ready.scaler.load_state_dict(manifest["scaler"])
    saved = {key.removeprefix(own): value for key, value in content.items() if key.startswith(own)}
    if saved:
        states.put_random_states(ready.step.world.device, saved)
    extra: dict[str, Any] = manifest["extra"]
    return extra


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the contents of `checkpoint.json`.  Raises UnreadableFile if the folder is no whole checkpoint."""
    file = folder / MANIFEST
    try:
        if file.stat().st_size > _MOST_MANIFEST_BYTES:
            raise UnreadableFile(f"{file} is larger than any checkpoint's; resume another checkpoint.")
        manifest = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise UnreadableFile(f"{folder} has no {MANIFEST}: it is no checkpoint, or was not finished.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UnreadableFile(f"{file} cannot be read: {error}; resume another checkpoint.") from None
    if not isinstance(manifest, dict) or manifest.get("schema_version") != SCHEMA:
        raise UnreadableFile(f"{file} is not of schema version {SCHEMA}; resume another checkpoint.")
    kinds: dict[str, type] = {"files": dict, "plan": dict, "job": dict, "groups": dict, "ranks": int, "extra": dict}
    wrong = next((name for name, kind in kinds.items() if not isinstance(manifest.get(name), kind)), None)
    if wrong is not None:
        raise UnreadableFile(f"{file} lacks {wrong}, or it is of another kind; resume another checkpoint.")
    return manifest


def check_whole(folder: Path, manifest: Mapping[str, Any], *, part: int = 0, parts: int = 1) -> None:
    """Raise UnreadableFile if a file of a checkpoint is missing or is not as it was written.

    Of several processes each may check a part of the files.
    """
    for index, (name, expected) in enumerate(sorted(manifest["files"].items())):
        file = folder / Path(name).name
        try:
            size = file.stat().st_size
            if size != expected["bytes"]:
                raise UnreadableFile(
                    f"{file} has {size:,} bytes, and {expected['bytes']:,} were written; resume another checkpoint."
                )
            if index % parts == part and _checksum(file) != expected["crc32"]:
                raise UnreadableFile(f"{file} is not as it was written; resume another checkpoint.")
        except OSError as error:
            raise UnreadableFile(f"{file} cannot be read: {error.strerror}; resume another checkpoint.") from None
        except (KeyError, TypeError):
            raise UnreadableFile(f"{folder / MANIFEST} is damaged; resume another checkpoint.") from None


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the finished checkpoints in a run's folder, `step-N`, in the order of their steps."""
    found = [
        (int(path.name.removeprefix("step-")), path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if path.name.startswith("step-") and path.name.removeprefix("step-").isdecimal() and path.is_dir()
    ]
    return [path for _, path in sorted(found)]


def last_whole(folder: Path, on_skipped: Callable[[str], None]) -> Path | None:
    """Return the newest checkpoint that is whole; `on_skipped` gets the reason for each that is passed over."""
    for path in reversed(list_checkpoints(folder)):
        try:
            check_whole(path, read_manifest(path))
        except UnreadableFile as error:
            on_skipped(str(error))
        else:
            return path
    return None


def keep(folder: Path, *, last: int, best: Path | None = None) -> None:
    """Delete all checkpoints but the newest `last` ones and the best."""
    for path in list_checkpoints(folder)[: -max(last, 1)]:
        if path != best:
            gone = path.with_name(f".{path.name}{_PARTIAL}")
            path.rename(gone)  # a half-deleted checkpoint must not look like one
            shutil.rmtree(gone, ignore_errors=True)


def remove_partial(folder: Path) -> None:
    """Delete what a killed process left half-written or half-deleted."""
    for path in folder.glob(f".*{_PARTIAL}") if folder.is_dir() else ():
        shutil.rmtree(path, ignore_errors=True)


class _Reader(dcp.FileSystemReader):  # type: ignore[misc]
    """torch's reader of a folder, which builds nothing from its pickle but metadata of tensors."""

    def read_metadata(self, *_: Any, **__: Any) -> dcp_metadata.Metadata:
        file = Path(self.path) / _METADATA
        try:
            with file.open("rb") as stream:
                found = _Unpickler(stream).load()
        except UnreadableFile:
            raise
        except Exception as error:
            raise UnreadableFile(f"{file} is damaged ({type(error).__name__}); resume another checkpoint.") from None
        entries = getattr(found, "state_dict_metadata", None)
        if not isinstance(found, dcp_metadata.Metadata) or not all(
            isinstance(entry, dcp_metadata.TensorStorageMetadata) for entry in (entries or {}).values()
        ):
            raise UnreadableFile(f"{file} describes more than tensors; it is no checkpoint of tonnage.")
        return found


class _Unpickler(pickle.Unpickler):
    """An unpickler that knows torch's metadata and no other name."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KINDS:
            return _KINDS[module, name]
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype | torch.layout):
            return found
        raise UnreadableFile(f"A checkpoint's metadata names {module}.{name}, which was not executed.")


def _memory_format(kind: Any, name: str) -> Any:
    """Return a member of torch's table of memory formats, which its pickle looks up by name."""
    if kind is not dcp_metadata._MEM_FORMAT_ENCODING:
        raise UnreadableFile("A checkpoint's metadata looks up an attribute, which was not executed.")
    return kind[name]


def _stored_sizes(reader: _Reader) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {
        key: (entry.size, entry.properties.dtype) for key, entry in reader.read_metadata().state_dict_metadata.items()
    }


def _check_plain(content: Mapping[str, torch.Tensor]) -> None:
    """Raise UsageError for tensors that only their own library can read back."""
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    for key, tensor in content.items():
        if is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, DTensor):
            raise UsageError(
                f"{key} is a {type(tensor).__name__}, which a checkpoint cannot hold; choose an optimizer of torch "
                "or bitsandbytes."
            )


def _check_same(ready: ReadyStep, manifest: Mapping[str, Any]) -> None:
    """Raise UsageError if the checkpoint was saved under another plan or job."""
    for kind, value in (("plan", ready.step.plan), ("job", ready.step.job)):
        now, before = _described(value), manifest[kind]
        for name in sorted({*now, *before} - set(MAY_DIFFER)):
            if now.get(name) != before.get(name):
                raise UsageError(
                    f"The checkpoint was saved with {spell_option(name)} {before.get(name)}, and this {kind} has "
                    f"{now.get(name)}; resume under the same {kind}, or start anew from saved weights."
                )


def _described(value: Any) -> dict[str, Any]:
    """Return a plan's or a job's fields as JSON gives them back; the network is not one of them."""
    fields = {name: field for name, field in asdict(value).items() if name != "model"}
    described: dict[str, Any] = json.loads(json.dumps(fields, default=str))
    return described


def _write_manifest(ready: ReadyStep, folder: Path, extra: Mapping[str, Any] | None) -> None:
    files = {path.name: {"bytes": path.stat().st_size, "crc32": _checksum(path)} for path in sorted(folder.iterdir())}
    manifest = {
        "schema_version": SCHEMA,
        "versions": {"tonnage": __version__, "torch": torch.__version__},
        "plan": _described(ready.step.plan),
        "job": _described(ready.step.job),
        "ranks": _ranks(),
        "groups": states.groups(ready),
        "scaler": {} if ready.scaler is None else ready.scaler.state_dict(),
        "extra": dict(extra or {}),
        "files": files,
    }
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest, file)
        file.flush()
        os.fsync(file.fileno())
    _flush(folder)


def _checksum(file: Path) -> int:
    checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _flush(folder: Path) -> None:
    """Make a folder's entries last through a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _together(ready: ReadyStep, what: str) -> Iterator[None]:
    """Raise on every rank if the block failed on any, so that none waits for another."""
    failure: BaseException | None = None
    try:
        yield
    except (TonnageError, OSError, RuntimeError, dcp.api.CheckpointException) as error:
        failure = error
    failed = failure is not None
    if dist.is_initialized():
        flag = torch.tensor([float(failed)], device=ready.step.world.device)
        dist.all_reduce(flag)
        failed = bool(flag.item())
    if isinstance(failure, TonnageError):
        raise failure
    if failed:
        kind = UnreadableFile if "read" in what else UnwritableFile
        raise kind(f"{what}: {_reason(failure)}.") from None


def _reason(failure: BaseException | None) -> str:
    """Return one line of why it failed, of the first rank that says so."""
    if failure is None:
        return "another rank failed"
    if isinstance(failure, dcp.api.CheckpointException):
        inner = [wrapped[0] for wrapped in failure.failures.values()]
        errors = [error for error in inner if isinstance(error, OSError | TonnageError)] or inner
        return _reason(errors[0]) if errors else "torch could not say why"
    if isinstance(failure, OSError) and failure.strerror:
        return failure.strerror
    return str(failure).strip().partition("\n")[0].rstrip(".") or type(failure).__name__


def _is_first() -> bool:
    return _rank() == 0


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
