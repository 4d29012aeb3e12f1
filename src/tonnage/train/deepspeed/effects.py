"""Effects of a plan of the engine deepspeed, found by looking at the engine, its optimizer and the parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import torch

from tonnage.train import effects
from tonnage.trainers.deepspeed.run import STAGES, keeps_states_elsewhere

if TYPE_CHECKING:
    from tonnage.plans import Plan
    from tonnage.step.step import ReadyStep
    from tonnage.train.effects import Effect

SHARED: Final = ("checkpointing", "attention", "loss")
"""Settings that are found in the network as under any engine."""


def look(ready: ReadyStep) -> tuple[Effect, ...]:
    """Return an effect for each setting that is looked for and is not off."""
    own: dict[str, effects.Look] = {
        "precision": _look_at_dtypes,
        "optimizer": _look_at_optimizer,
        "optimizer_offload": _look_at_states,
        "shard": _look_at_parts,
        "param_offload": _look_at_rest,
    }
    if ready.step.plan.loss == "liger":
        own["loss"] = _look_for_liger
    return effects.look(ready, (*SHARED, *own), own)


def _look_at_dtypes(ready: ReadyStep, plan: Plan) -> tuple[str, bool]:
    counts = Counter[torch.dtype]()
    for parameter in ready.model.parameters():
        counts[parameter.dtype] += getattr(parameter, "ds_numel", parameter.numel())
    main = {tensor.dtype for tensor in _main_weights(ready)}
    most = counts.most_common(1)[0][0]
    found = ", ".join(f"{effects.short_name(dtype)} {count:,}" for dtype, count in counts.most_common())
    added = f"; main weights {', '.join(sorted(map(effects.short_name, main)))}" if main else ""
    return f"weights {found}{added}", effects.short_name(most) == plan.compute_dtype and main <= {torch.float32}


def _look_at_optimizer(ready: ReadyStep, plan: Plan) -> tuple[str, bool]:
    name = type(ready.optimizer).__name__
    on_host = "DeepSpeedCPUAdam" if keeps_states_elsewhere(plan) else "FusedAdam"
    is_torchs = plan.optimizer != "adamw" or ready.step.world.device.type == "cpu"
    return f"{type(ready.optimizer).__module__}.{name}", name == ("AdamW" if is_torchs else on_host)


def _look_at_states(ready: ReadyStep, plan: Plan) -> tuple[str, bool]:
    optimizer: Any = ready.model.optimizer
    if getattr(optimizer, "swap_optimizer", False):
        folder = optimizer.optimizer_swapper.swap_folder
        return f"main weights and states are in files of {folder}", plan.optimizer_offload == "nvme"
    devices = {tensor.device.type for tensor in _main_weights(ready)}
    found = f"main weights and states rest on {', '.join(sorted(devices)) or 'no device'}"
    return found, devices == {"cpu"} and plan.optimizer_offload == "cpu"


def _look_at_parts(ready: ReadyStep, plan: Plan) -> tuple[str, bool]:
    engine: Any = ready.model
    trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    whole = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trained)
    divided = sum(hasattr(parameter, "ds_tensor") for parameter in trained)
    own = sum(tensor.numel() for tensor in _main_weights(ready))
    stage = 3 if divided else 2 if getattr(engine.optimizer, "partition_gradients", False) else 1 if own else 0
    found = f"stage {stage}: {divided} of {len(trained)} parameters are divided"
    if stage:
        found += f"; this rank updates {own:,} of {whole:,} elements"
    is_part = own * ready.step.world.size <= whole + _PADDING * ready.step.world.size * len(trained)
    if plan.shard == "ddp":
        return found, stage == 0 or own == 0
    return found, stage == STAGES[plan.shard] and is_part


_PADDING: Final = 1 << 12
"""Elements by which a rank's part of a parameter may be longer than its share."""


def _look_at_rest(ready: ReadyStep, plan: Plan) -> tuple[str, bool]:
    places = Counter(_rest_of(parameter) for parameter in ready.model.parameters())
    found = ", ".join(
        f"{count} in files" if place == "nvme" else f"{count} on {place}" for place, count in places.items()
    )
    swapped = all(getattr(parameter, "nvme_swapper", None) is not None for parameter in ready.model.parameters())
    holds = swapped and set(places) <= {"nvme", "cpu"} if plan.param_offload == "nvme" else set(places) == {"cpu"}
    return f"parameters rest: {found}", holds


def _rest_of(parameter: Any) -> str:
    """Return where a rank's part of a parameter rests; small ones are never in files but on the host."""
    part = getattr(parameter, "ds_tensor", parameter)
    return "nvme" if getattr(part, "final_location", None) == "nvme" else str(part.device.type)


def _look_for_liger(ready: ReadyStep, plan: Plan) -> tuple[str, bool]:
    classes = {type(module).__module__ for module in ready.model.modules()}
    functions = {getattr(module.forward, "__module__", "") for module in ready.model.modules()}
    count = sum(name.startswith("liger_kernel") for name in classes | functions)
    return f"{count} modules of liger_kernel", count > 0


def _main_weights(ready: ReadyStep) -> Iterator[torch.Tensor]:
    """Yield this rank's main weights, flattened, of ZeRO's stages; stage 0 has none of its own."""
    optimizer: Any = ready.model.optimizer
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
        yield from getattr(optimizer, name, ())
