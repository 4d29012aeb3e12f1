"""Notes, while a program trains, which phase and module is running and which memory is whose.

Every change of phase or module is a *mark* (`marks`); the owners of memory are *claims* (`claims`), which refer to
marks.  `passes` and `updates` follow the program through torch's hooks, `steps` counts its steps.

The watch only looks: it registers hooks that return nothing, keeps no tensor alive and adds no node to the
autograd graph, so a watched program allocates exactly what it allocates alone (tests hold this); only the order in
which a module's call gives several blocks back at its end may differ, which the allocator does not notice.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from .claims import Claims
from .cuda_graphs import Graphs
from .imports import after_import
from .marks import Marks
from .native import Native
from .networks import Networks
from .passes import Passes
from .phases import Phases
from .script import Script
from .shortage import Shortage
from .steps import Steps
from .tensors import cuda_address
from .updates import Updates


class Watch:
    """Marks, claims and step counting for one process.  `start` once, after torch is imported.

    `address` returns where a tensor's memory begins on the device that is watched, and 0 for memory elsewhere.
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
        self.began = time.perf_counter()
        self.on_stop: Callable[[], None] = lambda: None
        """Called when the wanted steps are complete."""
        self.on_end: Callable[[], None] = lambda: None
        """Called when the program ends by itself after the last wanted step."""
        self.on_step: Callable[[int], None] = lambda steps: None
        """Called with the number of completed steps."""
        self.repeated: list[int] = []
        """Marks at which repeated steps begin."""
        self.alike = 0
        """Micro-batches whose requests were repeated without running the program."""
        self.event_history: list[dict[str, Any]] = []
        """The allocator's events once they were read, kept because freeing so many small objects takes time."""
        self._marks = Marks(torch, native)
        self._claims = Claims(torch, self._marks, address or functools.partial(cuda_address, torch))
        self._networks = Networks(torch, self._claims)
        self._shortage = Shortage(self._marks, self._networks)
        self._steps = Steps(
            self._marks,
            self._claims,
            self._networks,
            self._shortage,
            stop_after=stop_after_steps,
            on_step=lambda steps: self.on_step(steps),
            on_stop=lambda: self.on_stop(),
        )
        self._graphs = Graphs()
        observed = (self._marks, self._claims, self._networks, self._shortage, self._steps)
        self._passes = Passes(*observed, self._graphs)
        self._updates = Updates(*observed, self._passes, self._graphs)
        self.marks = self._marks.rows
        self.positions = self._marks.positions
        self.claims = self._claims.rows
        self.ooms, self.oom_marks = self._shortage.ooms, self._shortage.marks
        self.mark, self.set_event = self._marks.mark, self._marks.set_event
        self.describe_latest = self._marks.describe_latest
        self.read_history = self._marks.read_history
        self.claim = self._claims.claim
        self.add_shortage, self.shortage_outcome = self._shortage.add, self._shortage.outcome
        self.add_step, self.is_done = self._steps.add, self._steps.is_done
        self.describe_omissions = self._steps.describe_omissions
        self.loops, self.count_made = self._steps.loops, self._steps.count_made
        self.idle_elements = self._steps.optimizers.idle_elements

    @property
    def steps(self) -> int:
        """Number of completed steps; the latest counts when the next one begins."""
        return self._marks.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._marks.steps = steps

    @property
    def made_steps(self) -> int:
        """Number of steps with the latest, once an optimizer has stepped in it."""
        return self.steps + self._steps.is_stepped

    @property
    def passes_a_step(self) -> int:
        """Backward passes of the last whole step; 0 before there was one."""
        return self._steps.passes_a_step

    @property
    def model(self) -> dict[str, Any]:
        """Description of the network that is trained."""
        return self._networks.model

    @property
    def script(self) -> Script | None:
        """Facts about the program, if tonnage did not write it."""
        return self._networks.script

    @script.setter
    def script(self, script: Script | None) -> None:
        self._networks.script = script

    @property
    def early_events(self) -> dict[str, Any]:
        """The allocator's events that were read while the program runs, as columns."""
        return self._marks.early_events

    @property
    def early_block_count(self) -> int:
        """Number of blocks that were handed out or taken back in these events."""
        return self._marks.early_block_count

    def follow_script(self) -> None:
        """Follow a program that tonnage did not write: its loops end after their steps, its phases have names."""
        self.loops.hook()
        Phases(self._marks).hook()

    def start(self) -> None:
        """Register every hook.  Nothing touches the GPU: the allocator's history begins when CUDA does."""
        self._hook()
        after_import("deepspeed.runtime.engine", self._updates.mark_deepspeed)
        after_import("keras.src.optimizers.base_optimizer", self._updates.mark_keras)
        self.torch.cuda._lazy_call(functools.partial(self._marks.begin_recording, self.add_shortage))

    @contextlib.contextmanager
    def install_hooks(self) -> Iterator[None]:
        """Watch while this lasts, without CUDA: somebody else records the memory."""
        unhook = self._hook()
        try:
            yield
        finally:
            unhook()

    def finish(self) -> None:
        """Count the last step of a run that is over, and claim what the last backward left."""
        self._steps.finish()
        self._networks.update_model()
        self.mark("other", "")
        self._networks.claim_uncalled()
        self._claims.claim_gradients(self._networks.roots)
        if self._steps.updating is not None:  # memory ran out on the way: the states made so far are there
            self._claims.claim_states(self._steps.updating())
        self._networks.note_reruns()

    def _hook(self) -> Callable[[], None]:
        """Register every hook; return the function that takes them away."""
        from torch.optim import optimizer

        torch = self.torch
        modules = torch.nn.modules.module
        handles = (
            modules.register_module_forward_pre_hook(self._passes.enter),
            modules.register_module_forward_hook(self._passes.leave, always_call=True),
            optimizer.register_optimizer_step_pre_hook(self._updates.begin),
            optimizer.register_optimizer_step_post_hook(self._updates.end),
        )
        any_hook = modules._has_any_global_hook
        modules._has_any_global_hook = functools.partial(_has_hooks_of_others, modules)  # torch.compile warns of them
        make = optimizer.Optimizer.__init__
        optimizer.Optimizer.__init__ = _call_after(make, self._steps.add_optimizer)
        compile_in_place = modules.Module.compile
        modules.Module.compile = _call_after(compile_in_place, self._passes.follow_compiled)
        forget_graphs = self._graphs.hook(torch, self._updates.begin_replay)
        run_backward = torch.autograd._engine_run_backward
        torch.autograd._engine_run_backward = functools.wraps(run_backward)(
            functools.partial(self._passes.run_backward, run_backward)
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


_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
"""Names under which torch.nn.modules.module keeps hooks of all modules."""


def _has_hooks_of_others(modules: ModuleType) -> bool:
    """Return whether the program, too, has hooks of all modules."""
    return any(
        not str(getattr(hook, "__module__", "")).startswith(("tonnage_recorder.", "tonnage_inside."))
        for name in _HOOKS
        for hook in getattr(modules, name, {}).values()
    )


def _call_after(original: Callable[..., None], listener: Callable[[Any], None]) -> Callable[..., None]:
    """Return a method that calls `listener` with its object when it has ended."""

    @functools.wraps(original)
    def call(owner: Any, *args: Any, **kwargs: Any) -> None:
        original(owner, *args, **kwargs)
        listener(owner)

    return call
