"""Optimizer in backward: each parameter is updated as soon as its gradient exists, and the gradient is freed.

There is one optimizer for each parameter, in a hook after the accumulation of its gradient, as in torch's tutorial
(https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html).  At no moment do more
gradients exist than those that backward has just made.

Clipping needs the norm of all gradients before the first update.  Then forward and backward run twice, as in LOMO
(https://arxiv.org/abs/2306.09782, section 3.3): first to measure each gradient, then, from the same random states and
buffers, to scale and use it.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tonnage.techniques.technique import Refusal, Technique

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from tonnage.case import Case
    from tonnage.step.model import Batch
    from tonnage.step.step import NewOptimizer, ReadyStep, Step


def accepts(case: Case) -> Refusal | None:
    """Refuse whatever needs all gradients of a step, or those of several micro-batches."""
    plan = case.plan
    if case.job.grad_accum > 1:
        reason, instead = (
            f"a step has {case.job.grad_accum} micro-batches, and gradients are freed after each",
            "choose grad-accum 1",
        )
    elif plan.precision == "fp16-mixed":
        reason, instead = "loss scaling checks all gradients before a step", "choose precision bf16-mixed"
    elif plan.shard in ("ddp", "zero1"):
        reason, instead = "DDP averages gradients after the hook would use them", "choose shard zero3"
    elif plan.optimizer_offload != "none":
        reason, instead = "optimizer-offload updates all parameters on the host at the end", "choose one of the two"
    elif plan.checkpointing == "full-reentrant":
        reason = "each layer has a backward of its own, and weights that layers share would be updated in each"
        instead = "choose checkpointing full"
    else:
        return None
    return Refusal(technique="optimizer_in_backward=on", reason=reason, instead=instead)


def apply(step: Step) -> Step:
    """Update each parameter by an optimizer of its own, under clipping in a second backward pass."""
    if step.plan.clip_grad_norm is None:
        return replace(step, new_optimizer=partial(_optimizer_per_parameter, None))
    passes = _TwoPasses()
    return replace(
        step,
        new_optimizer=partial(_optimizer_per_parameter, passes),
        accumulate=passes.measure,
        clip=partial(passes.clip, step.clip),
    )


@dataclass(eq=False)
class _TwoPasses:
    """A step that makes its gradients twice: first their norms are measured, then they are scaled and used."""

    norms: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    """Norm of each gradient of the first pass; a DTensor's is that of each rank's part."""
    scale: Tensor | None = None
    """Factor of the gradients in the second pass; None: they are as they are."""
    again: Callable[[], None] | None = None
    """Function that runs the second pass, once the first has run."""
    is_second: bool = False
    """True while the second pass runs."""

    def measure(self, ready: ReadyStep, batches: Sequence[Batch], divisors: Sequence[float]) -> None:
        """Run the first pass of the step's only micro-batch."""
        self.forget()
        batch = ready.to_device(batches[0])
        with _undone(ready):
            ready.micro_batch(batch, divisors[0])
        self.again = partial(self._use, ready, batch, divisors[0])

    def clip(self, clip: Callable[[list[Any], float], Tensor], parameters: list[Any], largest_norm: float) -> Tensor:
        """Return the norm of all gradients as `clip` combines them, and note the scale that it asks for."""
        norm = clip([_stand_in(one, self.norms[one]) for one in parameters if one in self.norms], largest_norm)
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self.scale = (largest_norm / (whole + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grads_with_norm_
        return norm

    def update(self) -> None:
        """Run the second pass, for all optimizers of the step."""
        again = self.again
        if again is not None:
            again()

    def forget(self) -> None:
        """Leave the second pass out."""
        self.norms, self.scale, self.again = {}, None, None

    def takes(self, parameter: nn.Parameter) -> bool:
        """Return True if this gradient is to be used, which is scaled then; else measure it."""
        import torch

        gradient: Any = parameter.grad
        if not self.is_second:
            self.norms[parameter] = torch.linalg.vector_norm(_local(gradient))
        elif self.scale is not None:
            local = _local(gradient)
            local.mul_(self.scale.to(local.device))
        return self.is_second

    def _use(self, ready: ReadyStep, batch: Batch, divisor: float) -> None:
        observers, ready.observers[:] = list(ready.observers), []  # they have seen this micro-batch
        self.is_second, self.again = True, None
        try:
            ready.micro_batch(batch, divisor)
        finally:
            self.is_second = False
            ready.observers[:] = observers


@contextmanager
def _undone(ready: ReadyStep) -> Iterator[None]:
    """Undo on leaving what a forward changes beside gradients: random states, and buffers such as BatchNorm's."""
    from tonnage.step import random_states

    buffers = [(buffer, buffer.clone()) for buffer in ready.model.buffers()]
    with random_states.kept(ready.step.world.device):
        yield
    for buffer, before in buffers:
        buffer.copy_(before)


def _local(gradient: Any) -> Tensor:
    """Return this rank's part of a gradient."""
    part: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return part


def _stand_in(parameter: nn.Parameter, norm: Tensor) -> Tensor:
    """Return a tensor that stands for a parameter where norms are combined: its gradient has the same norm."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    gradient = norm.reshape(1)
    if isinstance(parameter, DTensor):
        placements = [Replicate() if one.is_replicate() else Shard(0) for one in parameter.placements]
        gradient = DTensor.from_local(gradient, parameter.device_mesh, placements, run_check=False)
    stand_in = gradient.detach()
    stand_in.grad = gradient
    for mark in ("divided", "is_copy"):
        setattr(stand_in, mark, getattr(parameter, mark, False))
    return stand_in


def _optimizer_per_parameter(
    passes: _TwoPasses | None, parameters: list[nn.Parameter], new: NewOptimizer
) -> Optimizer:
    import torch

    class InBackward(torch.optim.Optimizer):  # type: ignore[misc]
        """All optimizers together; at the end of a step only a second pass is left to do."""

        def __init__(self) -> None:
            super().__init__(parameters, {})
            self.by_parameter = {parameter: new([parameter]) for parameter in parameters}
            self.parts = {str(index): optimizer for index, optimizer in enumerate(self.by_parameter.values())}
            self.defaults: dict[str, Any] = next((each.defaults for each in self.parts.values()), {})
            self._share_groups()
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(self.update)

        def _share_groups(self) -> None:
            """Expose the groups of all optimizers as this one's, so that a scheduler changes their learning rates."""
            self.param_groups = [group for optimizer in self.parts.values() for group in optimizer.param_groups]

        def update(self, parameter: Any) -> None:
            """Step for one parameter, unless its gradient is only measured, and free the gradient."""
            if passes is None or passes.takes(parameter):
                self.by_parameter[parameter].step()
            parameter.grad = None

        def step(self, closure: Any = None) -> None:
            """Run the second pass; without one, the parameters were updated in backward."""
            if passes is not None:
                passes.update()

        def zero_grad(self, set_to_none: bool = True) -> None:
            """Forget what was measured; no gradient outlives backward."""
            if passes is not None:
                passes.forget()

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
