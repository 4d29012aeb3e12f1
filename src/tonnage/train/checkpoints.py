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
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata

from tonnage import __version__
from tonnage.errors import OutOfDeviceMemory, TonnageError, UnreadableFile, UnwritableFile, UsageError, of_kind
from tonnage.options import spell_option
from tonnage.step import random_states
from tonnage.train import states
from tonnage.units import pluralise

if TYPE_CHECKING:
    from tonnage.step.step import ReadyStep

SCHEMA: Final = 1
MANIFEST: Final = "checkpoint.json"
_METADATA: Final = ".metadata"
_PARTIAL: Final = ".partial"
"""End of the name of a folder that is still being written."""

_MOST_MANIFEST_BYTES: Final = 1 << 28
_READ_BYTES: Final = 1 << 24
_WRITER: Final = "inline_container.cc"
"""File of torch that its errors name if a tensor could not be written."""

MAY_DIFFER: Final = (
    *("shard", "tp", "sequence_parallel", "ep", "pp", "pp_schedule", "pp_stages"),
    *("param_offload", "micro_batch", "grad_accum"),
)
"""Options under which the same states are divided otherwise, or the same batches."""

_BESIDE_STEPS: Final = ("eval_batch", "eval_logits", "generate", "resume", "save_checkpoint")
"""Options of a job on which no step depends."""

_OF_ADAPTERS: Final = ("lora_rank", "lora_targets", "lora_dropout")
"""Options of a job that mean nothing without adapters."""

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
"""Names that the pickle of torch's metadata may have; any other is refused unread."""


def save(ready: ReadyStep, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
    """Write a checkpoint into a new folder, whole or not at all.  All ranks must call it with the same folder.

    `extra` is what the caller wants back, as JSON can hold it.  Raises UsageError for a folder that exists, and
    UnwritableFile on every rank if any of them could not write.
    """

    def write(partial: Path) -> set[str]:
        with together(ready, UnwritableFile, f"{folder} cannot be written"):
            content = {**states.weights(ready), **states.states(ready)}
            device = ready.step.world.device
            content |= {f"random.{own_rank()}.{name}": value for name, value in random_states.take(device).items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about a single process
            dcp.save(content, storage_writer=dcp.FileSystemWriter(partial))
        stored = _Reader(partial).read_metadata().storage_data if _is_first() else {}
        return {info.relative_path for info in stored.values()}

    save_whole(ready, folder, extra, write, groups=states.groups(ready))


def save_whole(
    ready: ReadyStep,
    folder: Path,
    extra: Mapping[str, Any] | None,
    write: Callable[[Path], set[str]],
    groups: Mapping[str, Any],
) -> None:
    """Have `write` write a checkpoint's files into a hidden folder, and rename it when all ranks have finished.

    It returns the names of files that the first rank must see; `groups` are the hyperparameters to compare at a
    resume.
    """
    target = Path(os.path.abspath(folder))
    partial = target.with_name(f".{target.name}{_PARTIAL}")
    with together(ready, UnwritableFile, f"{folder} cannot be written"):
        _check_values(dict(extra or {}), "extra")
        if target.exists():
            raise UsageError(f"{folder} exists; save into a new folder.")
        if _is_first():
            shutil.rmtree(partial, ignore_errors=True)  # torch makes it again
    try:
        with together(ready, UnwritableFile, f"{folder} cannot be written"):
            written = write(partial)
        with together(ready, UnwritableFile, f"{folder} cannot be written"):
            if _is_first():
                _write_manifest(ready, partial, extra, groups, written)
                partial.rename(target)
                _flush(target.parent)
    except BaseException:
        if _is_first():
            shutil.rmtree(partial, ignore_errors=True)
        raise


def resume(ready: ReadyStep, folder: Path) -> dict[str, Any]:
    """Load a checkpoint into a step that was just made, and return its `extra`.  All ranks must call it.

    With as many ranks as it was saved by, training goes on bit for bit; with others random states are those of the
    new processes.  Raises UsageError if it was saved under another plan, and UnreadableFile if it is not whole.
    """
    names = {*states.weights(ready)}
    if ready.step.world.axes.pp > 1:
        names.update(*_gather(ready, sorted(names)))
    with together(ready, UnreadableFile, f"{folder} cannot be read"):
        manifest = read_manifest(folder)
        check_same(ready, manifest)
        sizes = _stored_sizes(reader := _Reader(folder))
        if manifest["ranks"] != count_ranks() and any(states.OF_RANK in name for name in sizes):
            raise UsageError(
                f"{folder} has optimizer states of the parts that {manifest['ranks']} ranks had, and here are "
                f"{pluralise(count_ranks(), 'rank')}; resume on as many, or train with adamw."
            )
        groups = states.match_groups(ready, manifest["groups"])
        check_whole(folder, manifest, part=own_rank(), parts=count_ranks())
        content = {**states.weights(ready), **states.empty_states(ready, sizes)}
        own = f"random.{own_rank()}."
        if manifest["ranks"] == count_ranks():
            content |= {
                key: torch.empty(size, dtype=dtype) for key, (size, dtype) in sizes.items() if key.startswith(own)
            }
        _check_same_network(folder, content, sizes, names)
    with together(ready, UnreadableFile, f"{folder} cannot be read"), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(content, storage_reader=reader)
    states.put_states(ready, content)
    states.put_groups(groups)
    if ready.scaler is not None and manifest["scaler"]:
        ready.scaler.load_state_dict(manifest["scaler"])
    saved = {key.removeprefix(own): value for key, value in content.items() if key.startswith(own)}
    if saved:
        random_states.put(ready.step.world.device, saved)
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

    Of several processes each may check the content of a part of the files; with `parts` 0 none is read.
    """
    for index, (name, expected) in enumerate(sorted(manifest["files"].items())):
        file = folder.joinpath(*(part for part in PurePath(name).parts if part not in ("..", "/")))
        try:
            size = file.stat().st_size
            if size != expected["bytes"]:
                raise UnreadableFile(
                    f"{file} has {size:,} bytes, and {expected['bytes']:,} were written; resume another checkpoint."
                )
            if parts and index % parts == part and _checksum(file) != expected["crc32"]:
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
    """Return the newest checkpoint that is whole; `on_skipped` gets the reason for each that is passed over.

    It reads all files of that one: call it on the first rank and tell the others.
    """
    for path in reversed(list_checkpoints(folder)):
        try:
            check_whole(path, read_manifest(path))
        except UnreadableFile as error:
            on_skipped(str(error))
        else:
            return path
    return None


def keep(folder: Path, *, last: int, best: Path | None = None) -> None:
    """Delete all checkpoints but the newest `last` whole ones and the best.

    A damaged one does not count as one of the last, and is deleted if a newer one is whole.  Whether a file is there
    with its size is looked at, not its content.
    """
    every = list_checkpoints(folder)
    whole = [path for path in every if _has_all_files(path)]
    kept = whole[-max(last, 1) :]
    for path in every[: every.index(kept[0])] if kept else ():
        if best is None or path.resolve() != best.resolve():
            gone = path.with_name(f".{path.name}{_PARTIAL}")
            path.rename(gone)  # a half-deleted checkpoint must not look like one
            shutil.rmtree(gone, ignore_errors=True)


def _has_all_files(folder: Path) -> bool:
    try:
        check_whole(folder, read_manifest(folder), parts=0)
    except UnreadableFile:
        return False
    return True


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


def check_same(ready: ReadyStep, manifest: Mapping[str, Any], may_differ: Sequence[str] = MAY_DIFFER) -> None:
    """Raise UsageError if the checkpoint was saved under another plan or job, but for some options."""
    for kind, value in (("plan", ready.step.plan), ("job", ready.step.job)):
        now, before = _described(value), manifest[kind]
        ignored = {*may_differ, *_BESIDE_STEPS}
        ignored |= {*_OF_ADAPTERS} if now.get("method") == before.get("method") == "full" else set()
        for name in sorted({*now, *before} - ignored):
            if now.get(name) != before.get(name):
                raise UsageError(
                    f"The checkpoint was saved with {spell_option(name)} {before.get(name)}, and this {kind} has "
                    f"{now.get(name)}; resume under the same {kind}, or start anew from saved weights."
                )


def _check_same_network(
    folder: Path,
    content: Mapping[str, torch.Tensor],
    sizes: Mapping[str, tuple[torch.Size, torch.dtype]],
    names: Set[str],
) -> None:
    """Raise UsageError if the checkpoint has other weights than the network, or of other sizes.

    `content` is what this rank loads, `names` are the weights of all stages of a pipeline.
    """
    for name, tensor in content.items():
        now, saved = tuple(tensor.size()), tuple(sizes[name][0]) if name in sizes else None
        if now != saved:
            what = "it lacks" if saved is None else f"it has {saved} and not {now} as the size of"
            raise UsageError(f"{folder} is a checkpoint of another network: {what} {name}.")
    for name in sizes:
        if name.startswith("weights.") and name not in names:
            raise UsageError(f"{folder} is a checkpoint of another network: here is no {name}.")


def _check_values(value: object, where: str) -> None:
    """Raise UsageError for what JSON does not hold, or would return as something else."""
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise UsageError(f"{where} has the key {name!r}, and only strings are saved as keys.")
            _check_values(item, f"{where}[{name!r}]")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            _check_values(item, f"{where}[{number}]")
    elif value is not None and not isinstance(value, str | int | float):
        raise UsageError(
            f"{where} is a {type(value).__name__}, which is not saved; give dicts, lists, strings, numbers, True, "
            "False and None."
        )


def _described(value: Any) -> dict[str, Any]:
    """Return a plan's or a job's fields as JSON gives them back; the network is not one of them."""
    fields = {name: field for name, field in asdict(value).items() if name != "model"}
    described: dict[str, Any] = json.loads(json.dumps(fields, default=str))
    return described


def _write_manifest(
    ready: ReadyStep, folder: Path, extra: Mapping[str, Any] | None, groups: Mapping[str, Any], written: set[str]
) -> None:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    missing = written - {str(path.relative_to(folder)) for path in files}
    if missing:
        raise UnwritableFile(
            f"{folder.parent} is not the same folder on all machines ({min(missing)} is not in it); save into a "
            "shared one."
        )
    sums = {str(path.relative_to(folder)): {"bytes": path.stat().st_size, "crc32": _checksum(path)} for path in files}
    manifest = {
        "schema_version": SCHEMA,
        "versions": {"tonnage": __version__, "torch": torch.__version__},
        "plan": _described(ready.step.plan),
        "job": _described(ready.step.job),
        "ranks": count_ranks(),
        "groups": dict(groups),
        "scaler": {} if ready.scaler is None else ready.scaler.state_dict(),
        "extra": dict(extra or {}),
        "files": sums,
    }
    with dcp.filesystem.FileSystem().create_stream(folder / MANIFEST, "w") as file:  # where its other files are
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
    with suppress(OSError):  # of file systems without it; the files themselves are there
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def together(ready: ReadyStep, kind: type[TonnageError], what: str) -> Iterator[None]:
    """Raise on every rank if the block failed on any, so that none waits for another.

    Errors of files become of this `kind`.
    """
    failure: BaseException | None = None
    try:
        yield
    except (Exception, dcp.api.CheckpointException) as error:
        failure = _own_cause(error)
    failed, is_memory = failure is not None, isinstance(failure, torch.OutOfMemoryError)
    if count_ranks() > 1:
        flags = torch.tensor([float(failed), float(is_memory)], device=ready.step.world.device)
        dist.all_reduce(flags, group=ready.group)
        failed, is_memory = map(bool, flags.tolist())
    if not failed:
        return
    if is_memory:  # to tell the others why takes memory, too
        raise failure or OutOfDeviceMemory(f"{what}: another rank ran out of memory.") from None
    said = _gather(ready, None if failure is None else _as_message(failure, kind, what))
    if failure is not None and not isinstance(failure, OSError | RuntimeError | dcp.api.CheckpointException):
        raise failure
    name, message = next(message for message in said if message is not None)
    raise of_kind(name, message) from None


def _as_message(failure: BaseException, kind: type[TonnageError], what: str) -> tuple[str, str]:
    """Return the class and the line of the error that the ranks raise."""
    if isinstance(failure, TonnageError):
        return type(failure).__name__, str(failure)
    return kind.__name__, f"{what}: {_reason(failure)}."


def _gather(ready: ReadyStep, value: Any) -> list[Any]:
    """Return the values of all ranks."""
    values = [value] * count_ranks()
    if count_ranks() > 1:
        dist.all_gather_object(values, value, group=ready.group)
    return values


def _own_cause(error: BaseException) -> BaseException:
    """Return what stopped this process inside torch's checkpoint, if it was an interruption or memory."""
    inner = error.failures if isinstance(error, dcp.api.CheckpointException) else {}
    cause = inner[own_rank()][0] if own_rank() in inner else error
    is_other = isinstance(cause, torch.OutOfMemoryError) or not isinstance(cause, Exception)
    return cause if is_other else error


def _reason(failure: BaseException) -> str:
    """Return one line of why it failed, of the first rank that says so."""
    if isinstance(failure, dcp.api.CheckpointException):
        inner = [wrapped[0] for wrapped in failure.failures.values()]
        errors = [error for error in inner if isinstance(error, OSError | TonnageError)] or inner
        return _reason(errors[0]) if errors else "torch could not say why"
    if isinstance(failure, OSError) and failure.strerror:
        return failure.strerror
    if _WRITER in str(failure):
        return "torch's writer of files failed, as it does on a full disk"
    return str(failure).strip().partition("\n")[0].rstrip(".") or type(failure).__name__


def _is_first() -> bool:
    return own_rank() == 0


def own_rank() -> int:
    """Return this process's rank."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_any_rank(ready: ReadyStep, flag: bool) -> bool:
    """Return True on every rank if the flag is True on any.  All ranks must call it."""
    if count_ranks() == 1:
        return flag
    told = torch.tensor([float(flag)], device=ready.step.world.device)
    dist.all_reduce(told, group=ready.group)
    return bool(told.item())


def count_ranks() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1
