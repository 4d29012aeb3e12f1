"""QLoRA: adapters beside frozen linear layers that bitsandbytes keeps in 4 or 8 bits.

| quant | kept per weight | |---|---| | nf4, fp4 | half a byte, and 4 bytes for each block of 64 (0.5625 in all) | |
nf4-double, fp4-double | half a byte, 1 byte for each block of 64, 4 bytes for each 256 of those (0.516 in all) | |
int8 | 1 byte, and 4 bytes for each row |

transformers' own loader quantizes the layers one after the other, each from a copy in the compute dtype; embeddings,
head, norms and the 3-D weights of experts stay as they are.  PEFT's prepare_model_for_kbit_training then casts those
to fp32 (`unquantized_dtype=fp32`, the default); TRL does not, and makes the adapters in the compute dtype too
(`unquantized_dtype=compute` under a -true precision).  The plan decides about checkpointing; PEFT's function would
turn it on.

Under FSDP2 no rank ever has the whole network: a layer is quantized and sharded before the next one follows.  The
packed weights are stored in the compute dtype (`bnb_4bit_quant_storage`), so that FSDP2 does not cast them.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from tonnage.mesh import SHARDING
from tonnage.techniques.lora import with_adapters
from tonnage.techniques.precision import dtype
from tonnage.techniques.technique import Refusal, Technique

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tonnage.case import Case
    from tonnage.plans import Plan
    from tonnage.step.step import Step

_CLASSES: Final = {"Linear4bit": "4", "Linear8bitLt": "8"}
"""bitsandbytes' linear layers, and the bits of a weight."""

LIBRARIES: Final = ("bitsandbytes", "accelerate", "peft")
"""Packages that must be installed; transformers needs accelerate when it quantizes."""


def accepts(case: Case) -> Refusal | None:
    """Refuse missing libraries, a factory's network, and quantized weights that cannot be sharded."""
    plan = case.plan
    if case.job.model.kind != "config":
        return _refuse(
            "transformers quantizes its own networks only, and this one is a factory's", "choose method lora"
        )
    if plan.base_dtype is not None:
        return Refusal(
            technique=f"base_dtype={plan.base_dtype}",
            reason=f"the frozen weights are quantized ({plan.quant}) and compute in {plan.compute_dtype}",
            instead="leave the base dtype out, or choose method lora",
        )
    if plan.precision in ("fp8", "megatron-bf16"):
        return _refuse(
            f"frozen quantized weights have no use for precision {plan.precision}", "choose precision bf16-mixed"
        )
    if plan.shard in SHARDING and plan.quant == "int8":
        return _refuse(f"rows of int8 have scales that {plan.shard} does not divide", "choose quant nf4")
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        return _refuse(f"not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    return None


def _refuse(reason: str, instead: str) -> Refusal:
    return Refusal(technique="method=qlora", reason=reason, instead=instead)


def apply(step: Step) -> Step:
    """Load the network quantized, cast what is not, and add adapters; a given network is quantized already."""
    compute = dtype(step.plan.compute_dtype)
    changes = (*step.changes, lambda module: prepared(module, step), lambda module: _add_adapters(module, step))
    if step.given is not None and step.plan.shard in SHARDING:
        return replace(step, weights_dtype=compute, load=_given, changes=changes, before_shard=_move_to_device)
    if step.given is not None:
        return replace(step, weights_dtype=compute, changes=changes)
    if step.plan.shard in SHARDING:
        return replace(
            step, weights_dtype=compute, load=_build_unquantized, changes=changes, before_shard=_allocate_and_quantize
        )
    return replace(step, weights_dtype=compute, load=loaded, changes=changes)


def _given(step: Step) -> nn.Module:
    """Return the given network whole: its quantized weights are divided where they are."""
    assert step.given is not None
    return step.given.take(step.world.device, without_memory=False)


def _build_unquantized(step: Step) -> nn.Module:
    """Return the network with bitsandbytes' layers, not on the GPU yet: they quantize when they are moved there."""
    from bitsandbytes.nn import Linear4bit
    from transformers.quantizers import AutoHfQuantizer

    from tonnage.step import model

    network: Any = model.build(
        step.job.model, dtype=step.weights_dtype, attention=step.attention, device=_cpu_or_meta(step)
    )
    if step.initialise:
        model.initialise(network)
    weights = dict(network.named_parameters())
    quantizer = AutoHfQuantizer.from_config(quantization_config(step.plan, step.weights_dtype), pre_quantized=False)
    quantizer.preprocess_model(network, device_map=None)
    for name, module in network.named_modules():
        if isinstance(module, Linear4bit):
            module.weight = _unquantized_weight(module.weight, weights[f"{name}.weight"])
            module.bias = weights.get(f"{name}.bias")
    quantizer.postprocess_model(network)
    return network  # type: ignore[no-any-return]


def _unquantized_weight(like: Any, weight: torch.Tensor) -> Any:
    """Return a weight that bitsandbytes still has to quantize, in the way of `like`."""
    from bitsandbytes.nn import Params4bit

    return Params4bit(weight.detach(), requires_grad=False, **vars(like))


def _allocate_and_quantize(module: nn.Module, device: torch.device) -> None:
    """Give `module` memory on the device where it has none yet; quantize its layers."""
    import torch
    from bitsandbytes.nn import Params4bit

    from tonnage.step import model

    for layer in module.modules():
        weight = layer._parameters.get("weight")
        if isinstance(weight, Params4bit) and not weight.bnb_quantized:
            whole = torch.empty_like(weight.data, device=device) if weight.is_meta else weight.data
            layer.weight = _unquantized_weight(weight, whole).to(device)
    model.materialise(module, device)
    _move_to_device(module, device)


def _move_to_device(module: nn.Module, device: torch.device) -> None:
    """Move unsharded parameters and buffers to the device; shards stay."""
    from torch.distributed.tensor import DTensor

    for child in module.modules():
        for tensor in (*child._parameters.values(), *child._buffers.values()):
            if tensor is not None and not isinstance(tensor, DTensor) and tensor.device != device:
                tensor.data = tensor.data.to(device)


def loaded(step: Step) -> nn.Module:
    """Return what from_pretrained returns for a checkpoint in the compute dtype, by transformers' own loader."""
    from tonnage.step import model

    device = step.world.device
    network: Any = model.build(
        step.job.model, dtype=step.weights_dtype, attention=step.attention, device=_cpu_or_meta(step)
    )
    if step.initialise:
        model.initialise(network)
    chosen = {"attn_implementation": step.attention} if step.attention else {}
    with model.quiet():
        quantized: nn.Module = type(network).from_pretrained(
            None,
            config=network.config,
            state_dict=_host_state_dict(network),
            dtype=step.weights_dtype,
            device_map={"": device},
            quantization_config=quantization_config(step.plan, step.weights_dtype),
            **chosen,
        )
    return quantized.train()


def _cpu_or_meta(step: Step) -> torch.device:
    import torch

    return torch.device("cpu" if step.initialise else "meta")


def _host_state_dict(network: nn.Module) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors on the host: tied ones once; those without values take no memory until they
    are read.
    """
    import torch

    tensors = [*network.named_parameters(), *network.named_buffers()]
    saved = network.state_dict()
    return {
        name: torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor.detach()
        for name, tensor in tensors
        if name in saved
    }


def quantization_config(plan: Plan, compute: torch.dtype) -> Any:
    """Return transformers' configuration of the plan's format, whose layers compute in this dtype."""
    import torch
    from transformers import BitsAndBytesConfig

    if plan.quant == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    kind, _, double = plan.quant.partition("-")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=bool(double),
        bnb_4bit_compute_dtype=compute,
        bnb_4bit_quant_storage=compute if plan.shard in SHARDING else torch.uint8,
    )


def prepared(module: nn.Module, step: Step) -> nn.Module:
    """Return the network frozen, with unquantized parameters in fp32 if PEFT is to cast them.

    A network that its user has wrapped is returned as it is.
    """
    if hasattr(module, "peft_config"):
        return module
    if step.plan.unquantized_dtype == "compute":
        return module.requires_grad_(False)
    from peft import prepare_model_for_kbit_training

    cast: nn.Module = prepare_model_for_kbit_training(module, use_gradient_checkpointing=False)
    return cast


def formats(module: nn.Module) -> dict[str, int]:
    """Return how many linear layers are kept in each format of `quant`; empty without bitsandbytes' layers."""
    from collections import Counter

    found = Counter[str]()
    for layer in module.modules():
        if hasattr(layer, "base_layer"):  # PEFT's layer around one, of the same name
            continue
        bits = _CLASSES.get(type(layer).__name__)
        if bits == "8":
            found["int8"] += 1
        elif bits == "4":
            weight = getattr(layer.weight, "_local_tensor", layer.weight)
            state = getattr(weight, "quant_state", None) or getattr(layer, "quant_state", None)
            double = "-double" if state is not None and state.nested else ""
            found[f"{(state or weight).quant_type}{double}"] += 1
    return dict(found)


def has_storage(module: nn.Module, storage: torch.dtype) -> bool:
    """Return True if all layers in 4 bits keep them in a tensor of this dtype, as FSDP2 wants."""
    weights = (layer.weight for layer in module.modules() if _CLASSES.get(type(layer).__name__) == "4")
    return all(weight.dtype == storage for weight in weights)


def _add_adapters(module: nn.Module, step: Step) -> nn.Module:
    return with_adapters(module, step, step.plan.adapters_dtype(step.job.method))


QLORA: Final = Technique(option="method", values=("qlora",), accepts=accepts, apply=apply, libraries=LIBRARIES)
