"""Optimizer in backward: each parameter is updated as soon as its gradient exists, and the gradient is freed.

There is one optimizer for each parameter, in a hook after the accumulation of its gradient, as in torch's tutorial
(https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html).  At no moment do more
gradients exist than those that backward has just made.
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
    """Refuse whatever needs all gradients of a step, or those of several micro-batches."""
    plan = case.plan
    if case.job.grad_accum > 1:
        reason, instead = (
            f"a step has {case.job.grad_accum} micro-batches, and gradients are freed after each",
            "choose grad-accum 1",
        )
    elif plan.clip_grad_norm is not None:
        reason, instead = "clipping needs the norm of all gradients together", "leave clip-grad-norm out"
    elif plan.precision == "fp16-mixed":
        reason, instead = "loss scaling checks all gradients before a step", "choose precision bf16-mixed"
    elif plan.shard in ("ddp", "zero1"):
        reason, instead = "DDP averages gradients after the hook would use them", "choose shard zero3"
    elif plan.optimizer_offload != "none":
        reason, instead = "optimizer-offload updates all parameters on the host at the end", "choose one of the two"
    else:
        return None
    return Refusal(technique="optimizer_in_backward=on", reason=reason, instead=instead)


def apply(step: Step) -> Step:
    """Update each parameter by an optimizer of its own."""
    return replace(step, new_optimizer=_optimizer_per_parameter)


def _optimizer_per_parameter(parameters: list[nn.Parameter], new: NewOptimizer) -> Optimizer:
    import torch

    class InBackward(torch.optim.Optimizer):  # type: ignore[misc]
        """All optimizers together; nothing is left to do at the end of a step."""

        def __init__(self) -> None:
            super().__init__(parameters, {})
            self.by_parameter = {parameter: new([parameter]) for parameter in parameters}
            self.parts = {str(index): optimizer for index, optimizer in enumerate(self.by_parameter.values())}
            self._share_groups()
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(self.update)

        def _share_groups(self) -> None:
            """Expose the groups of all optimizers as this one's, so that a scheduler changes their learning rates."""
            self.param_groups = [group for optimizer in self.parts.values() for group in optimizer.param_groups]

        def update(self, parameter: Any) -> None:
            """Step for one parameter and free its gradient."""
            self.by_parameter[parameter].step()
            parameter.grad = None

        def step(self, closure: Any = None) -> None:
            """Do nothing: the parameters were updated in backward."""

        def state_dict(self) -> dict[str, Any]:
            """Return the states of all optimizers, numbered in the parameters' order."""
            return {name: optimizer.state_dict() for name, optimizer in self.parts.items()}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """Load what `state_dict` returned."""
            for name, optimizer in self.parts.items():
                optimizer.load_state_dict(state_dict[name])
            self._share_groups()

    return InBackward()


IN_BACKWARD: Final = Technique(option="optimizer_in_backward", values=("on",), accepts=accepts, apply=apply)
