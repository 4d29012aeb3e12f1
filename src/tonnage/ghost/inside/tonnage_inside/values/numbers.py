"""Small tensors of a user's program: known, guessed or forgotten.

What is computed from known numbers alone is known (counters, sizes, schedules, masks).  What hangs on weights is not
computed; if the program reads it or decides by it, it gets a plausible value: a loss or a norm is positive and falls
from step to step, probabilities of n classes are 1/n, half of a computed mask is true.  A guess is never taken for a
known value (`Policy.known`).  What a function overwrites gets its new value, or is forgotten.
"""

from __future__ import annotations

import functools
import importlib
import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tonnage_recorder.imports import after_import

from . import computed_number, integers
from .integers import KNOWN_BYTES, count_writes, hidden_from_modes, without_values
from .policy import memory_of

if TYPE_CHECKING:
    from .policy import Policy

MOST_GUESSED = 64
"""Largest number of elements of a tensor from which a guess follows by the operation itself: a few losses."""

_READ = frozenset(("item", "tolist", "cpu", "numpy", "__array__", "__format__", "__repr__"))
"""Methods that read a tensor on the host."""
_TRUTH = frozenset(("__bool__", "__float__", "__int__", "__index__", "__complex__"))
_MOVED = ("to", "copy_", "type")
"""Methods that read a tensor on the host if their result is there."""
_UNCHANGED = ("_amp_foreach_non_finite_check_and_unscale_",)
"""Functions that write a small tensor and leave its value: a gradient is finite."""
_NORMALISING = {"batch_norm": slice(1, 3), "instance_norm": slice(1, 3)}
"""Functions that write running means in C++ and count no version for it, and the places of these arguments."""
_MEANS = ("running_mean", "running_var")
_IN_PLACE = ("__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")))
_IN_PLACE += ("__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__")

_PROBABILITIES: dict[str, Callable[[int], float]] = {
    "softmax": lambda classes: 1 / classes,
    "log_softmax": lambda classes: -math.log(classes),
    "sigmoid": lambda classes: 0.5,
    "logsigmoid": lambda classes: math.log(0.5),
}
"""The usual value of results, by the number of classes."""
_KEEPING = frozenset(
    (
        *("float", "double", "half", "bfloat16", "to", "type", "mean", "max", "min", "amax", "amin", "median"),
        *("detach", "clone", "contiguous", "view", "reshape", "flatten", "squeeze", "unsqueeze", "transpose"),
        *("permute", "t", "__getitem__", "gather", "index_select", "select", "narrow", "chunk", "split", "topk"),
        *("sort", "cat", "stack"),
    )
)
"""Functions whose results have the usual value of what they are given."""
_COUNTING = ("sum", "count_nonzero")
_NOTED = frozenset((*_PROBABILITIES, *_KEEPING, *_COUNTING))
"""Functions whose results may have a usual value."""
_OVERWRITING = ("copy_", "zero_", "fill_", "_foreach_zero_", "_foreach_copy_")
"""Functions in which the old values of what they write do not matter."""


_NESTED = (list, tuple, dict)

_Arguments = tuple[Any, Any, dict[int, Any]] | None
"""Arguments of a function on the host, and each tensor among them by its address on the card."""


def follow(policy: Policy) -> None:
    """Follow the numbers of a user's program from now on in this thread, and in backward passes that it starts."""
    torch = policy.torch
    others = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    numbers = _Numbers(policy)
    mode = _mode(policy, numbers)
    numbers.follow_graphs()
    integers.take_over_in_backward(torch, mode)
    mode.__enter__()
    for other in reversed(others):
        torch._C._push_on_torch_function_stack(other)


def _mode(policy: Policy, numbers: _Numbers) -> Any:
    torch = policy.torch
    inside_transform = torch._C._functorch.peek_interpreter_stack

    class Numbers(torch.overrides.TorchFunctionMode):  # type: ignore[misc, name-defined]
        def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            options = kwargs or {}
            name = getattr(function, "__name__", "")
            if torch.compiler.is_compiling():
                return integers.called_in_graph(function, name, args, options)
            if name == "__get__" or inside_transform() is not None or _is_exchange(function):
                return function(*args, **options)
            return numbers.call(function, name, args, options)

    return Numbers()


def _is_exchange(function: Any) -> bool:
    """Return whether a function is of torch.distributed: libghost sees what its collectives write."""
    return str(getattr(function, "__module__", "")).startswith("torch.distributed")


class _Numbers:
    """The small tensors on the card that are known or guessed."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self._torch = policy, policy.torch
        self._tensor, self._strided = self._torch.Tensor, self._torch.strided
        self._kinds = (self._tensor, self._torch.nn.Parameter)
        self._usual: dict[int, tuple[Any, float]] = {}
        self._versions: dict[int, int] = {}
        """By address, how often a tensor had been written when its values became known."""
        self._captured: list[tuple[int, int]] | None = None
        """Memory of small tensors that are written by the CUDA graph that is being captured."""
        self._computed_number = computed_number.make_type(policy.note_branch)
        self._torch.serialization.add_safe_globals([float])  # as which a checkpoint has a computed number
        after_import("yaml.representer", self._represent)

    def _represent(self, module: Any) -> None:
        """Have YAML's writer take a computed number for the float that it is."""
        kind = module.SafeRepresenter
        kind.add_representer(self._computed_number, kind.represent_float)

    def call(self, function: Any, name: str, args: Any, options: Any) -> Any:
        """Call a function of torch, and make known or guess what it makes and writes."""
        small = self._small((args, options))
        if self._captured is not None:
            return self._capture(function, args, options, small)
        if small and (name in _READ or name in _TRUTH):
            return self._read(function, name, args, options)
        if small and name in _MOVED and self._is_to_host(name, args, options):
            return self._moved(function, args, options)
        versions = [count_writes(each) for each in small]
        in_place = bool(small) and _is_in_place(name, options)
        before = guessed = None
        if in_place and not without_values(name):
            before = self._on_host(args, options, overwritten=args[0] if name in _OVERWRITING else None)
            if before is None and small[0].numel() == 1:
                guessed = self._on_host(args, options, guessing=True)
        result = function(*args, **options)
        written = [each for each, version in zip(small, versions, strict=True) if count_writes(each) != version]
        if in_place and not written and any(each.is_inference() for each in small):
            written = self._small((args[:1], options.get("out")))
        if name in _NORMALISING:
            written += self._small((args[_NORMALISING[name]], [options.get(each) for each in _MEANS]))
        if written and name not in _UNCHANGED:
            self._overwrite(function, written, before, guessed)
        if not in_place:
            self._complete(function, name, args, options, result, small)
        return result

    def _plain(self, value: Any) -> Any:
        """Return the tensor that has the memory: of a number that all ranks have, this rank's."""
        if type(value) in self._kinds or not isinstance(value, self._tensor):
            return value
        local = getattr(value, "_local_tensor", None)
        return local if local is not None and local.numel() == value.numel() == 1 else value

    def _small(self, values: Any) -> list[Any]:
        """Return the small tensors on the card among nested values."""
        kinds, is_small, found = self._kinds, self._is_small, []
        for value in _flattened(values):  # as few calls as possible, since this runs for every call of a program
            if type(value) in kinds:
                if is_small(value):
                    found.append(value)
            elif isinstance(value, self._tensor) and is_small(plain := self._plain(value)):
                found.append(plain)
        return found

    def _is_small(self, value: Any) -> bool:
        is_strided = type(value) in self._kinds and value.is_cuda and value.layout is self._strided
        return is_strided and value.nbytes <= KNOWN_BYTES

    # -- what a function makes

    def _complete(self, function: Any, name: str, args: Any, options: Any, result: Any, small: list[Any]) -> None:
        """Make known the small results of a function, or guess them; `small` are the small tensors it was given."""
        wanted = self._small(result)
        is_unknown = any(type(each) is not self._tensor or each.requires_grad for each in small)
        is_unknown = is_unknown or not all(map(self._is_readable, small))
        if is_unknown:  # most calls of a network end here
            wanted = [each for each in wanted if each.numel() == 1 or name in _COUNTING]
        wanted = [each for each in wanted if not self._is_readable(each)]
        if not wanted or without_values(name):
            if is_unknown or self._usual or name in _PROBABILITIES:
                self._note_usual(name, args, result)
            return
        computed = None
        if not is_unknown and not all(each.requires_grad for each in wanted):
            computed = self._computed(function, self._on_host(args, options))
        if computed is not None:
            for made, value in zip(_flattened(result), _flattened(computed[0]), strict=False):
                made = self._plain(made)
                if isinstance(value, self._torch.Tensor) and self._is_small(made) and made.shape == value.shape:
                    self._write(made, value)
            return
        self._note_usual(name, args, result)
        for each in wanted:
            if each.numel() == 1 or name in _COUNTING:
                self._guess(each, lambda: self._computed(function, self._on_host(args, options, guessing=True)))

    def _computed(self, function: Any, given: _Arguments) -> tuple[Any] | None:
        """Return what a function makes on the host of these arguments, in a tuple; None if it cannot."""
        if given is None:
            return None
        try:
            with hidden_from_modes(self._torch), self._torch.no_grad():
                return (function(*given[0], **given[1]),)
        except Exception:  # which the host does not have for this dtype, or which has failed on the card too
            return None

    def _on_host(self, args: Any, options: Any, *, guessing: bool = False, overwritten: Any = None) -> _Arguments:
        """Return arguments with tensors of the host, and each of these by the address of the card's.

        None if one of them is not known.  With `guessing`, small tensors that are not known are guessed; those in
        `overwritten` may have any values.
        """
        torch = self._torch
        any_values = {id(each) for each in _flattened(overwritten)}
        made: dict[int, Any] = {}

        def on_host(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if not value.is_cuda:
                    if value.nbytes > KNOWN_BYTES:
                        raise LookupError
                    return value
                if id(value) in any_values and self._is_small(value):
                    value_on_host = torch.zeros(value.shape, dtype=value.dtype, device="cpu")
                else:
                    value_on_host = self._value(self._plain(value), guessing).view(value.shape)
                return made.setdefault(value.data_ptr(), value_on_host)
            if isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda")):
                return torch.device("cpu")
            if isinstance(value, slice):
                return slice(on_host(value.start), on_host(value.stop), on_host(value.step))
            if isinstance(value, list | tuple):
                items = [on_host(item) for item in value]
                return items if type(value) is list else tuple(items)
            if isinstance(value, dict):
                return {key: on_host(item) for key, item in value.items()}
            return value

        try:
            with hidden_from_modes(torch):
                return on_host(args), on_host(options), made
        except LookupError:
            return None

    def _value(self, tensor: Any, guessing: bool) -> Any:
        """Return a tensor's value on the host.  Raises LookupError if it is not known and not to be guessed."""
        if not self._is_small(tensor):
            raise LookupError
        value = self._known(tensor)
        if value is None and guessing and tensor.numel() <= MOST_GUESSED:
            value = self._policy.readable(tensor)
            if value is None and tensor.is_floating_point():
                value = self._typical(tensor)
        if value is None:
            raise LookupError
        return value

    def _known(self, tensor: Any) -> Any:
        """Return the values of a small tensor that is known and hangs on no weights, else None."""
        if tensor.requires_grad or type(tensor) is not self._torch.Tensor:
            return None
        self._forget_stale(tensor)
        return self._policy.known(tensor)

    def _is_readable(self, tensor: Any) -> bool:
        self._forget_stale(tensor)
        return self._policy.is_readable(tensor)

    def _forget_stale(self, tensor: Any) -> None:
        """Forget what was known of a tensor that has been written from C++: a gradient that backward has added to."""
        seen, native = self._versions.get(tensor.data_ptr()), self._policy.native
        if seen is not None and native is not None and count_writes(tensor) > seen:
            native.forget_followed(*memory_of(tensor))
            del self._versions[tensor.data_ptr()]

    # -- what a function writes

    def _write(self, tensor: Any, values: Any) -> None:
        self._policy.write(tensor, values)
        self._versions[tensor.data_ptr()] = count_writes(tensor)

    def _overwrite(self, function: Any, written: list[Any], before: _Arguments, guessed: _Arguments) -> None:
        """Make known what an in-place function has written; guess it or forget it if that is not known.

        `before` has the arguments as they were on the host, `guessed` the same with guesses, each if there are any.
        """
        is_computed = self._computed(function, before) is not None
        is_guessed = not is_computed and self._computed(function, guessed) is not None
        for each in written:
            values = before[2].get(each.data_ptr()) if before is not None and is_computed else None
            if values is not None and values.shape == each.shape:
                self._write(each, values)
                continue
            self._policy.forget(each)
            guess = guessed[2].get(each.data_ptr()) if guessed is not None and is_guessed else None
            if self._is_finite(guess, each.shape):
                self._policy.guess(each, guess)

    def follow_graphs(self) -> None:
        """Forget, with each replay of a CUDA graph, what the captured functions write."""
        kind = self._torch.cuda.CUDAGraph
        begin, end, replay = kind.capture_begin, kind.capture_end, kind.replay
        written: weakref.WeakKeyDictionary[Any, list[tuple[int, int]]] = weakref.WeakKeyDictionary()

        @functools.wraps(begin)
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
            begin(graph, *args, **kwargs)
            self._captured = []

        @functools.wraps(end)
        def capture_end(graph: Any) -> None:
            written[graph], self._captured = self._captured or [], None
            end(graph)

        @functools.wraps(replay)
        def replayed(graph: Any) -> None:
            replay(graph)
            for memory in written.get(graph, ()):
                self._policy.forget_memory(*memory)

        kind.capture_begin, kind.capture_end, kind.replay = capture_begin, capture_end, replayed

    def _capture(self, function: Any, args: Any, options: Any, small: list[Any]) -> Any:
        """Call a function whose work is done when the graph is replayed."""
        versions = [count_writes(each) for each in small]
        result = function(*args, **options)
        written = [each for each, version in zip(small, versions, strict=True) if count_writes(each) != version]
        for each in (*written, *self._small(result)):
            self._policy.forget(each)
            if self._captured is not None:
                self._captured.append(memory_of(each))
        return result

    # -- guesses

    def _guess(self, tensor: Any, compute: Callable[[], Any]) -> None:
        """Let a tensor read as what is computed from other guesses, or as its usual value."""
        usual = self._usual_of(tensor)
        if self._policy.rule(tensor) is not None:
            return
        computed = compute() if usual is None else None
        values = computed[0] if computed is not None else None
        if self._is_finite(values, tensor.shape):
            self._policy.guess(tensor, values)
        elif tensor.is_floating_point() or usual is not None:
            self._policy.guess(tensor, self._typical(tensor))

    def _is_finite(self, values: Any, shape: Any) -> bool:
        is_alike = isinstance(values, self._torch.Tensor) and values.shape == shape
        return is_alike and bool(values.isfinite().all())

    def _typical(self, tensor: Any) -> Any:
        """Return the usual values of a tensor on the host: those of a loss or a norm, unless something is noted."""
        usual = self._usual_of(tensor)
        if usual is None:
            usual = 1 + 1 / (2 + self._policy.completed_steps()) if tensor.is_floating_point() else 0
        return self._torch.full(tensor.shape, usual, device="cpu").to(tensor.dtype)

    def _usual_of(self, tensor: Any) -> float | None:
        noted = self._usual.get(tensor.untyped_storage().data_ptr()) if self._usual else None
        return None if noted is None or noted[0].expired() else noted[1]

    def _note_usual(self, name: str, args: Any, result: Any) -> None:
        """Note the usual value of a function's results, if it makes probabilities or is given some."""
        if name not in _NOTED:
            return
        given = next((each for each in _flattened(args) if self._is_strided(each)), None)
        made = [each for each in _flattened(result) if self._is_strided(each)]
        if given is None or not made:
            return
        usual = self._usual_of(given)
        if usual is None and given.dtype == self._torch.bool and self._policy.rule(given) is None:
            usual = 0.5 if name in (*_COUNTING, *_KEEPING) else None
        if name in _PROBABILITIES:
            usual = _PROBABILITIES[name](made[0].shape[-1] if made[0].ndim else 1)
        elif name in _COUNTING and usual is not None:
            usual = usual * given.numel() / max(1, made[0].numel())
        if usual is None:
            return
        for each in made:
            if each.is_floating_point() or name in _COUNTING:
                self._add_usual(each, usual)

    def _add_usual(self, tensor: Any, usual: float) -> None:
        storage = tensor.untyped_storage()
        reference = importlib.import_module("torch.multiprocessing.reductions").StorageWeakRef(storage)
        if len(self._usual) > 256:
            self._usual = {address: noted for address, noted in self._usual.items() if not noted[0].expired()}
        self._usual[storage.data_ptr()] = (reference, usual)

    def _is_strided(self, value: Any) -> bool:
        torch = self._torch
        if type(value) not in self._kinds or not value.is_cuda or value.layout is not torch.strided:
            return False
        return not torch._C._functorch.is_functorch_wrapped_tensor(value)

    # -- reads

    def _read(self, function: Any, name: str, args: Any, options: Any) -> Any:
        """Read a tensor on the host; the program may go one of two ways by it."""
        tensor = self._plain(args[0])
        if not self._is_small(tensor):
            return function(*args, **options)
        if self._known(tensor) is not None:
            return self._read_in_place(function, tensor, args, options)
        self._settle(tensor)
        result = self._read_in_place(function, tensor, args, options)
        if name == "__bool__":
            self._policy.note_branch(f"a tensor is {'true' if result else 'false'}")
        elif name == "item" and type(result) is float:
            return self._computed_number(result)
        elif name not in ("__repr__", "__format__"):
            self._policy.use("numbers")
        return result

    def _read_in_place(self, function: Any, tensor: Any, args: Any, options: Any) -> Any:
        """Read a tensor; one that a kernel would have to gather first is read where it is."""
        values = None if tensor.is_contiguous() else self._policy.readable(tensor)
        return function(*args, **options) if values is None else function(values, *args[1:], **options)

    def _settle(self, tensor: Any) -> None:
        """Let floats that are read and have no value read as their usual ones."""
        if tensor.is_floating_point() and not self._is_readable(tensor):
            self._guess(tensor, lambda: None)

    def _is_to_host(self, name: str, args: Any, options: Any) -> bool:
        if name == "copy_":
            return not args[0].is_cuda
        return any(
            str(each).startswith("cpu")
            for each in (*args[1:], *options.values())
            if isinstance(each, str | self._torch.device)
        )

    def _moved(self, function: Any, args: Any, options: Any) -> Any:
        """Copy a tensor to the host."""
        source = args[0] if args[0].is_cuda else args[1]
        if self._is_small(source):
            self._settle(source)
            if source.is_floating_point() and self._known(source) is None:
                self._policy.use("numbers")
        result = function(*args, **options)
        if self._is_small(source) and not source.is_contiguous():
            values = self._policy.readable(source)
            if values is not None:
                with hidden_from_modes(self._torch), self._torch.no_grad():
                    result.copy_(values)
        return result


def _flattened(value: Any) -> list[Any]:
    """Return the values in nested lists, tuples and dictionaries."""
    if not isinstance(value, _NESTED):
        return [value]
    leaves = []
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, _NESTED):
            leaves += _flattened(item)
        else:
            leaves.append(item)
    return leaves


@functools.cache
def _is_in_place_name(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE


def _is_in_place(name: str, options: Any) -> bool:
    return _is_in_place_name(name) or options.get("out") is not None
