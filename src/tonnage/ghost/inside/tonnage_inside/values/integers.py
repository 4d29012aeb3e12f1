"""Integers whose values are known, and computations from them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .policy import Policy

KNOWN_BYTES = 1 << 20
"""Largest size of tensors whose values are remembered, as the ghost remembers copies."""

MOST_BYTES = 64 * KNOWN_BYTES
"""Largest size of tensors that are computed on the host from a rule."""

_SIZED_BY_VALUES = ("repeat_interleave", "unique", "unique_consecutive", "bincount", "masked_select", "argwhere")
_READ_OUT = ("tolist", "cpu", "numpy")
_REPLACED = (
    *("sum", "all", "any", "max", "argmax", "cumsum", "isfinite", "isnan", "isinf", "bool", "int", "long"),
    *("scatter", "scatter_", "scatter_add", "scatter_add_", "index_add", "index_add_"),
    *("__or__", "__ior__", "__and__", "__iand__", "logical_or", "logical_and"),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "eq", "ne", "lt", "le", "gt", "ge"),
)
_NOT_COMPUTED = ("__get__", "normal", "poisson", "cauchy_", "geometric_", "rrelu", "lstm", "gru", "rnn_tanh")
_DRAWN = ("empty", "rand", "dropout", "bernoulli", "multinomial", "normal_", "uniform", "exponential", "attention")
"""Parts of the names of functions whose results are unset or drawn: the host's generator is left alone."""


@functools.cache
def without_values(name: str) -> bool:
    """Return whether results of a function of this name have no values that could be known."""
    return name in _NOT_COMPUTED or any(word in name for word in _DRAWN)


def of_compiler(tensor: Any) -> bool:
    """Return whether this is a tensor of a graph that is being compiled, such as that of a backward's first run."""
    return type(tensor).__module__.startswith("torch._subclasses.")


def hidden_from_modes(torch: Any) -> Any:
    """Return a context in which the program's dispatch modes see no operation, for computations on the host.

    A mode that compares the operations of forward and backward, as checkpointing does, must find the same in both.
    """
    return torch._C._DisableTorchDispatch()


@contextlib.contextmanager
def without_following(torch: Any) -> Iterator[None]:
    """Set this package's modes aside: code that saves what Dynamo compiles would have to save them with it."""
    ours = _take_modes(torch, keep_others=True)
    try:
        yield
    finally:
        others = _take_modes(torch)
        for mode in sorted([*ours, *others], key=_is_ours, reverse=True):
            torch._C._push_on_torch_function_stack(mode)


def _take_modes(torch: Any, *, keep_others: bool = False) -> list[Any]:
    """Take all modes from the stack, and return them, the lowest first; with `keep_others` only this package's."""
    modes = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())][::-1]
    if not keep_others:
        return modes
    for mode in modes:
        if not _is_ours(mode):
            torch._C._push_on_torch_function_stack(mode)
    return [mode for mode in modes if _is_ours(mode)]


def _is_ours(mode: Any) -> bool:
    return type(mode).__module__.startswith(f"{__package__}.")


def is_sparse(torch: Any, tensor: Any) -> bool:
    """Return whether a tensor consists of indices and values, each a tensor, and has no memory of its own."""
    return bool(tensor.layout != torch.strided)


def is_small(torch: Any, value: Any, *, numbers: bool = False) -> bool:
    """Return whether this is a small tensor on the card, of integers or with `numbers` of any dtype."""
    if not isinstance(value, torch.Tensor) or not value.is_cuda or of_compiler(value) or is_sparse(torch, value):
        return False
    return bool((numbers or not value.dtype.is_floating_point) and value.nbytes <= KNOWN_BYTES)


def count_writes(tensor: Any) -> int:
    """Return how often a tensor was written in place; 0 for one of inference mode, of which that is not counted."""
    return 0 if tensor.is_inference() else int(tensor._version)


def known_integers(policy: Policy, *, numbers: bool = False) -> Any:
    """Return a mode in which operations on small integers whose values are known have known results.

    With `numbers` this holds for all small tensors, such as a detector's boxes and its matching.
    """
    torch = policy.torch
    host = torch.device("cpu")
    inside_transform = torch._C._functorch.peek_interpreter_stack

    def on_host(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            known = policy.known(value)
            if known is None:
                raise LookupError
            return known
        if isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda")):
            return host
        if isinstance(value, slice):
            return slice(on_host(value.start), on_host(value.stop), on_host(value.step))
        if isinstance(value, list | tuple):
            return type(value)([on_host(item) for item in value])
        if isinstance(value, dict):
            return {key: on_host(item) for key, item in value.items()}
        return value

    def done_on_host(function: Any, args: Any, options: Any) -> Any:
        with hidden_from_modes(torch):
            return function(*on_host(args), **on_host(options))

    small = functools.partial(is_small, torch, numbers=numbers)

    def on_card(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(on_card(item) for item in value)
        return value.to("cuda") if isinstance(value, torch.Tensor) else value

    def wanting(result: Any) -> bool:
        """Return whether values of the result have to be computed."""
        if isinstance(result, tuple | list):
            return any(wanting(each) for each in result)
        return small(result) and policy.known(result) is None

    def completed(result: Any, values: Any) -> Any:
        """Return the result with the values that the host computed."""
        if isinstance(result, tuple | list):
            for pair in zip(result, values, strict=False):
                completed(*pair)
        elif small(result) and isinstance(values, torch.Tensor):
            if result.shape != values.shape:
                return on_card(values)
            policy.write(result, values)
        return result

    class KnownIntegers(torch.overrides.TorchFunctionMode):  # type: ignore[misc, name-defined]
        def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            options = kwargs or {}
            name = getattr(function, "__name__", "")
            if torch.compiler.is_compiling():
                return called_in_graph(function, name, args, options)
            if without_values(name) or inside_transform() is not None:
                return function(*args, **options)
            if name in _READ_OUT and small(args[0]):
                known = policy.known(args[0])  # of a view that a kernel would have to gather first, too
                return function(args[0] if known is None else known, *args[1:], **options)
            if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
                return self.changed(function, args, options)
            if name in _SIZED_BY_VALUES and any(small(each) for each in args):
                with contextlib.suppress(LookupError):
                    return on_card(done_on_host(function, args, options))
            result = function(*args, **options)
            if wanting(result):
                with contextlib.suppress(LookupError):
                    return completed(result, done_on_host(function, args, options))
            return result

        def changed(self, function: Any, args: Any, options: Any) -> Any:
            """Call a function that writes its first argument, and make its new values known."""
            values = None
            if args and small(args[0]):
                with contextlib.suppress(LookupError), hidden_from_modes(torch):
                    values = on_host(args)
                    values = (values[0].clone(), *values[1:])
                    function(*values, **on_host(options))
            result = function(*args, **options)
            if values is not None:
                policy.write(args[0], values[0])
            return result

    return KnownIntegers


def called_in_graph(function: Any, name: str, args: Any, options: Any) -> Any:
    """Call a function in a graph that Dynamo makes.

    Dynamo takes a tensor's method by its name, but cannot see into what replaced it (see `values`).
    """
    return getattr(args[0], name)(*args[1:], **options) if name in _REPLACED else function(*args, **options)


def follow(policy: Policy) -> None:
    """Make known, from now on in this thread, what is computed from known integers."""
    torch = policy.torch
    if torch._C._len_torch_function_stack() == 0:
        mode = known_integers(policy)()
        take_over_in_backward(torch, mode)
        mode.__enter__()


def take_over_in_backward(torch: Any, mode: Any) -> None:
    """Keep the mode in the engine's threads, which take the caller's modes and run checkpointed layers again.

    A mode is suspended while it handles a function such as `backward`, so the engine would be called without it.
    """
    autograd = torch.autograd
    original = autograd._engine_run_backward

    @functools.wraps(original)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        aside = torch._C._len_torch_function_stack() == 0
        with mode if aside else contextlib.nullcontext():
            return original(*args, **kwargs)

    autograd._engine_run_backward = run_backward
