"""torch.compile: Inductor makes fewer, larger kernels of what a module calls, and keeps less of it for backward.

`layers`: each layer is compiled on its own, one like the other, as torchtune and torchtitan do; checkpointing and
FSDP2 stay outside of it.  `model`: the network as a whole.  Nothing is modelled: a ghost's Inductor compiles for the
card that is not there, which takes seconds for layers, and most of a minute for a network the first time.
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
    """A GPU, whole matrices, and checkpointing that does not look at single operations."""
    plan = case.plan
    from tonnage.cluster import CPU

    if case.cluster.device.id == CPU:
        reason, instead = "what Inductor makes for the CPU needs a compiler of C++, and is not run", "choose a GPU"
    elif max(plan.tp, plan.pp, plan.cp, plan.ep) > 1:
        reason, instead = "of layers divided along tp, pp, cp or ep it is not known", "leave compile out"
    elif plan.checkpointing == "selective" or plan.checkpointing.startswith("budget"):
        reason = f"checkpointing {plan.checkpointing} chooses among operations, which are not seen in compiled layers"
        instead = "choose checkpointing full or none"
    elif plan.activation_offload == "cpu":
        reason = "torch's save_on_cpu gives tensors back in another layout than a compiled backward expects"
        instead = "choose activation-offload cpu-streamed"
    else:
        return None
    return Refusal(technique=f"compile={plan.compile}", reason=reason, instead=instead)


def apply(step: Step) -> Step:
    """Mark layers or the network, once all else about them is settled; their first call compiles them."""
    change = _network if step.plan.compile == "model" else _layers
    return replace(step, changes=(*step.changes, change))


def _layers(module: nn.Module) -> nn.Module:
    from tonnage.techniques.checkpointing import layer_lists_of

    for layers in layer_lists_of(module):
        for layer in layers:
            layer.compile()
    return module


def _network(module: nn.Module) -> nn.Module:
    module.compile()
    return module


COMPILED: Final = Technique(
    option="compile", values=("layers", "model"), accepts=accepts, apply=apply, libraries=("triton",)
)
