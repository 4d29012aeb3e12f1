"""torch.compile: Inductor makes fewer, larger kernels of a module's operations, and saves less for backward.

`layers`: each layer is compiled on its own, all alike, as torchtune and torchtitan do; checkpointing and FSDP2 stay
outside of it.  `model`: the network as a whole.  Nothing is modelled: a ghost's Inductor compiles for the GPU that is
not there, which takes seconds for layers, and most of a minute for a network the first time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tonnage.techniques.technique import Refusal, Technique

if TYPE_CHECKING:
    from torch import nn

    from tonnage.case import Case
    from tonnage.step.step import Step


def accepts(case: Case) -> Refusal | None:
    """Refuse the CPU, divided layers, and what selects single operations."""
    plan = case.plan
    from tonnage.cluster import CPU

    if case.cluster.device.id == CPU:
        reason, instead = "Inductor's kernels for the CPU need a C++ compiler, and are not run", "choose a GPU"
    elif max(plan.tp, plan.pp, plan.cp, plan.ep) > 1:
        reason, instead = "its result for layers divided along tp, pp, cp or ep is not known", "leave compile out"
    elif plan.checkpointing == "selective" or plan.checkpointing.startswith("budget"):
        reason = f"checkpointing {plan.checkpointing} chooses among operations, which compiled layers hide"
        instead = "choose checkpointing full or none"
    elif plan.activation_offload == "cpu":
        reason = "torch's save_on_cpu gives tensors back in another layout than a compiled backward expects"
        instead = "choose activation-offload cpu-streamed"
    else:
        return None
    return Refusal(technique=f"compile={plan.compile}", reason=reason, instead=instead)


def apply(step: Step) -> Step:
    """Mark layers or the network for compilation at their first call, after all other changes."""
    change = _compile_network if step.plan.compile == "model" else _compile_layers
    return replace(step, changes=(*step.changes, change))


def _compile_layers(module: nn.Module) -> nn.Module:
    from tonnage.techniques.checkpointing import layer_lists_of

    for layers in layer_lists_of(module):
        for layer in layers:
            layer.compile()
    return module


def _compile_network(module: nn.Module) -> nn.Module:
    module.compile()
    return module


COMPILED: Final = Technique(
    option="compile", values=("layers", "model"), accepts=accepts, apply=apply, libraries=("triton",)
)
