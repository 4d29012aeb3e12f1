"""Repeats on the host what compiled code computes from known integers, as `integers` does for other code.

A kernel that Inductor generates has no values to read.  But Dynamo passes what it compiles as a graph of torch's
functions, and those that lead to integers are few: they are repeated on the host whenever the compiled code has run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from tonnage_recorder.imports import after_import

from .integers import KNOWN_BYTES, count_writes, is_small, without_values

if TYPE_CHECKING:
    from .policy import Policy


def follow(policy: Policy) -> None:
    """Repeat integer computations of every graph that Dynamo finds from now on."""
    after_import("torch._dynamo.output_graph", functools.partial(_patch, policy))


def leave_alone(torch: Any, modules: Iterable[ModuleType]) -> None:
    """Have Dynamo run the code of these modules as it is where it is called between compiled frames.

    Otherwise Dynamo compiles each such function by itself, with `is_compiling` true, and warns if it cannot.  A
    function that is called inside a frame is compiled with it all the same.  Unlike `torch.compiler.disable`, a mark
    on the code does not import Dynamo.
    """
    mark = _mark(torch._C._dynamo.eval_frame)
    for module in modules:
        for value in vars(module).values():
            members = vars(value).values() if isinstance(value, type) else (value,)
            for function in members:
                if getattr(function, "__module__", None) == module.__name__ and hasattr(function, "__code__"):
                    for code in _within(function.__code__):
                        mark(code)


def _mark(frames: Any) -> Callable[[CodeType], None]:
    """Return the function that makes Dynamo skip a code but not its callees; versions 2.4 to 2.6 have `skip_code`."""
    if hasattr(frames, "skip_code"):
        skip: Callable[[CodeType], None] = frames.skip_code
        return skip
    as_it_is = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    return lambda code: frames.set_code_exec_strategy(code, as_it_is)


def _within(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of those that it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _within(constant)


def _patch(policy: Policy, module: ModuleType) -> None:
    kind = module.OutputGraph  # type: ignore[attr-defined]
    original = kind.call_user_compiler

    @functools.wraps(original)
    def call_user_compiler(found: Any, graph_module: Any, *args: Any, **kwargs: Any) -> Any:
        graph = _Graph(policy, graph_module)  # before the compiler, which may change it
        made = original(found, graph_module, *args, **kwargs)
        return graph.beside(made)

    kind.call_user_compiler = call_user_compiler


class _Graph:
    """The part of a graph that leads to integers on the card."""

    def __init__(self, policy: Policy, graph_module: Any) -> None:
        self.policy, self.torch = policy, policy.torch
        nodes = list(graph_module.graph.nodes)
        self.places = {node: position for position, node in enumerate(n for n in nodes if n.op == "placeholder")}
        results = nodes[-1].args[0]
        self.results: Sequence[Any] = results if isinstance(results, list | tuple) else (results,)
        wanted = [node for node in self.results if self._integers(node)]
        needed = set(wanted)
        for node in reversed(nodes):
            if node in needed:
                needed.update(node.all_input_nodes)
        self.steps = [node for node in nodes if node in needed] if wanted else []

    def beside(self, made: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs the compiled code and then the same computation of integers on the host.

        What the code writes in place is forgotten.
        """

        def run(*args: Any) -> Any:
            with self.torch._C.DisableTorchFunction():
                small = [(arg, count_writes(arg)) for arg in args if is_small(self.torch, arg, numbers=True)]
            known = [self._given(arg) for arg in args] if self.steps else []  # the code may write to them
            results = made(*args)
            with self.torch._C.DisableTorchFunction():
                for arg, writes in small:
                    if count_writes(arg) != writes:
                        self.policy.forget(arg)
                if self.steps and isinstance(results, list | tuple):
                    self._write(results, self._values(known))
            return results

        return run

    def _integers(self, node: Any) -> bool:
        example = getattr(node, "meta", {}).get("example_value")
        if not isinstance(example, self.torch.Tensor) or example.device.type != "cuda":
            return False
        return not (example.dtype.is_floating_point or example.dtype.is_complex)

    def _given(self, value: Any) -> Any:
        """Return the value of a graph's input on the host; None if it is not known."""
        if not isinstance(value, self.torch.Tensor):
            return value
        return self.policy.known(value) if is_small(self.torch, value) else None

    def _values(self, known: list[Any]) -> dict[Any, Any]:
        values: dict[Any, Any] = {}
        for node in self.steps:
            try:
                value = known[self.places[node]] if node in self.places else self._done(node, values)
            except Exception:  # a result that cannot be computed on the host is not known
                continue
            if value is not None and not self._large(value):
                values[node] = value
        return values

    def _done(self, node: Any, values: dict[Any, Any]) -> Any:
        """Return the result of a node, computed on the host.  Raises KeyError if an input is not known."""
        host = self.torch.device("cpu")

        def on_host(value: Any) -> Any:
            return host if isinstance(value, self.torch.device) else value

        args, kwargs = (
            self.torch.fx.node.map_aggregate(self.torch.fx.node.map_arg(given, values.__getitem__), on_host)
            for given in (node.args, node.kwargs)
        )
        if without_values(getattr(node.target, "__name__", str(node.target))):
            return None
        if node.op == "call_function":
            return node.target(*args, **kwargs)
        return getattr(args[0], node.target)(*args[1:], **kwargs) if node.op == "call_method" else None

    def _large(self, value: Any) -> bool:
        return isinstance(value, self.torch.Tensor) and bool(value.nbytes > KNOWN_BYTES)

    def _write(self, results: Sequence[Any], values: dict[Any, Any]) -> None:
        for node, result in zip(self.results, results, strict=False):
            value = values.get(node) if isinstance(node, self.torch.fx.Node) else None
            if isinstance(value, self.torch.Tensor) and is_small(self.torch, result) and result.shape == value.shape:
                self.policy.write(*(_once(each, result.stride()) for each in (result, value)))


def _once(tensor: Any, strides: Sequence[int]) -> Any:
    """Return a tensor without its repetitions along dimensions of stride 0."""
    for dim, stride in enumerate(strides):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor.as_strided(tensor.shape, [stride or 1 for stride in tensor.stride()], tensor.storage_offset())
