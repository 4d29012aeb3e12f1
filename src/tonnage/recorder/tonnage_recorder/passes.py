"""Follows forward and backward passes: marks which module runs, and claims its memory."""

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from .claims import Claims
from .cuda_graphs import Graphs
from .marks import Marks
from .networks import Networks
from .shortage import Shortage
from .steps import Steps
from .tensors import first_differentiable


class Passes:
    """The passes that run now, in each thread.  `enter` and `leave` are hooks of all modules."""

    def __init__(
        self, marks: Marks, claims: Claims, networks: Networks, shortage: Shortage, steps: Steps, graphs: Graphs
    ) -> None:
        self.torch = marks.torch
        self.backward_depth = 0
        """Runs of the autograd engine that have begun and not ended, one inside the other."""
        self._marks, self._claims, self._networks = marks, claims, networks
        self._shortage, self._steps, self._graphs = shortage, steps, graphs
        self._local = threading.local()

    def is_inside(self) -> bool:
        """Return whether this thread is inside a module or a backward pass runs."""
        return bool(self._stack() or self.backward_depth)

    def enter(self, module: Any, given: Any) -> None:
        """Mark that a module's forward begins, and claim its parameters."""
        if self.torch.compiler.is_compiling():
            return
        stack = self._stack()
        phase = stack[-1][1] if stack else self._begin_forward(module)
        is_unknown = phase != "recompute" and not stack and module not in self._networks.roots
        if is_unknown:
            self._networks.add(module, given)
        name = self._networks.names.get(id(module))
        if name is None:
            name = type(module).__name__
        stack.append((name, phase))
        self._marks.mark(phase, name)
        if is_unknown:
            self._claims.claim_network(module)
        self._claims.claim_gathered(module)

    def leave(self, module: Any, _args: Any, output: Any) -> None:
        """Mark that a module's forward has ended."""
        if self.torch.compiler.is_compiling():
            return
        stack = self._stack()
        if not stack:
            return
        name, phase = stack.pop()
        if phase == "forward":
            self._follow_backward(module, name, output)
        if not stack and output is not None and not self._steps.backward_passes:
            self._shortage.is_overcome = True
        outer = stack[-1][0] if stack else ""
        if not stack and phase == "recompute":
            phase = "backward"
        elif not stack and phase in ("evaluation", "reference"):
            phase = "other"
        self._marks.mark(phase, outer)
        self._claims.claim_gathered(module)

    def follow_compiled(self, module: Any) -> None:
        """Follow a module that was compiled in place, which is called past its hooks."""
        compiled = module._compiled_call_impl

        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.enter(module, args)
            output = None
            try:
                output = compiled(*args, **kwargs)
                return output
            finally:
                self.leave(module, args, output)

        module._compiled_call_impl = call

    def run_backward(self, run_backward: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the autograd engine with torch's function for it, between marks."""
        if self._stack():  # gradients that a forward computes for itself
            return run_backward(outputs, *args, **kwargs)
        is_outermost = self.backward_depth == 0
        if is_outermost:
            self._begin_backward(outputs)
        self.backward_depth += 1
        try:
            gradients = run_backward(outputs, *args, **kwargs)
            self._shortage.is_overcome = True
            return gradients
        finally:
            self.backward_depth -= 1
            if is_outermost:
                self._end_backward()

    def _stack(self) -> list[tuple[str, str]]:
        """Return the modules that this thread is inside of, each with its phase."""
        stack: list[tuple[str, str]] | None = getattr(self._local, "stack", None)
        if stack is None:
            stack = self._local.stack = []
        return stack

    def _begin_forward(self, module: Any) -> str:
        if self.backward_depth:
            return "recompute"
        is_training = self.torch.is_grad_enabled()
        if is_training:
            self._steps.loops.begin_forward()
        self._steps.begin_pass()
        self._claims.begin_pass()
        if is_training:
            return "forward"
        return "reference" if self._networks.is_beside_training(module) else "evaluation"

    def _follow_backward(self, module: Any, name: str, output: Any) -> None:
        """Have the autograd engine tell when it comes to this module; of nested ones the innermost is told."""
        tensor = first_differentiable(output)
        if tensor is None or "tonnage" in tensor.grad_fn.metadata:
            return
        tensor.grad_fn.metadata["tonnage"] = True
        tensor.grad_fn.register_prehook(functools.partial(self._enter_backward, weakref.ref(module), name))

    def _begin_backward(self, outputs: Any) -> None:
        steps = self._steps
        steps.begin_pass()
        steps.loops.begin_backward()
        self._claims.begin_pass()
        if not steps.backward_passes:
            self._networks.find_whole()
        steps.backward_passes += 1
        self._graphs.met_backward()
        self._mark_backward(None)
        if self._marks.is_recording:
            self._marks.note_position()
        for tensor in outputs if isinstance(outputs, Iterable) else (outputs,):
            if getattr(tensor, "grad_fn", None) is not None:
                # Runs in the engine's thread, where the next allocations are made.
                tensor.grad_fn.register_prehook(self._mark_backward)

    def _end_backward(self) -> None:
        self._steps.is_backward_seen = True
        # A library may try autograd while it is imported: the network is loaded after that.
        outside = "other" if self._networks.roots else "load"
        self._marks.mark("optimizer" if self._steps.updating is not None else outside, "")
        self._claims.claim_gradients(self._networks.roots)

    def _mark_backward(self, _gradients: Any) -> None:
        self._marks.mark("backward", "")

    def _enter_backward(self, reference: "weakref.ref[Any]", name: str, _gradients: Any) -> None:
        self._marks.mark("backward", name)
        module = reference()
        if module is not None:
            self._claims.claim_gathered(module)
