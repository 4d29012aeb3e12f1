"""Checks that refuse, in one line and before anything of the user's network is changed, what cannot be applied."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from tonnage.case import Case
from tonnage.catalog.optimizers import find_optimizer
from tonnage.cluster import CPU
from tonnage.errors import CannotEstimate, UsageError
from tonnage.mesh import SHARDING
from tonnage.options import is_number
from tonnage.plans import Plan
from tonnage.techniques import pipeline, qlora
from tonnage.techniques.optimizers import accepted_names
from tonnage.techniques.precision import dtype
from tonnage.trainers import engine_of
from tonnage.trainers.deepspeed.run import keeps_states_elsewhere
from tonnage.units import pluralise

if TYPE_CHECKING:
    from tonnage.cluster import Cluster
    from tonnage.job import Job
    from tonnage.step.step import Step

UNDER_A_PLAN: Final[WeakSet[nn.Module]] = WeakSet()
"""Networks to which a plan is applied."""

CARRIED_OUT: Final = ("tonnage", "deepspeed")
"""Engines whose plans `apply` carries out."""

_PAIRS: Final = ("betas",)
"""Hyperparameters that are two numbers."""


def check_supported(job: Job, plan: Plan) -> None:
    """Raise UsageError for a plan that an estimate knows and `apply` does not carry out."""
    if plan.engine not in CARRIED_OUT:
        raise UsageError(
            f"The plan is for the engine {plan.engine}, which runs a loop of its own; export it "
            f"(tonnage export FILE --to {plan.engine}), or plan for the engine {' or '.join(CARRIED_OUT)}."
        )
    engine = engine_of(plan)
    if refusals := [*engine.unexpressed(job, plan), *engine.missing()]:
        raise UsageError(str(refusals[0]))
    if plan.precision == "fp16-true" and job.method == "full":
        raise UsageError(
            "precision fp16-true cannot train all weights: small updates vanish and large gradients overflow; choose "
            "fp16-mixed or bf16-true."
        )


def check_techniques(job: Job, plan: Plan, cluster: Cluster) -> None:
    """Raise UsageError with the first reason why the plan cannot be carried out."""
    refusals = engine_of(plan).refusals(Case(job, plan, cluster, is_carried_out=True))
    if refusals:
        raise UsageError(str(refusals[0]))


def count_ranks(plan: Plan, gpus: int | None) -> int:
    """Return the number of this job's processes: those of the process group, or of torchrun.

    `gpus` is the number that the plan was made for; None: any.  Raises UsageError if the plan needs others.
    """
    is_started = dist.is_initialized() or "RANK" in os.environ
    _, ranks = started_as()
    start = f"start it with torchrun --nproc-per-node {gpus or 'N'}"
    if gpus is not None and gpus != ranks:
        here = f"the process group has {pluralise(ranks, 'rank')}" if is_started else "this is a single process"
        raise UsageError(f"The plan is for {pluralise(gpus, 'GPU')}, and {here}; {start}, or plan for {ranks}.")
    degrees = [f"{name} {getattr(plan, name)}" for name in ("tp", "cp", "pp") if getattr(plan, name) > 1]
    may_be_alone = plan.param_offload != "none" or (
        plan.engine == "deepspeed" and (gpus == 1 or keeps_states_elsewhere(plan))
    )
    shared = f"shard {plan.shard}" if plan.shard != "none" and not may_be_alone else "".join(degrees[:1])
    if shared and not is_started:
        raise UsageError(
            f"{shared} shares work among processes, and this one was started without torchrun; {start}, or "
            f"choose {shared.partition(' ')[0] + ' 1' if shared in degrees else 'shard none'}."
        )
    if plan.shard == "none" and ranks > plan.tp * plan.pp:
        raise UsageError(
            f"shard is none, and {ranks} ranks would train copies that never exchange gradients; choose shard ddp or "
            "zero3."
        )
    return ranks


def check_device(cluster: Cluster | None, kind: str) -> None:
    """Raise UsageError if a plan file was made for GPUs and the process computes on the CPU, or the other way round.

    `kind` is torch's word for the device.  The devices of a Plan are not known (None): it is applied anywhere.
    """
    if other := _name_other_device(cluster, kind):
        raise UsageError(f'{other}; a plan with gpu = "cpu" trains on the CPU.')


def warn_of_device(cluster: Cluster | None, kind: str) -> None:
    """Warn where `check_device` raises: the step is the same, what was predicted for the other device is not."""
    if other := _name_other_device(cluster, kind):
        warnings.warn(f"{other}: its memory and seconds are others than those that were predicted.", stacklevel=3)


def _name_other_device(cluster: Cluster | None, kind: str) -> str | None:
    """Return the device of a plan file and the process's own, if they are of two kinds."""
    if cluster is None or (cluster.device.id == CPU) == (kind == CPU):
        return None
    here = "this machine has no GPU" if kind == CPU and not torch.cuda.is_available() else f"this process uses {kind}"
    return f"The plan is for {cluster}, and {here}"


def started_as() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, of the process group or of the environment.

    Raises UsageError for an environment that is not whole.
    """
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if "RANK" not in os.environ:
        return 0, 1
    rank, ranks = os.environ["RANK"], os.environ.get("WORLD_SIZE", "")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing or not (rank.isdecimal() and ranks.isdecimal() and int(rank) < int(ranks)):
        why = f"no {missing[0]}" if missing else f"WORLD_SIZE {ranks or 'is not set'}"
        raise UsageError(f"The environment has RANK {rank} and {why}; start with torchrun, which sets them all.")
    return int(rank), int(ranks)


def check_hyperparameters(plan: Plan, hyperparameters: Mapping[str, Any]) -> None:
    """Raise UsageError for a hyperparameter that the plan's optimizer does not have, or that has no sense."""
    rows = [find_optimizer(plan.optimizer), *([find_optimizer("adamw")] if plan.optimizer == "muon" else [])]
    possible = tuple(dict.fromkeys(name for row in rows for name in accepted_names(row)))
    for name, value in hyperparameters.items():
        if name not in possible:
            raise UsageError(f"{plan.optimizer} has no hyperparameter {name!r}; possible: {', '.join(possible)}.")
        is_pair = name in _PAIRS or (name == "eps" and plan.optimizer == "adafactor")
        if is_pair and not (isinstance(value, tuple | list) and len(value) == 2 and all(map(is_number, value))):
            raise UsageError(f"{name} is {value!r}; {plan.optimizer} needs two numbers.")
        if not is_pair and not (is_number(value) and value >= 0):
            raise UsageError(f"{name} is {value!r}; it must be a number of at least 0.")


def check_quantized(job: Job, plan: Plan, network: nn.Module) -> None:
    """Raise UsageError if the network's layers are not quantized as the plan says; they are never converted."""
    formats = qlora.formats(network)
    if job.method == "qlora" and set(formats) != {plan.quant}:
        kind, _, double = plan.quant.partition("-")
        options = f"load_in_4bit=True, bnb_4bit_quant_type={kind!r}, bnb_4bit_use_double_quant={bool(double)}"
        options = "load_in_8bit=True" if kind == "int8" else options
        found = ", ".join(f"{count} in {name}" for name, count in formats.items()) or "none"
        raise UsageError(
            f"method is qlora with quant {plan.quant}, and of the network's linear layers {found} are quantized; "
            f"load it with quantization_config=BitsAndBytesConfig({options})."
        )
    storage = dtype(plan.compute_dtype)
    if job.method == "qlora" and plan.shard in SHARDING and not qlora.has_storage(network, storage):
        raise UsageError(
            f"shard {plan.shard} divides layers in 4 bits that are kept in {_name(storage)}; load the network with "
            f"BitsAndBytesConfig(bnb_4bit_quant_storage=torch.{_name(storage)}, ...)."
        )


def check_dtypes(step: Step, network: nn.Module) -> None:
    """Raise UsageError if the weights do not have the dtype that the plan was estimated with.

    They are never converted: that would change the user's weights, or the memory that was predicted.
    """
    plan, method, is_adapted = step.plan, step.job.method, adapted(network) is not None
    adapters, others = Counter[torch.dtype](), Counter[torch.dtype]()
    for parameter in network.parameters():
        if parameter.is_floating_point() and type(parameter).__name__ not in _PACKED:
            counts = adapters if is_adapted and parameter.requires_grad else others
            counts[parameter.dtype] += parameter.numel()
    if adapters and (have := _most(adapters)) != (wanted := dtype(plan.adapters_dtype(method))):
        narrow = "" if wanted == torch.float32 else "make them with autocast_adapter_dtype=False, or "
        raise UsageError(
            f"The network's adapters are {_name(have)}, and under {plan.precision} with method {method} they are "
            f"{_name(wanted)}; {narrow}plan with --weights-dtype {_WORDS.get(have, _name(have))}."
        )
    if is_adapted and method == "qlora":
        _check_unquantized(plan, others)
    elif (have := _most(others)) != step.weights_dtype:
        raise UsageError(
            f"The network's weights are {_name(have)}, and under {plan.precision} with method {method} "
            f"they are {_name(step.weights_dtype)}; load it with dtype=torch.{_name(step.weights_dtype)}, or choose "
            f"another precision{' or weights-dtype' if method == 'full' else ' or base-dtype'}."
        )


def _check_unquantized(plan: Plan, counts: Counter[torch.dtype]) -> None:
    """Raise UsageError if what a user has left unquantized beside adapters is not as the plan has it."""
    is_cast = plan.unquantized_dtype == "fp32"
    wanted = torch.float32 if is_cast else dtype(plan.compute_dtype)
    if counts and (have := _most(counts)) != wanted:
        how = "call" if is_cast else "leave out"
        raise UsageError(
            f"What is not quantized of the network is {_name(have)}, and under unquantized-dtype "
            f"{plan.unquantized_dtype} it is {_name(wanted)}; {how} peft.prepare_model_for_kbit_training before its "
            f"adapters are made, or plan with --unquantized-dtype {'compute' if is_cast else 'fp32'}."
        )


_PACKED: Final = ("Params4bit", "Int8Params")
"""bitsandbytes' kinds of quantized parameters, whatever the dtype in which they are stored."""

_WORDS: Final = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Dtypes as options spell them."""


def _most(counts: Counter[torch.dtype]) -> torch.dtype:
    """Return the dtype of most elements."""
    return counts.most_common(1)[0][0]


def check_network(network: object) -> None:
    """Raise UsageError for what is no network with memory of its own, or is under a plan already."""
    if not isinstance(network, nn.Module):
        raise UsageError(
            f"model is a {type(network).__name__}; give the nn.Module itself, such as what from_pretrained returns."
        )
    if not any(parameter.is_floating_point() for parameter in network.parameters()):
        raise UsageError(f"{type(network).__name__} has no weights to train.")
    if network in UNDER_A_PLAN:
        raise UsageError("The network is under a plan already; call unapply() of its Trainable first.")
    if any(parameter.is_meta for parameter in network.parameters()):
        raise UsageError(
            "The network is on the meta device and has no weights; load them, or initialise it, before apply."
        )
    if any(hasattr(parameter, "ds_id") for parameter in network.parameters()):
        raise UsageError("DeepSpeed has divided the network's weights; give a network with whole ones.")
    if type(network).__name__ in ("DistributedDataParallel", "OptimizedModule", "DeepSpeedEngine") or hasattr(
        network, "_get_fsdp_state"
    ):
        raise UsageError(f"The network is wrapped already ({type(network).__name__}); give the one without wrapper.")


def check_adapters(job: Job, plan: Plan, network: nn.Module) -> None:
    """Raise UsageError for adapters that each rank would make with values of its own."""
    is_alone = plan.tp > 1 or plan.pp > 1 or (plan.shard == "hsdp" and job.method == "qlora")
    if job.method != "full" and is_alone and adapted(network) is None:
        degrees = [f"{name} {getattr(plan, name)}" for name in ("tp", "pp") if getattr(plan, name) > 1]
        how = degrees[0] if degrees else f"shard {plan.shard}"
        raise UsageError(
            f"Under {how} ranks share adapters, and the network has none yet; give what peft.get_peft_model returns, "
            "made with the same seed on all ranks."
        )


def check_micro_batches(plan: Plan, batches: Sequence[Mapping[str, Any]]) -> None:
    """Raise UsageError for micro-batches that cannot go through a pipeline together."""
    refusal = pipeline.check_micro_batches(plan, len(batches))
    if refusal is not None:
        raise UsageError(str(refusal))
    shapes = [{name: (tuple(tensor.shape), tensor.dtype) for name, tensor in batch.items()} for batch in batches]
    other = next((shape for shape in shapes if shape != shapes[0]), None)
    if other is not None:
        raise UsageError(
            f"pp {plan.pp}: all micro-batches of a step have one shape, and these have {shapes[0]} and {other}; pad "
            "them to one length."
        )
    if not {"labels", "shift_labels"} & shapes[0].keys():
        raise UsageError(f"pp {plan.pp}: the last stage computes the loss, and the micro-batches have no labels.")


def check_trained(network: nn.Module) -> None:
    """Raise CannotEstimate if no parameter would get a gradient."""
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise CannotEstimate(
            f"No parameter of {type(network).__name__} requires a gradient; nothing would be trained."
        )


def adapted(network: nn.Module) -> Any | None:
    """Return PEFT's wrapper inside the network's own wrappers; None without one."""
    for module in network.modules():
        if hasattr(module, "peft_config") and hasattr(module, "get_base_model"):
            return module
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
