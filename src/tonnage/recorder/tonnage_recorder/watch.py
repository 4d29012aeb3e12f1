"""Notes, while a program trains, which phase and module is running and which memory is whose.

Every change of phase or module is a *mark*, numbered from 0.  The number is given to the caching allocator
(`_cuda_setMemoryMetadata`, torch >= 2.10), which writes it into each of its trace events, and to the ghost's log.
The watch only looks: it registers hooks that return nothing, keeps no tensor alive and adds no node to the
autograd graph, so a watched program allocates exactly what it allocates alone (tests hold this); only the order in
which a module's call gives several blocks back at its end may differ, which the allocator does not notice.
"""

import contextlib
import functools
import gc
import threading
import time
import traceback
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

from .graphed import MOST_WARM_UPS, Content, Graphs
from .imports import after_import
from .native import Native
from .networks import counted, owners, together
from .outcome import frames
from .script import Script
from .sharded import unreduced
from .step_counter import Rounds
from .tensors import ORDINARY, cuda_address, elements, first_differentiable, plain_tensors, tensors_in

MAX_EVENTS = 20_000_000

PASSES_A_STEP = 32
"""Backward passes that stand for a step where no optimizer says when one is made: a program may update its weights
by hand, or in backward (LOMO).  More than gradients are accumulated from, as a rule."""


class Watch:
    """Marks, claims and step counting for one process.  `start` once, after torch is imported.

    `address` tells where a tensor's memory begins on the device that is watched, and 0 for memory elsewhere.
    """

    def __init__(
        self,
        torch: Any,
        native: Native | None = None,
        stop_after_steps: int | None = None,
        address: Callable[[Any], int] | None = None,
    ) -> None:
        self.torch = torch
        self.native = native
        self.stop_after_steps = stop_after_steps
        self.address = address or functools.partial(cuda_address, torch)
        self.on_stop: Callable[[], None] = lambda: None
        self.on_end: Callable[[], None] = lambda: None
        self.on_step: Callable[[int], None] = lambda steps: None
        self.marks: list[tuple[int, str, str]] = [(0, "load", "")]
        self.claims: list[tuple[int, int, str]] = []
        self.positions: dict[int, int] = {}
        self.steps = 0
        self.repeated: list[int] = []
        self.alike = 0
        """Micro-batches that were asked for without their program."""
        self.ooms: list[dict[str, Any]] = []
        self.oom_marks: list[int] = []
        self._oom_stack: list[str] = []
        self._went_on = True
        self.model: dict[str, Any] = {}
        self.script: Script | None = None
        self.began = time.perf_counter()
        self._set_metadata = getattr(torch._C, "_cuda_setMemoryMetadata", None)
        self._recording = False
        self._occasion = ""
        self._stepped = False
        self._rounds = Rounds(self._trains_here)
        self._graphs = Graphs()
        self._aside = False
        self._passes = 0
        self._whole_step = False
        self._stepping = False
        self._updating: Callable[[], Any] = lambda: None
        self._trained: set[int] = set()
        self._trained_found = False
        self._trainers = 0
        self._uncounted = False
        self._loose_elements = 0
        self._backward_seen = False
        self._backward_depth = 0
        self.read: dict[str, array[int]] = {}
        """The allocator's events that were read while the program runs, as columns; its history began anew behind."""
        self.read_handed = 0
        """Blocks that were handed out or taken back in them."""
        self.told: list[dict[str, Any]] = []
        """What the allocator wrote down, once it was asked: to take so many small things apart takes time."""
        self._names: dict[int, str] = {}
        self._roots: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        self._claimed: dict[int, int] = {}
        self._parameters: dict[int, weakref.ref[Any]] = {}
        self._local = threading.local()

    # -- marks

    def mark(self, phase: str, module: str) -> None:
        """From now on, what happens in this thread belongs to this phase and module."""
        self.marks.append((self.steps, self._occasion or phase, module))
        if self._recording:
            if self._set_metadata is None:
                self._note_position()
            self._announce()

    def occasion(self, name: str) -> None:
        """What happens now is no part of a step but this; with an empty name, it is over."""
        self._occasion = name
        self.mark("other", "")

    def _announce(self) -> None:
        number = len(self.marks) - 1
        if self._set_metadata is not None:
            self._set_metadata(str(number))
        if self.native is not None:
            self.native.mark(number)

    def claim(self, tensor: Any, category: str) -> None:
        """The memory behind `tensor`, as it was when the current mark began, is of this category."""
        number = len(self.marks) - 1
        for plain in plain_tensors(tensor):
            address = self.address(plain)
            if address:
                self.claims.append((number, address, category))

    # -- installation

    def start(self) -> None:
        """Register every hook.  Nothing touches the GPU: the allocator's history begins when CUDA does."""
        self._hook()
        after_import("deepspeed.runtime.engine", self._mark_whole_steps)
        after_import("keras.src.optimizers.base_optimizer", self._mark_steps_of_keras)
        self.torch.cuda._lazy_call(self._cuda_begins)

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Watch while this lasts, without CUDA: somebody else records the memory."""
        unhook = self._hook()
        try:
            yield
        finally:
            unhook()

    def _hook(self) -> Callable[[], None]:
        """Register every hook; what is returned takes them away."""
        from torch.optim import optimizer

        torch = self.torch
        modules = torch.nn.modules.module
        handles = (
            modules.register_module_forward_pre_hook(self._enter),
            modules.register_module_forward_hook(self._leave, always_call=True),
            optimizer.register_optimizer_step_pre_hook(self._before_step),
            optimizer.register_optimizer_step_post_hook(self._after_step),
        )
        any_hook = modules._has_any_global_hook
        modules._has_any_global_hook = functools.partial(_hooks_of_others, modules)  # torch.compile warns of them
        make = optimizer.Optimizer.__init__
        optimizer.Optimizer.__init__ = _also(make, self._rounds.made)
        compile_in_place = modules.Module.compile
        modules.Module.compile = _also(compile_in_place, self._watch_compiled)
        forget_graphs = self._graphs.hook(torch, self._replays)
        run_backward = torch.autograd._engine_run_backward
        torch.autograd._engine_run_backward = functools.wraps(run_backward)(
            functools.partial(self._backward, run_backward)
        )

        def unhook() -> None:
            torch.autograd._engine_run_backward = run_backward
            forget_graphs()
            optimizer.Optimizer.__init__ = make
            modules.Module.compile = compile_in_place
            modules._has_any_global_hook = any_hook
            for handle in handles:
                handle.remove()

        return unhook

    def _cuda_begins(self) -> None:
        torch = self.torch
        self._record_history()
        torch._C._cuda_attach_out_of_memory_observer(self.out_of_memory)
        self._recording = True
        self.positions[len(self.marks) - 1] = 0
        self._announce()

    def _record_history(self, **options: Any) -> None:
        self.torch.cuda.memory._record_memory_history("all", context=None, max_entries=MAX_EVENTS, **options)

    def read_history(self, read: "dict[str, array[int]]", handed: int) -> None:
        """The allocator's events so far are these, of so many blocks; its history begins anew."""
        self.read, self.read_handed = read, handed
        self._record_history(clear_history=True)

    def _note_position(self) -> None:
        """Count the blocks handed out or taken back before the current mark.

        For every mark where the allocator takes no notes itself (before torch 2.10), and where another thread, which
        has announced nothing yet, goes on allocating.  Asked of the allocator's own statistics: a Python callback
        for each (`torch.cuda._gpu_trace`) would lose an exception that is on its way while tensors are freed, which
        is how checkpointing ends a recomputation.
        """
        counts = self.torch._C._cuda_memoryStats(self.torch.cuda.current_device())["allocation"]["all"]
        self.positions[len(self.marks) - 1] = int(counts["allocated"] + counts["freed"])

    # -- forward

    def _stack(self) -> list[tuple[str, str]]:
        """Modules that this thread is inside of, each with its phase."""
        stack: list[tuple[str, str]] | None = getattr(self._local, "stack", None)
        if stack is None:
            stack = self._local.stack = []
        return stack

    def _enter(self, module: Any, _args: Any) -> None:
        if self.torch.compiler.is_compiling():
            return
        stack = self._stack()
        phase = stack[-1][1] if stack else self._begin_forward()
        unknown = phase != "recompute" and not stack and module not in self._roots
        if unknown:
            self._meet(module)
        name = self._names.get(id(module))
        if name is None:
            name = type(module).__name__
        stack.append((name, phase))
        self.mark(phase, name)
        if unknown:
            # By their names: Megatron's wrapper has a list where modules have the method `buffers`.
            for _, tensor in [*module.named_parameters(), *module.named_buffers()]:
                self.claim(tensor, "parameter")
        self._claim_parameters(module)

    def _begin_forward(self) -> str:
        if self._backward_depth:
            return "recompute"
        self._next_step()
        self._claimed.clear()
        return "forward" if self.torch.is_grad_enabled() else "evaluation"

    def _meet(self, root: Any) -> None:
        """A module called from outside any other: learn the names inside it and count what it owns."""
        self._names.update({id(module): name for name, module in root.named_modules()})
        parameters = list(root.parameters())
        for parameter in parameters:
            self._parameters[id(parameter)] = weakref.ref(parameter)
        if self.script is not None:
            self.script.meet(root)
        self._roots[root] = counted(root, parameters)
        if not self._trained_found and self._roots[root]["parameters"] >= self.model.get("parameters", 0):
            self.model = self._roots[root]

    def _claim_parameters(self, module: Any) -> None:
        """Sharded parameters are gathered into new memory for each use: claim them where they are now.

        Once for each forward and backward pass: new memory may be where the old was.
        """
        for parameter in module._parameters.values():
            if parameter is None or self._is_known_there(parameter):
                continue
            for plain in plain_tensors(parameter):
                address = self.address(plain)
                if address and self._claimed.get(id(parameter)) != address:
                    self._claimed[id(parameter)] = address
                    self.claims.append((len(self.marks) - 1, address, "parameter"))

    def _is_known_there(self, parameter: Any) -> bool:
        """Whether an ordinary parameter is where it was claimed in this pass; most are, and asking this is quick."""
        if type(parameter).__module__ not in ORDINARY or self.torch._C._len_torch_function_stack():
            return False
        try:
            return bool(self._claimed.get(id(parameter)) == parameter.data_ptr())
        except RuntimeError:  # torch.func's grad and vmap have tensors that stand for others
            return False

    def _leave(self, module: Any, _args: Any, output: Any) -> None:
        if self.torch.compiler.is_compiling():
            return
        stack = self._stack()
        if not stack:
            return
        name, phase = stack.pop()
        if phase == "forward":
            self._follow_backward(module, name, output)
        if not stack and output is not None and not self._passes:
            self._went_on = True
        outer = stack[-1][0] if stack else ""
        if not stack and phase == "recompute":
            phase = "backward"
        elif not stack and phase == "evaluation":
            phase = "other"
        self.mark(phase, outer)
        self._claim_parameters(module)

    def _follow_backward(self, module: Any, name: str, output: Any) -> None:
        """Have the autograd engine tell when it comes to this module; of nested ones the innermost is told."""
        tensor = first_differentiable(output)
        if tensor is None or "tonnage" in tensor.grad_fn.metadata:
            return
        tensor.grad_fn.metadata["tonnage"] = True
        tensor.grad_fn.register_prehook(functools.partial(self._enter_backward, weakref.ref(module), name))

    def _watch_compiled(self, module: Any) -> None:
        """A module that was compiled in place is called past its hooks."""
        compiled = module._compiled_call_impl

        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._enter(module, args)
            output = None
            try:
                output = compiled(*args, **kwargs)
                return output
            finally:
                self._leave(module, args, output)

        module._compiled_call_impl = call

    # -- backward

    def _backward(self, run_backward: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self._stack():  # gradients that a forward computes for itself
            return run_backward(outputs, *args, **kwargs)
        outermost = self._backward_depth == 0
        if outermost:
            self._next_step()
            self._claimed.clear()
            if not self._passes:
                self._find_whole()
            self._passes += 1
            self._graphs.met_backward()
            self.mark("backward", "")
            if self._recording:
                self._note_position()
            for tensor in outputs if isinstance(outputs, Iterable) else (outputs,):
                if getattr(tensor, "grad_fn", None) is not None:
                    # Runs in the engine's thread, where the next allocations are made.
                    tensor.grad_fn.register_prehook(self._begin_backward)
        self._backward_depth += 1
        try:
            gradients = run_backward(outputs, *args, **kwargs)
            self._went_on = True
            return gradients
        finally:
            self._backward_depth -= 1
            if outermost:
                self._backward_seen = True
                # A library may try autograd while it is imported: the network is loaded after that.
                outside = "other" if self._roots else "load"
                self.mark("optimizer" if self._stepping else outside, "")
                self._claim_gradients()

    def _begin_backward(self, _gradients: Any) -> None:
        self.mark("backward", "")

    def _enter_backward(self, reference: "weakref.ref[Any]", name: str, _gradients: Any) -> None:
        self.mark("backward", name)
        module = reference()
        if module is not None:
            self._claim_parameters(module)

    def _claim_gradients(self) -> None:
        for reference in self._parameters.values():
            parameter = reference()
            if parameter is not None and parameter.grad is not None:
                self.claim(parameter.grad, "gradient")
        for root in list(self._roots):
            for gradient in unreduced(root):
                self.claim(gradient, "gradient")

    # -- optimizer

    def _before_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self.mark("optimizer", "")
        self._stepping = True
        self._updating = weakref.ref(optimizer)
        updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        trains = self._backward_seen or self._backward_depth  # DeepSpeed steps master copies to have their states
        if trains and self._rounds.first_time(optimizer):
            self._find_trained(updated)
        for parameter in updated:
            if id(parameter) not in self._parameters:
                self.claim(parameter, "optimizer_state")  # master copies that no module owns
            if parameter.grad is not None:
                self.claim(parameter.grad, "gradient")

    def _claim_states(self, optimizer: Any) -> None:
        for state in optimizer.state.values() if optimizer is not None else ():
            for tensor in tensors_in(state, self.torch.Tensor):
                self.claim(tensor, "optimizer_state")

    def _trains_here(self, parameter: Any) -> bool:
        """Whether it is trained on the device that is watched."""
        return parameter.requires_grad and any(self.address(plain) for plain in plain_tensors(parameter))

    def _find_trained(self, updated: list[Any]) -> None:
        """An optimizer makes its first step: learn what it trains."""
        self._trained.update(id(parameter) for parameter in updated)
        strangers = (parameter for parameter in updated if id(parameter) not in self._parameters)
        self._meet_uncalled([parameter for parameter in strangers if self._trains_here(parameter)])
        self._trainers += 1
        self._uncounted = True
        if self._trainers.bit_count() == 1:  # there may be one for each parameter: the rest is counted at the end
            self._count_trained()

    def _count_trained(self) -> None:
        """Of several networks (a reference, a teacher, a reward) those that are trained are reported: often one."""
        if not self._uncounted:
            return
        self._uncounted = False
        with self.torch._C.DisableTorchFunction():  # modes that follow what a program does need not see this
            self._find_networks()

    def _find_networks(self) -> None:
        inside = {root: list(root.parameters()) for root in list(self._roots)}
        owned = {
            root: sum(elements(parameter) for parameter in parameters if id(parameter) in self._trained)
            for root, parameters in inside.items()
        }
        found = []
        if any(owned.values()):
            best = sorted(owned, key=lambda root: (-owned[root], -self._roots[root]["parameters"]))
            met: set[int] = set()
            for root in best:
                own = {id(parameter) for parameter in inside[root]} & self._trained
                if own and not own & met:  # else a wrapper, or a part that was also called by itself
                    met |= own
                    # Once more: it may have been called before what is trained was chosen.
                    found.append(counted(root, inside[root]))
        if self._loose_elements:
            loose = dict.fromkeys(("parameters", "trainable_parameters"), self._loose_elements)
            found.append({"class": "Tensor", "module": "torch", **loose})
        if found:
            self._trained_found = True
            self.model = together(found)

    def _meet_uncalled(self, strangers: list[Any]) -> None:
        """Networks whose modules nobody called (a program may call `forward` itself, or compute with raw tensors).

        Where a network that was called has parameters of which none is an optimizer's, these are its master copies.
        """
        known = [parameter for reference in self._parameters.values() if (parameter := reference()) is not None]
        copied = any(parameter.requires_grad for parameter in known)
        if not strangers or (copied and not any(id(parameter) in self._trained for parameter in known)):
            return
        for root in owners(self.torch, strangers):
            self._meet(root)
            for _, tensor in [*root.named_parameters(), *root.named_buffers()]:
                self.claim(tensor, "parameter")
        for parameter in strangers:
            if id(parameter) not in self._parameters:
                self._parameters[id(parameter)] = weakref.ref(parameter)
                self._loose_elements += elements(parameter)
                self.claim(parameter, "parameter")

    def _after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._stepping = False
        inside = "optimizer" if self._whole_step else "backward" if self._backward_depth else "other"
        self.mark(inside, "")
        self._claim_states(optimizer)
        if self._stepped or self._backward_seen or self._backward_depth:
            self._stepped = self._went_on = True
            self._aside = self._on_another_stream()
            self._graphs.met_step(optimizer)
            self._rounds.stepped(optimizer)

    def _on_another_stream(self) -> bool:
        """Whether this thread works on another stream than the default one."""
        cuda = self.torch.cuda
        return self._recording and bool(cuda.current_stream() != cuda.default_stream())

    def _replays(self, content: Content) -> Callable[[], None]:
        """A graph is about to be replayed: what it holds begins as it would without one.  Returns what ends it."""
        if self._stack() or self._backward_depth:  # a part that was made a graphed callable
            return lambda: None
        self._next_step()

        def end() -> None:
            self._backward_seen = self._backward_seen or content.backward
            self._went_on = True
            for optimizer in content.optimizers:
                self._stepped = True
                self._aside = self._on_another_stream()
                self._rounds.stepped(optimizer)

        return end

    def _mark_whole_steps(self, module: ModuleType) -> None:
        """DeepSpeed's step is more than its optimizer's: gradients become fp32 before, weights are gathered after."""
        original = module.DeepSpeedEngine._take_model_step

        @functools.wraps(original)
        def take(*args: Any, **kwargs: Any) -> Any:
            self._whole_step = True
            self.mark("optimizer", "")
            try:
                return original(*args, **kwargs)
            finally:
                self._whole_step = False
                self.mark("other", "")

        module.DeepSpeedEngine._take_model_step = take

    def _mark_steps_of_keras(self, module: ModuleType) -> None:
        """Keras has optimizers of its own, whose states are variables as weights are."""
        original = module.BaseOptimizer.apply

        @functools.wraps(original)
        def apply(optimizer: Any, gradients: Any, variables: Any = None) -> Any:
            self.mark("optimizer", "")
            updated = optimizer._trainable_variables if variables is None else variables
            if not self._trained:
                self._find_trained([variable.value for variable in updated])
            try:
                return original(optimizer, gradients, variables)
            finally:
                self.mark("other", "")
                for variable in optimizer.variables:
                    self.claim(variable.value, "optimizer_state")
                self._stepped = self._stepped or self._backward_seen

        module.BaseOptimizer.apply = apply

    def step_made(self) -> None:
        """Somebody who has no optimizer made a step."""
        self._stepped = self._went_on = True

    def _next_step(self) -> None:
        """A forward or backward begins: if the optimizers stepped since the last one, a step is complete."""
        if not self._stepped and self._passed_enough():
            self.on_stop()
        if not self._stepped or self._rounds.unfinished():
            return
        self._rounds.begin()
        self._count_trained()
        self._stepped = self._backward_seen = False
        self._passes = 0
        self.steps += 1
        self.on_step(self.steps)
        if self._are_enough(self.steps):
            self._went_on = True  # whatever ran out since the last step was for one that nobody asked for
            self.on_stop()
        if self.native is not None:
            let_watchdog_pass(self.torch)

    def is_done(self) -> bool:
        """Whether the last of the steps that are wanted is made; it counts when the next one begins."""
        return self._stepped and not self._rounds.unfinished() and self._are_enough(self.steps + 1)

    def _are_enough(self, steps: int) -> bool:
        return self.stop_after_steps is not None and steps >= self.stop_after_steps + self._warm_ups()

    def _warm_ups(self) -> int:
        """How many steps more may come before a capture: where they are made aside, it is what needs the most."""
        return MOST_WARM_UPS if self._aside else 0

    def _passed_enough(self) -> bool:
        """Whether there were backward passes for all steps, in a program in which no optimizer will make one."""
        wanted = self.stop_after_steps
        return wanted is not None and self._passes >= wanted * PASSES_A_STEP and self._rounds.without_optimizers()

    # -- the end

    def out_of_memory(self, device: int, requested: int, total: int, free: int) -> None:
        """A request could not be served; the arguments are those of torch's observer of such events."""
        self.oom_marks.append(len(self.marks) - 1)
        self.ooms.append({**self.here(), "requested_bytes": requested})
        self._find_whole()
        self._oom_stack = frames(traceback.extract_stack())
        self._went_on = False

    def given_up(self) -> dict[str, Any]:
        """The outcome of a program that ends by itself and has done nothing since memory ran out; else nothing.

        It has if a step was made, or a backward pass, or, of a program that makes none, a forward pass.
        """
        if self._went_on:
            return {}
        asked = self.ooms[-1]["requested_bytes"] / 2**20
        message = f"CUDA out of memory. Tried to allocate {asked:.2f} MiB."
        return {"kind": "oom", "message": message, "caught": True, "stack": self._oom_stack, **self.ooms[-1]}

    def here(self) -> dict[str, Any]:
        """Step, phase and module as of now."""
        step, phase, module = self.marks[-1]
        return {"step": step + 1, "phase": "backward" if phase == "recompute" else phase, "module": module}

    def left_out(self) -> list[str]:
        """A sentence for each optimizer that trains something of its own and never stepped, or for having none."""
        never = [
            f"an optimizer of {count:,} numbers never stepped: its states are in no figure"
            for count in self._rounds.never_stepped()
        ]
        if self._passed_enough():
            never.append(f"no optimizer makes steps here: {self._passes} backward passes stand for them")
        return never

    def finish(self) -> None:
        """The run is over: count the last step and claim what the last backward left."""
        if self._stepped:
            self._stepped = self._backward_seen = False
            self.steps += 1
        self._count_trained()
        self.mark("other", "")
        if self.script is not None:  # a program that we did not write
            self._find_parameters()
        self._claim_gradients()
        if self._stepping:  # memory ran out on the way: what was made of its states is there
            self._claim_states(self._updating())
        for module in (part for root in list(self._roots) for part in root.modules()):
            if "run_again" in vars(module):  # what a budget of activations came to
                self.model["run_again"] = module.run_again

    def _find_whole(self) -> None:
        """Where no optimizer has said what it trains: the network that the largest of the called modules is part of.

        A program may call its layers one by one, and run out of memory before its first step, or make none.
        """
        if self.script is None or self._trained_found or len(self._roots) < 2:
            return
        largest = max(self._roots, key=lambda root: self._roots[root]["parameters"])
        for whole in owners(self.torch, list(largest.parameters())):
            found = counted(whole, list(whole.parameters()))
            if found["parameters"] > self.model.get("parameters", 0):
                self.model = found

    def _find_parameters(self) -> None:
        """Parameters that were in no forward: of a program that ran out of memory, or of a running mean of others.

        Also tensors in lists, shape by shape like those that are trained: the same mean as diffusers keeps it.
        """
        parameter = self.torch.nn.Parameter
        trained = [shape for reference in self._parameters.values() if (shape := self._shape_if_trained(reference()))]
        claimed = {address for _, address, _ in self.claims}
        for candidate in gc.get_objects():
            kind = type(candidate)  # isinstance would wake objects that warn when they are asked
            if issubclass(kind, parameter) and id(candidate) not in self._parameters:
                self._parameters[id(candidate)] = weakref.ref(candidate)
                if self.address(candidate) not in claimed:
                    self.claim(candidate, "parameter")
            elif kind is list and len(candidate) == len(trained) > 1 and self._are_copies(candidate, trained):
                for tensor in candidate:
                    if self.address(tensor) not in claimed:
                        self.claim(tensor, "parameter")

    def _shape_if_trained(self, parameter: Any) -> tuple[int, ...] | None:
        return tuple(parameter.shape) if parameter is not None and id(parameter) in self._trained else None

    def _are_copies(self, tensors: list[Any], shapes: list[tuple[int, ...]]) -> bool:
        plain = self.torch.Tensor
        return all(type(t) is plain and tuple(t.shape) == shape for t, shape in zip(tensors, shapes, strict=True))


_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
"""Where torch.nn.modules.module keeps hooks of all modules."""


def _hooks_of_others(modules: ModuleType) -> bool:
    """Whether the program, too, has hooks of all modules."""
    return any(
        not str(getattr(hook, "__module__", "")).startswith(f"{__package__}.")
        for name in _HOOKS
        for hook in getattr(modules, name, {}).values()
    )


WATCHDOG_SECONDS = 0.15
"""A little more than the 100 ms at which ProcessGroupNCCL's watchdog looks for finished work."""


def let_watchdog_pass(torch: Any) -> None:
    """Give NCCL's watchdog the time between two steps that it has on a real GPU.

    The watchdog holds the results of collectives (DDP's buckets, until they are rebuilt in the second step) until it
    has seen that they are finished.  A step on a ghost can be over before it looks once; on a GPU it rarely is.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and "nccl" in distributed.get_backend():
        time.sleep(WATCHDOG_SECONDS)


def _also(original: Callable[..., None], hear: Callable[[Any], None]) -> Callable[..., None]:
    """A method of which somebody hears whom it was called on, when it has ended."""

    @functools.wraps(original)
    def call(owner: Any, *args: Any, **kwargs: Any) -> None:
        original(owner, *args, **kwargs)
        hear(owner)

    return call
