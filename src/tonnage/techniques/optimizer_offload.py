"""Optimizer offload: states rest in host memory, where the optimizer runs on copies of the parameters.

`cpu`: all parameters; `cpu=0.5`: about half of their elements, the first ones of each optimizer.  `nvme`, `nvme=0.5`:
states and copies rest in files (see `disk`).  The GPU keeps parameters and gradients.  At a step gradients are copied
to the host, and parameters back.  It is our own code rather than torchao's `CPUOffloadOptimizer`, which cannot take a
part of the parameters, cannot accumulate if it offloads gradients, and needs a CUDA device to be created.  Copies of
parameters and gradients are pinned if they are in memory; states are ordinary memory as the optimizer makes them.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tonnage.catalog.optimizers import OPTIMIZERS
from tonnage.techniques import disk
from tonnage.techniques.technique import Refusal, Technique

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from tonnage.case import Case
    from tonnage.step.step import NewOptimizer, Step

ON_HOST: Final = tuple(optimizer.name for optimizer in OPTIMIZERS if optimizer.library == "torch")
"""Optimizers that run on the host as well."""


def accepts(case: Case) -> Refusal | None:
    """Refuse divided parameters or states, and optimizers other than torch's own."""
    plan = case.plan
    if plan.shard not in ("none", "ddp"):
        reason, instead = f"shard is {plan.shard}, which divides parameters or states", "choose param-offload cpu"
        if plan.param_offload == "cpu":
            instead = "leave it out: param-offload cpu already updates its parameters on the host"
    elif plan.optimizer not in ON_HOST:
        reason, instead = f"{plan.optimizer} does not run on the host", "choose optimizer adamw"
    else:
        return None
    return Refusal(technique=f"optimizer_offload={plan.optimizer_offload}", reason=reason, instead=instead)


def apply(step: Step) -> Step:
    """Update a part of each optimizer's parameters on the host."""
    place, _, text = step.plan.optimizer_offload.partition("=")
    return replace(step, new_optimizer=partial(offloaded, fraction=float(text or 1), in_files=place == "nvme"))


def offloaded(
    parameters: list[nn.Parameter], new: NewOptimizer, *, fraction: float, in_files: bool = False
) -> Optimizer:
    """Return an optimizer with `fraction` of the elements on the host, in its memory or in files."""
    import torch

    count = _count_parameters(parameters, fraction)
    copy = _copy_to_file if in_files else _copy_to_host

    class OnHost(torch.optim.Optimizer):  # type: ignore[misc]
        """An optimizer on the host, and one on the GPU for the rest."""

        def __init__(self) -> None:
            super().__init__(parameters, {})
            self.pairs = [(parameter, copy(parameter), copy(parameter)) for parameter in parameters[:count]]
            self.parts = {"host": new([host for _, host, _ in self.pairs])}
            if count < len(parameters):
                self.parts["card"] = new(parameters[count:])
            self.defaults = self.parts["host"].defaults  # OneCycleLR looks for betas there
            self._mirror_groups()

        def _mirror_groups(self) -> None:
            """Give this optimizer the groups of its parts, with the parameters in place of their copies.

            What a scheduler changes in them reaches the parts at the next step.
            """
            original = {id(host): parameter for parameter, host, _ in self.pairs}
            self.inner_groups = [group for part in self.parts.values() for group in part.param_groups]
            self.param_groups = [
                {**group, "params": [original.get(id(given), given) for given in group["params"]]}
                for group in self.inner_groups
            ]

        def _update_parts(self) -> None:
            """Copy learning rates and the like from this optimizer's groups to those of its parts."""
            for outer, inner in zip(self.param_groups, self.inner_groups, strict=True):
                inner.update({name: value for name, value in outer.items() if name != "params"})

        def step(self, closure: Any = None) -> None:
            """Copy gradients to the host, step on GPU and host, copy parameters back."""
            self._update_parts()
            with torch.no_grad():
                for parameter, host, gradient in self.pairs:
                    given = parameter.grad
                    host.grad = None if given is None else gradient.copy_(given, non_blocking=True)
            if "card" in self.parts:
                self.parts["card"].step()
            _synchronize(parameters[0].device)
            with disk.zeros_on_disk() if in_files else nullcontext():
                self.parts["host"].step()
            with torch.no_grad():
                for parameter, host, _ in self.pairs:
                    parameter.copy_(host, non_blocking=True)

        def state_dict(self) -> dict[str, Any]:
            """Return the states of both optimizers."""
            return {name: part.state_dict() for name, part in self.parts.items()}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """Load what `state_dict` returned."""
            for name, part in self.parts.items():
                part.load_state_dict(state_dict[name])
            self._mirror_groups()

    return OnHost()


def _count_parameters(parameters: list[nn.Parameter], fraction: float) -> int:
    """Return how many of the first parameters hold at least this fraction of all elements."""
    wanted = fraction * sum(parameter.numel() for parameter in parameters)
    seen = 0
    for count, parameter in enumerate(parameters):
        if seen >= wanted:
            return count
        seen += parameter.numel()
    return len(parameters)


def _copy_to_host(parameter: nn.Parameter) -> Tensor:
    """Return a copy in host memory, pinned if the parameter is on a GPU."""
    import torch

    pinned = parameter.device.type == "cuda"
    copy: Tensor = torch.empty_like(parameter, device="cpu", pin_memory=pinned, requires_grad=False)
    return copy.copy_(parameter.detach())


def _copy_to_file(parameter: nn.Parameter) -> Tensor:
    """Return a copy in a file."""
    copy: Any = disk.empty(tuple(parameter.shape), parameter.dtype).copy_(parameter.detach())
    copy.is_in_file = True  # states that are loaded go to files too
    return copy  # type: ignore[no-any-return]


def _synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


OPTIMIZER_OFFLOAD: Final = Technique(
    option="optimizer_offload",
    values=("cpu", "cpu=FRACTION", "nvme", "nvme=FRACTION"),
    accepts=accepts,
    apply=apply,
)
