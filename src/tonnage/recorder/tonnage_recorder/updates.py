"""Follows updates of weights: steps of torch's, DeepSpeed's and Keras's optimizers, and replays of CUDA graphs."""

import functools
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .claims import Claims
from .cuda_graphs import Content, Graphs
from .marks import Marks
from .networks import Networks
from .passes import Passes
from .shortage import Shortage
from .steps import Steps


class Updates:
    """The update that runs now.  `begin` and `end` are hooks of all torch optimizers."""

    def __init__(
        self,
        marks: Marks,
        claims: Claims,
        networks: Networks,
        shortage: Shortage,
        steps: Steps,
        passes: Passes,
        graphs: Graphs,
    ) -> None:
        self._marks, self._claims, self._networks, self._shortage = marks, claims, networks, shortage
        self._steps, self._passes, self._graphs = steps, passes, graphs
        self._is_deepspeed_updating = False

    def begin(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Mark that an optimizer's step begins, and learn what it trains."""
        self._marks.mark("optimizer", "")
        self._steps.updating = weakref.ref(optimizer)
        updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # DeepSpeed steps master copies to have their states.
        is_training = self._steps.is_backward_seen or self._passes.backward_depth
        if is_training and self._steps.optimizers.is_new(optimizer):
            self._networks.add_trained(updated)
        self._claims.claim_updated(updated)

    def end(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Mark that an optimizer's step has ended, and count it."""
        steps = self._steps
        steps.updating = None
        phase = "optimizer" if self._is_deepspeed_updating else "backward" if self._passes.backward_depth else "other"
        self._marks.mark(phase, "")
        self._claims.claim_states(optimizer)
        if steps.is_stepped or steps.is_backward_seen or self._passes.backward_depth:
            steps.count(optimizer)
            self._graphs.met_step(optimizer)

    def begin_replay(self, content: Content) -> Callable[[], None]:
        """Begin what a CUDA graph holds as it would begin without one; return the function that ends it."""
        if self._passes.is_inside():  # a part that was made a graphed callable
            return lambda: None
        self._steps.begin_pass()
        if content.backward:
            self._steps.loops.begin_backward()

        def end() -> None:
            self._steps.is_backward_seen = self._steps.is_backward_seen or content.backward
            self._shortage.is_overcome = True
            for optimizer in content.optimizers:
                self._steps.count(optimizer)

        return end

    def mark_deepspeed(self, module: ModuleType) -> None:
        """Mark DeepSpeed's whole step: gradients become fp32 before its optimizer's, weights are gathered after."""
        original = module.DeepSpeedEngine._take_model_step

        @functools.wraps(original)
        def take(*args: Any, **kwargs: Any) -> Any:
            self._is_deepspeed_updating = True
            self._marks.mark("optimizer", "")
            try:
                return original(*args, **kwargs)
            finally:
                self._is_deepspeed_updating = False
                self._marks.mark("other", "")

        module.DeepSpeedEngine._take_model_step = take

    def mark_keras(self, module: ModuleType) -> None:
        """Mark the steps of Keras, which has its own optimizers; their states are variables, as weights are."""
        original = module.BaseOptimizer.apply

        @functools.wraps(original)
        def apply(optimizer: Any, gradients: Any, variables: Any = None) -> Any:
            self._marks.mark("optimizer", "")
            updated = optimizer._trainable_variables if variables is None else variables
            if not self._networks.knows_trained():
                self._networks.add_trained([variable.value for variable in updated])
            try:
                return original(optimizer, gradients, variables)
            finally:
                self._marks.mark("other", "")
                for variable in optimizer.variables:
                    self._claims.claim(variable.value, "optimizer_state")
                self._steps.is_stepped = self._steps.is_stepped or self._steps.is_backward_seen

        module.BaseOptimizer.apply = apply
