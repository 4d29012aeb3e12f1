"""Optimizer in backward: each parameter is updated as soon as its gradient is there, which is then let go.

One optimizer for each parameter, in a hook after the accumulation of its gradient, as torch's tutorial does it
(https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html).  At no moment is there
more than the gradients that backward has just made.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from tonnage.techniques.technique import Refusal, Technique

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from tonnage.case import Case
    from tonnage.step.step import NewOptimizer, Step


def accepts(case: Case) -> Refusal | None:
    """Whatever needs all gradients of a step, or those of several micro-batches, stands against it."""
    plan = case.plan
    if case.job.grad_accum > 1:
        reason, instead = (
            f"a step has {case.job.grad_accum} micro-batches, and gradients are gone after one",
            "accumulate 1",
        )
    elif plan.clip_grad_norm is not None:
        reason, instead = "clipping needs the norm of all gradients together", "leave clip-grad-norm out"
    elif plan.precision == "fp16-mixed":
        reason, instead = "loss scaling looks at all gradients before a step", "choose precision bf16-mixed"
    elif plan.shard in ("ddp", "zero1"):
        reason, instead = "DDP averages gradients after the hook would have used them", "choose shard zero3"
    elif plan.optimizer_offload != "none":
        reason, instead = "the optimizer on the host updates all parameters at the end", "choose one of the two"
    else:
        return None
    return Refusal(technique="optimizer_in_backward=on", reason=reason, instead=instead)


def apply(step: Step) -> Step:
    """Have each parameter updated by an optimizer of its own."""
    return replace(step, new_optimizer=_in_backward)


def _in_backward(parameters: list[nn.Parameter], new: NewOptimizer) -> Optimizer:
    import torch

    class InBackward(torch.optim.Optimizer):  # type: ignore[misc]
        """All optimizers together; what is left to do at the end of a step is nothing."""

        def __init__(self) -> None:
            super().__init__(parameters, {})
            self.each = {parameter: new([parameter]) for parameter in parameters}
            self.parts = {str(index): one for index, one in enumerate(self.each.values())}
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(self.update)

        def update(self, parameter: Any) -> None:
            """Step for one parameter and let its gradient go."""
            self.each[parameter].step()
            parameter.grad = None

        def step(self, closure: Any = None) -> None:
            """The parameters were updated in backward."""

        def state_dict(self) -> dict[str, Any]:
            """The states of all, by the parameters' order."""
            return {name: one.state_dict() for name, one in self.parts.items()}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """What `state_dict` gave."""
            for name, one in self.parts.items():
                one.load_state_dict(state_dict[name])

    return InBackward()


IN_BACKWARD: Final = Technique(option="optimizer_in_backward", values=("on",), accepts=accepts, apply=apply)
