"""What DTensor decided in a worker's runs before: how the results of operations are divided.

It follows from the operation, from the shapes, dtypes and placements of what it is given and from how its mesh is
laid out, whichever rank asks.  Each run is a fork that begins with nothing decided, and torch takes up to two
milliseconds for each of some 150 kinds of operations.  A run leaves what it decided in a file of a folder, which
the worker reads when the run has ended, so that those after it know; workers that work for one search have one
folder.  In what is kept a mesh is its layout, in place of which the mesh is put that the operation has which asks.

So it is with what torch looks up of an operation's name when a tensor made in Python first sees it: that is looked up
in the worker, for the runs to come.
"""

import contextlib
import functools
import io
import os
import pickle
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from .imports import after_import

_known: dict[Hashable, bytes] = {}
"""What was decided, by what was asked."""
_new: dict[Hashable, bytes] = {}
"""Of it, what this process decided."""
_ready: dict[Hashable, tuple[Any, list[Any]]] = {}
"""Of it, what was read before it is asked, for one time: the answer, and the specifications in it without a mesh."""
_reading: list[Any] | None = None
"""The specifications without a mesh that were read so far, while an answer is read before it is asked."""
_looked_up: set[str] = set()
"""The names of operations that had been looked up when this process began."""
_learned: set[str] = set()
"""The names of files that were read."""
_meshes: dict[str, Any] = {}
"""The meshes of the operation that is decided about, by their layouts."""
_layouts: dict[int, tuple[Any, str]] = {}
"""The meshes met so far, by their identities, with their layouts."""


_BUILT_IN = ("aten::", "_c10d_functional::")
"""How names of operations begin that are the same in each process."""

_DRAFT = ".draft"
"""How the name of a file ends that is being written."""

_DECIDES = "torch.distributed.tensor._sharding_prop"
"""The part of torch that decides."""


class _NotKept(Exception):
    """Something of a question or an answer means nothing to another process."""


def install() -> None:
    """Answer from what was decided before when torch's part that decides is imported."""
    _looked_up.update(_names())
    after_import(_DECIDES, _remember)


def leave(folder: str) -> None:
    """Write down what this process decided and looked up, for `learn`; nothing if that is nothing."""
    names = [name for name in _names() if name not in _looked_up and name.startswith(_BUILT_IN)]
    if _new or names:
        path = Path(folder) / f"{time.time_ns()}-{os.getpid()}"
        draft = path.with_suffix(_DRAFT)
        draft.write_bytes(pickle.dumps((_new, names)))
        draft.rename(path)  # others read it as soon as it is there


def learn(folder: str) -> None:
    """Know what runs have left that were not known yet."""
    for path in Path(folder).iterdir():
        if path.name in _learned or path.suffix == _DRAFT:
            continue
        _learned.add(path.name)
        decided, names = pickle.loads(path.read_bytes())
        new = {asked: answer for asked, answer in decided.items() if asked not in _known}
        _known.update(new)
        if _DECIDES in sys.modules:
            for asked, answer in new.items():
                with contextlib.suppress(AttributeError, ImportError, TypeError):  # of what only that run had
                    _ready[asked] = _read_ahead(answer)
        for name in names:
            _registry().find(name)


def _registry() -> Any:
    """Where torch keeps what it has looked up, by the names of operations; None in a torch that has no such thing."""
    return getattr(sys.modules.get("torch._library.simple_registry"), "singleton", None)


def _names() -> Iterable[str]:
    return list(getattr(_registry(), "_data", ()))


def _read_ahead(answer: bytes) -> tuple[Any, list[Any]]:
    """An answer without its meshes, and the specifications that lack theirs."""
    global _reading
    _reading = []
    try:
        return pickle.loads(answer), _reading
    finally:
        _reading = None


def _answered(asked: Hashable) -> Any:
    """What is known, with the meshes of whoever asks."""
    answer, lacking = _ready.pop(asked, (None, None))
    if lacking is None:
        return pickle.loads(_known[asked])
    for specification in lacking:
        own = vars(specification)
        own["mesh"] = _meshes[own["mesh"]]
    return answer


def _remember(module: ModuleType) -> None:
    original: Callable[[Any, Any], Any] | None
    original = getattr(module.ShardingPropagator, "propagate_op_sharding_non_cached", None)
    if original is None:
        return
    asking, packed = _asking(module), functools.partial(_packed, _pickler(module))

    @functools.wraps(original)
    def propagate(propagator: Any, operation: Any) -> Any:
        _meshes.clear()
        try:
            asked = asking(operation)
        except _NotKept:
            return original(propagator, operation)
        if asked in _known:
            return _answered(asked)
        before = _handed_out()
        answer = original(propagator, operation)
        if _handed_out() != before:  # fake tensors take a few bytes of the card in some versions: each run takes them
            return answer
        with contextlib.suppress(_NotKept):
            _known[asked] = _new[asked] = packed(answer)
        return answer

    module.ShardingPropagator.propagate_op_sharding_non_cached = propagate


def _handed_out() -> int:
    """How many blocks the card's allocator has handed out so far; 0 before there is a card."""
    import torch

    if not torch.cuda.is_initialized():
        return 0
    statistics = torch._C._cuda_memoryStats(torch.cuda.current_device())
    return int(statistics["allocation"]["all"]["allocated"])


def _asking(module: ModuleType) -> Callable[[Any], Hashable]:
    """Gives what is asked about an operation as plain values, equal ones for equal questions; raises _NotKept.

    What torch says of an operation itself (`schema_info`) follows from its name.
    """
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import TensorMeta
    from torch.distributed.tensor.placement_types import Partial, Placement

    themselves = (type(None), str, torch.dtype, torch.device, torch.memory_format, torch.layout)

    def is_kept(kind: Any) -> bool:
        return issubclass(kind, Placement) and not (issubclass(kind, Partial) and kind is not Partial)

    is_placement: Callable[[Any], bool] = functools.cache(is_kept)  # their own kind answers slowly

    def of_specification(spec: Any) -> Iterator[tuple[str, Hashable]]:
        for name, value in vars(spec).items():
            if name != "_hash":  # an order is tuples of numbers alone
                yield name, cast(Hashable, value) if name == "shard_order" else asked(value)

    def asked(value: Any) -> Hashable:
        kind, plain = type(value), cast(Hashable, value)
        if kind in themselves:
            return plain
        if kind in (int, bool, float):
            return kind.__name__, repr(value)  # 1, 1.0 and True are equal
        if kind is TensorMeta:
            return tuple(value.shape), tuple(value.stride), value.dtype
        if isinstance(value, tuple | list):
            return kind.__name__, *map(asked, value)
        if kind is module.DTensorSpec:
            return "spec", *of_specification(value)
        if is_placement(kind):
            return plain
        if kind is dict:
            return "dict", *((name, asked(each)) for name, each in value.items())
        if kind is DeviceMesh:
            layout = _layout(value)
            _meshes.setdefault(layout, value)
            return layout
        if isinstance(value, module.OpSchema):
            return str(value.op), asked(value.args_schema), asked(value.kwargs_schema)
        raise _NotKept

    return asked


def _layout(mesh: Any) -> str:
    """How a mesh is laid out, counted from its first rank."""
    if id(mesh) not in _layouts:
        ranks = mesh.mesh - mesh.mesh.min()
        _layouts[id(mesh)] = mesh, f"{mesh.device_type} {mesh.mesh_dim_names} {ranks.tolist()}"
    return _layouts[id(mesh)][1]


def _packed(pickler: Any, answer: Any) -> bytes:
    """What was decided, for another process.  Raises _NotKept."""
    file = io.BytesIO()
    try:
        pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(answer)
    except (pickle.PicklingError, TypeError, AttributeError) as error:  # a kind of value that cannot be written
        raise _NotKept from error
    return file.getvalue()


def _pickler(module: ModuleType) -> type[pickle.Pickler]:
    """Of schemas of operations and specifications of tensors."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Partial

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, module.DTensorSpec):
                return _specification, ({name: each for name, each in vars(value).items() if name != "_hash"},)
            if isinstance(value, module.OpSchema):
                return module.OpSchema, (value.op, value.args_schema, value.kwargs_schema, value.schema_info)
            if isinstance(value, DeviceMesh):
                if _layout(value) not in _meshes:
                    raise _NotKept
                return _mesh, (_layout(value),)
            if isinstance(value, torch._ops.OpOverload):
                return _operation, (value.namespace, value._opname, value._overloadname)
            if type(value).__name__ == "_MaskPartial":
                return type(value), (value.reduce_op, value.mask_buffer, value.offset_shape, value.offset_dim)
            if type(value).__name__ == "MaskBuffer":  # which the ends of an embedding share
                return _empty(value)
            if isinstance(value, torch.Tensor) or (isinstance(value, Partial) and type(value) is not Partial):
                raise _NotKept
            return NotImplemented

    return Pickler


def _empty(buffer: Any) -> tuple[Any, tuple[Any, ...]]:
    """What makes a mask's buffer again.  Raises _NotKept if there is a mask in it."""
    if buffer.refcount:
        raise _NotKept
    return type(buffer), ()


def _specification(state: dict[str, Any]) -> Any:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    found = object.__new__(DTensorSpec)
    vars(found).update(state, _hash=None)
    if _reading is not None:
        _reading.append(found)
    return found


def _mesh(layout: str) -> Any:
    return _meshes[layout] if _reading is None else layout


def _operation(namespace: str, name: str, overload: str) -> Any:
    import torch

    return getattr(getattr(getattr(torch.ops, namespace), name), overload)
