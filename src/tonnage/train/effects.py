"""Effects of a plan, found by looking at modules, hooks, dtypes and placements rather than at the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tonnage.catalog.optimizers import find_optimizer
from tonnage.mesh import SHARDING
from tonnage.step import model as models
from tonnage.step.stages import Stage
from tonnage.step.step import trainable
from tonnage.techniques import (
    activation_offload,
    budget,
    checkpointing,
    chunked_loss,
    fp8,
    fused_loss,
    pipeline,
    qlora,
    sqrt_checkpointing,
)
from tonnage.techniques.attention import NETWORKS_OWN
from tonnage.techniques.precision import DTYPE_NAMES
from tonnage.train.states import list_inside

if TYPE_CHECKING:
    from tonnage.plans import Plan
    from tonnage.step.step import ReadyStep

PLANNED: Final = "planned_forward"
"""Attribute of a forward that chooses between a technique's and the network's own: the technique's."""

_NAMES: Final = {getattr(torch, name): short for short, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, kw_only=True)
class Effect:
    """One setting of the plan, and what was found of it."""

    option: str
    """The field of the plan."""
    planned: str
    """Its value."""
    found: str
    """The state that the network and its optimizers show."""
    took_effect: bool
    """True if that is what the setting means."""


Look = Callable[["ReadyStep", "Plan"], tuple[str, bool]]
"""Returns what is found of a setting, and whether that is what it means."""


def look(
    ready: ReadyStep, options: Sequence[str] | None = None, others: Mapping[str, Look] | None = None
) -> tuple[Effect, ...]:
    """Return an effect for each setting that is looked for and is not off; of these options alone, if given.

    `others` look for some of them where another engine trains.
    """
    plan = ready.step.plan
    looks: dict[str, Look] = {
        **({"quant": _look_at_quantized} if ready.step.job.method == "qlora" else {}),
        "precision": _look_at_dtypes,
        "optimizer": _look_at_optimizers,
        "optimizer_in_backward": _look_for_updates,
        "optimizer_offload": _look_for_host_states,
        "checkpointing": _look_at_layers,
        "activation_offload": _look_for_offload,
        "attention": _look_at_attention,
        "loss": _look_at_loss,
        "compile": _look_for_compiled,
        "tp": partial(_look_at_divided, axis="tp"),
        "ep": partial(_look_at_divided, axis="ep"),
        "pp": _look_at_stages,
        "shard": _look_at_shards,
        "param_offload": _look_at_rest,
        **(others or {}),
    }
    off = ("none", "auto", "False", "1")
    return tuple(
        Effect(option=option, planned=str(value), found=found, took_effect=holds)
        for option, search in looks.items()
        if str(value := getattr(plan, option)) not in off and (options is None or option in options)
        for found, holds in [search(ready, plan)]
    )


def _look_at_quantized(ready: ReadyStep, plan: Plan) -> tuple[str, bool]:
    formats = qlora.formats(ready.model)
    found = ", ".join(f"{count} linear layers in {name}" for name, count in formats.items())
    return found or "no quantized layers", set(formats) == {plan.quant}


def _look_at_dtypes(ready: ReadyStep, plan: Plan) -> tuple[str, bool]:
    weights = Counter[torch.dtype]()
    for parameter in ready.model.parameters():
        weights[parameter.dtype] += parameter.numel()
    most = weights.most_common(1)[0][0]
    with ready.autocast():
        kind = ready.step.world.device.type
        computed = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else most
    for module in ready.model.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            computed = (group and group.mp_policy.param_dtype) or computed
    found = ", ".join(f"{short_name(dtype)} {count:,}" for dtype, count in weights.most_common())
    float8 = fp8.count_layers(ready.model)
    parts = [f"weights {found}; computed in {short_name(computed)}"]
    parts += ["loss scaled"] if ready.scaler is not None else []
    parts += [f"{float8} linear layers in float8"] if float8 else []
    holds = short_name(computed) == plan.compute_dtype and (ready.scaler is not None) == (
        plan.precision == "fp16-mixed"
    )
    is_made = most == ready.step.weights_dtype or ready.step.job.method == "qlora"
    return ", ".join(parts), holds and is_made and (float8 > 0) == (plan.precision == "fp8")


def short_name(dtype: torch.dtype) -> str:
    """Return a dtype's name as options spell it."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _inner(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers that do the work inside one."""
    parts = list_inside(optimizer).values()
    if not parts:
        yield optimizer
    for part in parts:
        yield from _inner(part)


def _look_at_optimizers(ready: ReadyStep, plan: Plan) -> tuple[str, bool]:
    inside = [part for optimizer in ready.optimizers for part in _inner(optimizer)]
    classes = sorted({type(part).__name__ for part in inside})
    groups = [group for optimizer in ready.optimizers for group in optimizer.param_groups]
    taken = {id(parameter) for group in groups for parameter in group["params"]}
    missing = sum(id(parameter) not in taken for parameter in trainable(ready.model))
    is_main = plan.precision == "megatron-bf16"  # whose parameters are copies
    left = f", {missing} parameters left out" if missing and not is_main else ""
    return ", ".join(classes) + left, find_optimizer(plan.optimizer).class_name in classes and not left


def _look_for_updates(ready: ReadyStep, plan: Plan) -> tuple[str, bool]:
    parameters = trainable(ready.model)
    hooked = sum(bool(getattr(parameter, "_post_accumulate_grad_hooks", None)) for parameter in parameters)
    return f"{hooked} of {len(parameters)} parameters are updated in backward", hooked == len(parameters)


def _look_for_host_states(ready: ReadyStep, plan: Plan) -> tuple[str, bool]:
    inside = [part for optimizer in ready.optimizers for part in _inner(optimizer)]
    held = [p for part in inside for group in part.param_groups for p in group["params"]]
    own = {id(parameter) for parameter in ready.model.parameters()}
    copies = sum(p.numel() for p in held if id(p) not in own and p.device.type == "cpu")
    whole = sum(p.numel() for p in held)
    return f"{copies / whole:.0%} of the elements are updated on the host", copies > 0


def _look_at_layers(ready: ReadyStep, plan: Plan) -> tuple[str, bool]:
    layers = models.layers(ready.model)
    if plan.checkpointing == "attention":
        names = [getattr(context, "__name__", "") for context in ready.step.contexts]
        return "the attention function of every micro-batch", "_checkpoint_attention" in names
    if plan.checkpointing == "attention-module":
        inside = [part for layer in layers for part in layer.modules() if part is not layer]
        wrapped = sum(
            any(_is_checkpointed(part) for part in layer.modules() if part is not layer) for layer in layers
        )
        count = sum(map(_is_checkpointed, inside))
        return f"{count} attention modules in {wrapped} of {len(layers)} layers", wrapped == len(layers) > 0
    checkpointed = sum(map(_is_checkpointed, layers))
    lists = [len(part) for part in models.layer_lists(ready.model)]
    interval = plan.checkpoint_interval or 1
    expected = sum(-(-length // interval) for length in lists)
    return f"{checkpointed} of {len(layers)} layers", checkpointed == expected > 0


def _is_checkpointed(module: nn.Module) -> bool:
    """Return True for transformers' switch, and for a forward that runs under torch's checkpoint."""
    if getattr(module, "gradient_checkpointing", False) and module.training:
        return True
    forward: Any = vars(module).get("forward")
    while forward is not None:
        function = getattr(forward, "func", None)
        owner = type(getattr(function, "__self__", None)).__module__
        if function is checkpointing.run or owner in (budget.__name__, sqrt_checkpointing.__name__):
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


def _look_for_offload(ready: ReadyStep, plan: Plan) -> tuple[str, bool]:
    own = vars(activation_offload)
    count = sum(getattr(vars(module).get("forward"), "__globals__", None) is own for module in ready.model.modules())
    if plan.checkpointing.startswith("budget") and plan.activation_offload == "cpu-streamed":
        return "chosen by the budget in the first micro-batch", _look_at_layers(ready, plan)[1]
    return f"{count} modules whose layers' activations wait on the host", count > 0


def _look_at_attention(ready: ReadyStep, plan: Plan) -> tuple[str, bool]:
    network = models.hugging_face(ready.model)
    implementation = None if network is None else network.config._attn_implementation
    forced = [c for c in ready.step.contexts if isinstance(c, partial) and c.args == (plan.attention,)]
    expected = NETWORKS_OWN.get(plan.attention, "sdpa")
    backend = f", backend {plan.attention} alone" if forced else ""
    return f"{implementation}{backend}", implementation == expected and bool(forced) == (expected == "sdpa")


def _look_at_loss(ready: ReadyStep, plan: Plan) -> tuple[str, bool]:
    replaced = [type(module).__name__ for module in ready.model.modules() if computes_planned_loss(module)]
    found = f"{', '.join(replaced)} computes it from hidden states" if replaced else "the network's own loss"
    return found, bool(replaced) == (plan.loss != "plain")


def computes_planned_loss(module: nn.Module) -> bool:
    """Return True if a technique replaced the module's forward by one that returns the loss without logits.

    Trainers wrap forwards: also what is inside is looked at.
    """
    functions = [vars(module).get("forward")]
    for function in functions:  # the loop appends to the list that it walks
        if getattr(function, "__module__", None) in (chunked_loss.__name__, fused_loss.__name__):
            return True
        inside = (getattr(function, name, None) for name in ("func", "__func__", "__wrapped__", PLANNED))
        functions += [one for one in inside if one is not None]
    return False


def _look_for_compiled(ready: ReadyStep, plan: Plan) -> tuple[str, bool]:
    layers = models.layers(ready.model)
    compiled = {id(module) for module in ready.model.modules() if getattr(module, "_compiled_call_impl", None)}
    count = sum(id(layer) in compiled for layer in layers)
    if plan.compile == "layers":
        return f"{count} of {len(layers)} layers", count == len(layers) > 0
    return "the network as a whole" if compiled and not count else f"{count} layers", bool(compiled) and not count


def _look_at_divided(ready: ReadyStep, plan: Plan, axis: str) -> tuple[str, bool]:
    parameters = list(ready.model.parameters())
    layouts = [getattr(parameter, "part_of", parameter) for parameter in parameters]
    divided = [layout for layout in layouts if isinstance(layout, DTensor) and _is_divided(layout, axis)]
    ranks = {layout.device_mesh[axis].size() for layout in divided}
    found = (
        f"{len(divided)} of {len(parameters)} parameters are divided among {', '.join(map(str, ranks)) or 'no'} ranks"
    )
    return found, ranks == {getattr(plan, axis)}


def _look_at_stages(ready: ReadyStep, plan: Plan) -> tuple[str, bool]:
    own = [module for module in ready.model.modules() if isinstance(module, Stage)]
    numbers = ", ".join(f"{stage.index + 1} with {len(models.layers(stage))} layers" for stage in own)
    counts = {stage.count for stage in own}
    found = f"of {', '.join(map(str, counts)) or 'no'} stages this rank has {numbers}"
    return found, counts == {pipeline.stages(plan)}


def _is_divided(layout: DTensor, axis: str) -> bool:
    names = layout.device_mesh.mesh_dim_names or ()
    return axis in names and not layout.placements[names.index(axis)].is_replicate()


def _look_at_shards(ready: ReadyStep, plan: Plan) -> tuple[str, bool]:
    if isinstance(ready.model, DistributedDataParallel):
        wrapper = f"DistributedDataParallel over {ready.model.process_group.size()} ranks"
        divides = any(type(optimizer).__name__ == "ZeroRedundancyOptimizer" for optimizer in ready.optimizers)
        states = "; each rank has a part of the optimizer states" if divides else ""
        return wrapper + states, divides == (plan.shard == "zero1") and plan.shard in ("ddp", "zero1")
    parameters = list(ready.model.parameters())
    own = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in parameters)
    divided = sum(isinstance(p, DTensor) for p in parameters)
    whole = sum(p.numel() for p in parameters)
    found = f"{divided} of {len(parameters)} parameters are divided; this rank has {own:,} of {whole:,} elements"
    main = any(type(optimizer).__name__ == "MainOptimizer" for optimizer in ready.optimizers)
    if main:
        return f"main weights in fp32 for {plan.shard}", True
    return found, divided == len(parameters) and plan.shard in SHARDING


def _look_at_rest(ready: ReadyStep, plan: Plan) -> tuple[str, bool]:
    devices = {p.to_local().device.type if isinstance(p, DTensor) else p.device.type for p in trainable(ready.model)}
    return f"parameters rest on {', '.join(sorted(devices))}", devices == {"cpu"}
