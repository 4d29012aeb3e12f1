"""Linear layers in float8 by torchao: weights fp32, autocast to bf16, products of two float8 matrices.

torchao's tensorwise recipe with dynamic scales, as torchtitan trains: every linear layer but the head whose sides are
multiples of 16.  Weights, gradients and optimizer states are those of bf16-mixed; the inputs are saved for backward
in high precision, and quantized again in each of the three products.  It runs without torch.compile, which makes it
fast and fuses the casts away; compiled, the temporaries are smaller.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from tonnage.techniques.technique import Refusal, Technique

if TYPE_CHECKING:
    from torch import nn

    from tonnage.case import Case
    from tonnage.step.given import GivenNetwork
    from tonnage.step.step import Step

CAPABILITY: Final = (8, 9)
"""First compute capability with float8 tensor cores (Ada; Hopper is 9.0), which cuBLASLt's float8 products need."""
MULTIPLE: Final = 16
"""Both sides of a matrix in a float8 product must be multiples of this many elements."""


def accepts(case: Case) -> Refusal | None:
    """Refuse GPUs without float8 products, frozen weights, and a missing torchao."""
    from tonnage.cluster import CPU

    cluster = case.cluster
    if cluster.device.id == CPU and not case.is_carried_out:
        return _refuse("the memory of its products on the CPU is not known", "bf16-mixed")
    if cluster.device.id != CPU and cluster.device.capability < CAPABILITY:
        capability = ".".join(map(str, cluster.device.capability))
        other = "fp16-mixed" if cluster.device.without_bf16 else "bf16-mixed"
        return _refuse(f"it needs compute capability 8.9, and {cluster.device.id} has {capability}", other)
    if case.job.method != "full":
        return _refuse(f"torchao converts layers that are trained, and the method is {case.job.method}", "bf16-mixed")
    if find_spec("torchao") is None:
        return _refuse("the package torchao is not installed", "pip install torchao")
    return None


def _refuse(reason: str, instead: str) -> Refusal:
    instead = instead if " " in instead else f"choose precision {instead}"
    return Refusal(technique="precision=fp8", reason=reason, instead=instead)


def apply(step: Step) -> Step:
    """Autocast to bf16 over fp32 weights, and replace linear layers by float8 ones."""
    import torch

    convert = partial(_convert, given=step.given)
    return replace(step, autocast_dtype=torch.bfloat16, changes=(*step.changes, convert))


def _convert(module: nn.Module, given: GivenNetwork | None) -> nn.Module:
    from torchao.float8 import convert_to_float8_training

    head = _head(module)
    before = dict(module.named_modules())

    def is_convertible(layer: nn.Module, name: str) -> bool:
        sides = (layer.in_features, layer.out_features)
        return layer is not head and all(side % MULTIPLE == 0 for side in sides)  # type: ignore[operator]

    converted: nn.Module = convert_to_float8_training(module, module_filter_fn=is_convertible)
    if given is not None:
        for name, layer in converted.named_modules():
            given.note_replaced(before[name], layer)
    return converted


def count_layers(module: nn.Module) -> int:
    """Return the number of layers that compute in float8."""
    return sum(type(part).__name__ == "Float8Linear" for part in module.modules())


def _head(module: nn.Module) -> nn.Module | None:
    from tonnage.step.model import hugging_face

    network = hugging_face(module)
    return network.get_output_embeddings() if network is not None else None


FP8: Final = Technique(
    option="precision", values=("fp8",), accepts=accepts, apply=apply, libraries=("torchao.float8",)
)
