"""Redirects what a program saves into a folder that is deleted with the run, without the bytes of tensors.

A ghost's tensors hold no real values, and a checkpoint of them must not replace a real one, nor its rotation delete
one.  Saving still gathers, copies and names tensors as usual.  Files have their paths and sizes, with holes in place
of tensors; reading such a file returns what was saved, without values.  In torch's own format, small tensors on the
host keep theirs.
"""

import contextlib
import functools
import inspect
import io
import json
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any

from tonnage_recorder.host import ZEROS
from tonnage_recorder.imports import after_import
from tonnage_recorder.tensors import tensors_in

from .overlay import Overlay

_TRAINERS = ("save_model", "save_state", "save_metrics", "_save_checkpoint", "create_model_card", "push_to_hub")
"""Methods of Hugging Face's Trainer that write below its `args.output_dir`."""

_FOLDERS = (
    ("transformers.modeling_utils", "PreTrainedModel", "save_pretrained", "save_directory"),
    ("peft.peft_model", "PeftModel", "save_pretrained", "save_directory"),
    ("diffusers.models.modeling_utils", "ModelMixin", "save_pretrained", "save_directory"),
    ("diffusers.pipelines.pipeline_utils", "DiffusionPipeline", "save_pretrained", "save_directory"),
    ("sentence_transformers.base.model", "BaseModel", "save", "path"),
    ("sentence_transformers.SentenceTransformer", "SentenceTransformer", "save", "path"),
    ("accelerate.accelerator", "Accelerator", "save_model", "save_directory"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine", "save_checkpoint", "save_dir"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine", "save_16bit_model", "save_dir"),
)
"""Methods that save into a folder: module, class, name, and the argument that names the folder."""

_TENSORS = ".distcp"
"""Ending of the files of torch.distributed.checkpoint with tensors; its other files are their index."""

_SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
}
"""Names of dtypes by torch's names; tensors of others are written as bytes."""

Use = Callable[[str], None]


class Saves:
    """Redirects what is saved in one process."""

    def __init__(self, torch: Any, folder: Path, use: Use) -> None:
        self._torch, self._use = torch, use
        self._files = Overlay(folder, use)
        self.path_for_writing, self._saved_path = self._files.path_for_writing, self._files.saved_path

    def install(self) -> None:
        """Patch Python's functions and torch now, and other libraries when they are imported."""
        self._files.install()
        serialization = self._torch.serialization
        serialization.save = self._torch.save = self._saving(serialization.save, serialization)
        serialization.load = self._torch.load = self._loading(serialization.load)
        after_import("torch.distributed.checkpoint.filesystem", self._patch_distributed)
        after_import("safetensors.torch", self._patch_safetensors)
        for package in ("lightning_fabric", "lightning.fabric"):
            after_import(f"{package}.utilities.cloud_io", self._patch_lightning)
        for module, kind, name, folder in _FOLDERS:
            after_import(module, functools.partial(self._redirect, kind, name, folder))
        after_import("transformers.trainer", self._patch_trainer)
        after_import("accelerate.accelerator", self._patch_accelerator)
        after_import("huggingface_hub.hf_api", self._patch_hub)

    def _saving(self, original: Any, serialization: Any) -> Any:
        @functools.wraps(original)
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(f, str | os.PathLike):
                if not self._files.holds(getattr(f, "name", None)):
                    return original(obj, f, *args, **kwargs)
                with _without_checksums(serialization):
                    return original(obj, _Hollow(f), *args, **kwargs)
            path = str(self.path_for_writing(f))
            with _without_bytes(serialization, kwargs.get("_use_new_zipfile_serialization", True)):
                original(obj, path, *args, **kwargs)
            if zipfile.is_zipfile(path):
                _add_values(original, path, _small(self._torch, obj))

        return save

    def _loading(self, original: Any) -> Any:
        @functools.wraps(original)
        def load(f: Any, *args: Any, **kwargs: Any) -> Any:
            kept = self._saved_path(f)
            if kept is None:
                return original(f, *args, **kwargs)
            zipped = zipfile.is_zipfile(kept)
            # Not by skip_data: up to torch 2.10 it makes storages as many times too large as an element has bytes.
            loaded = original(str(kept), *args, **{**kwargs, "mmap": zipped or None})
            values = _values_in(original, kept) if zipped else {}
            for index, tensor in enumerate(tensors_in(loaded, self._torch.Tensor)) if values else ():
                if index in values:
                    tensor.detach().copy_(values[index])
            return loaded

        return load

    def _patch_distributed(self, module: ModuleType) -> None:
        """Redirect every path of torch.distributed.checkpoint that is written, or was written by this run."""
        files: Any = module
        base: Any = files.FileSystem
        here, kept, serialization = self.path_for_writing, self._saved_path, self._torch.serialization

        class Elsewhere(base):  # type: ignore[misc]
            """Files of this run, and other files for reading."""

            @contextlib.contextmanager
            def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
                writes = "w" in mode
                with super().create_stream(here(path) if writes else kept(path) or path, mode) as stream:
                    if writes and str(path).endswith(_TENSORS):
                        with _without_checksums(serialization):
                            yield _Hollow(stream)
                    else:
                        yield stream

            def mkdir(self, path: Any) -> None:
                super().mkdir(here(path))

            def rename(self, path: Any, new_path: Any) -> None:
                super().rename(here(path), here(new_path))

            def exists(self, path: Any) -> bool:
                return kept(path) is not None or bool(super().exists(path))

            def rm_file(self, path: Any) -> None:
                if kept(path) is not None:
                    super().rm_file(here(path))

        files.FileSystem = Elsewhere

    def _patch_safetensors(self, module: ModuleType) -> None:
        library: Any = module
        package: Any = sys.modules["safetensors"]
        original = package.safe_open

        def save_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
            on_host = [self._copy_to_host(tensor) for tensor in tensors.values()]  # all live until it is written
            _write_empty(self.path_for_writing(filename), tensors, metadata)
            on_host.clear()

        def safe_open(filename: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self._saved_path(filename) or filename, *args, **kwargs)

        library.save_file = save_file
        package.safe_open = library.safe_open = safe_open

    def _copy_to_host(self, tensor: Any) -> Any:
        """Return a tensor on the host, as safetensors does before it writes the file."""
        if tensor.device.type != "cuda":
            return tensor
        copy = self._torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        ZEROS.add(copy)
        return copy

    def _patch_lightning(self, module: ModuleType) -> None:
        """Save directly, where Lightning would create the file in memory, with values, and write it in one go."""

        def _atomic_save(checkpoint: Any, filepath: Any) -> None:
            self._torch.save(checkpoint, self.path_for_writing(filepath))

        module._atomic_save = _atomic_save  # type: ignore[attr-defined]

    def _redirect(self, kind: str, name: str, folder: str, module: ModuleType) -> None:
        """Redirect a method that saves into a folder, and may remove files there or link the newest checkpoint."""
        owner: Any = getattr(module, kind, None)  # libraries move their classes from release to release
        original = getattr(owner, name, None)
        if original is None:
            return
        names = list(inspect.signature(original).parameters)

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(names, args, strict=False))
            rest, kwargs = args[len(given) :], {**given, **kwargs}
            kwargs.pop("push_to_hub", None)
            if kwargs.get(folder) is not None:
                kwargs[folder] = str(self.path_for_writing(kwargs[folder]))
            return original(kwargs.pop(names[0]), *rest, **kwargs)

        setattr(owner, name, method)

    def _patch_trainer(self, module: ModuleType) -> None:
        trainer: Any = module.Trainer
        for name in filter(functools.partial(hasattr, trainer), _TRAINERS):
            setattr(trainer, name, self._below(getattr(trainer, name)))

    def _below(self, original: Any) -> Any:
        """Return a method of the Trainer with its output folder in the run's folder."""
        names = list(inspect.signature(original).parameters)

        @functools.wraps(original)
        def method(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            given = dict(zip(names[1:], args, strict=False)) | kwargs
            if given.get("output_dir") is not None:
                given["output_dir"] = str(self.path_for_writing(given["output_dir"]))
            named = trainer.args.output_dir
            trainer.args.output_dir = str(self.path_for_writing(named))
            try:
                return original(trainer, **given)
            finally:
                trainer.args.output_dir = named

        return method

    def _patch_accelerator(self, module: ModuleType) -> None:
        accelerator: Any = module.Accelerator
        save_state = accelerator.save_state

        @functools.wraps(save_state)
        def state(self_: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
            settings = self_.project_configuration
            named = settings.project_dir
            try:
                if named is not None:
                    settings.project_dir = str(self.path_for_writing(named))
                folder = None if output_dir is None else str(self.path_for_writing(output_dir))
                return save_state(self_, folder, *args, **kwargs)
            finally:
                settings.project_dir = named

        accelerator.save_state = state

    def _patch_hub(self, module: ModuleType) -> None:
        """Send nothing: a repository is neither created nor changed."""
        hub: Any = module

        def made(api: Any, repo_id: str, **_: Any) -> Any:
            self._use("files")
            return hub.RepoUrl(f"{api.endpoint}/{repo_id}")

        def sent(api: Any, repo_id: str, *_: Any, run_as_future: bool = False, **__: Any) -> Any:
            self._use("files")
            commit = "0" * 40
            url = f"{api.endpoint}/{repo_id}/commit/{commit}"
            info = hub.CommitInfo(commit_url=url, commit_message="", commit_description="", oid=commit)
            return _done(info) if run_as_future else info

        for name in ("create_repo", "create_commit", "upload_file", "upload_folder", "upload_large_folder"):
            setattr(hub.HfApi, name, made if name == "create_repo" else sent)
            setattr(hub, name, getattr(hub.api, name))  # what the package exports is bound to this one


def _done(answer: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(answer)
    return future


class _Hollow:
    """A file that leaves a hole in place of each long write."""

    LONG = 1 << 20

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, data: Any) -> int:
        count = memoryview(data).nbytes
        if count < self.LONG:
            return int(self._stream.write(data))
        self._stream.truncate(self._stream.seek(count, os.SEEK_CUR))
        return count


def _without_bytes(serialization: Any, zipped: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context in which torch leaves out tensors' bytes, if it can and the file is a zip archive."""
    skipping = getattr(serialization, "skip_data", None)
    return skipping() if skipping is not None and zipped else contextlib.nullcontext()


@contextlib.contextmanager
def _without_checksums(serialization: Any) -> Iterator[None]:
    """Have torch not read tensors for the checksums of a file, which takes a second for 2 GB."""
    before = serialization.get_crc32_options()
    serialization.set_crc32_options(False)
    try:
        yield
    finally:
        serialization.set_crc32_options(before)


_SMALL_BYTES = 1 << 16
"""Largest size of tensors that keep their values: counts of steps have 4 bytes, the state of a random generator has
5,056, and a program may have a few numbers of its own."""

_VALUES = "tonnage_values"
"""Name of the record with the values of small tensors, in a file that torch saved."""


def _small(torch: Any, saved: Any) -> dict[int, Any]:
    """Return copies of tensors whose values a program uses when it loads them: counts of steps, random states."""
    plain = (torch.Tensor, torch.nn.Parameter)
    return {
        index: tensor.detach().clone()
        for index, tensor in enumerate(tensors_in(saved, torch.Tensor))
        if type(tensor) in plain and tensor.device.type == "cpu" and tensor.nbytes <= _SMALL_BYTES
    }


def _add_values(save: Any, path: str, values: dict[int, Any]) -> None:
    """Add the values of small tensors to a file that torch saved."""
    if not values:
        return
    written = io.BytesIO()
    save(values, written)
    with zipfile.ZipFile(path, "a") as archive:
        root = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{root}/{_VALUES}", written.getvalue())


def _values_in(load: Any, path: Path) -> dict[int, Any]:
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith(f"/{_VALUES}")]
        return dict(load(io.BytesIO(archive.read(names[0])), map_location="cpu")) if names else {}


def _write_empty(path: Path, tensors: Any, metadata: Any) -> None:
    """Write a file in the format of safetensors, at full length, with a hole in place of the tensors' bytes."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        kind = _SAFETENSORS.get(str(tensor.dtype).removeprefix("torch."))
        shape = list(tensor.shape) if kind else [tensor.nbytes]
        header[name] = {"dtype": kind or "U8", "shape": shape, "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
