"""Tensor parallelism: the ranks of `tp` share each matrix, by torch's own styles (torch.distributed.tensor.parallel).

Which matrices are cut how, transformers says for each family (`tp_plan`): queries, keys, values, gate and up by their
rows (each rank has some heads), the projections back to the model's width by their columns.  Embedding and head are
cut by the vocabulary, and the loss works on each rank's part of it (`loss_parallel`).

With `sequence_parallel` the hidden states between the blocks are cut along the sequence: what was an all-reduce
after a block becomes a reduce-scatter, and an all-gather before the next; norms see a part of the sequence.  They are
DTensors then, so the network's own code sees whole sequences everywhere.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tonnage.axes import divisors
from tonnage.errors import CannotEstimate
from tonnage.techniques.technique import Refusal, Technique

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from tonnage.device import Cluster
    from tonnage.job import Job
    from tonnage.plan import Plan
    from tonnage.step import Step

BY_ROWS: Final = ("colwise", "packed_colwise")
"""What transformers calls a matrix whose result is cut: torch keeps it transposed, so its rows are."""

HEADS_AXIS: Final = 2
"""Of what a norm of queries or keys gets: (batch, sequence, heads, width of a head)."""

COUNTS: Final = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key and value heads",
    "intermediate_size": "columns of the MLP",
}
"""Fields of a configuration that tp must divide."""


def accepts(job: Job, plan: Plan, cluster: Cluster) -> Refusal | None:
    """Plain training of a causal language model whose heads can be dealt out."""
    if job.method != "full":
        return _refused(plan, f"adapters on divided matrices are not built, and the method is {job.method}")
    if job.model.kind == "factory":
        return _refused(plan, "how a factory's network is cut is not known")
    if plan.loss not in ("plain", "chunked"):
        return _refused(plan, f"loss {plan.loss} takes a whole head", "choose loss plain or chunked")
    if plan.precision in ("fp8", "fp16-mixed"):
        return _refused(plan, f"precision {plan.precision} is not built for it", "choose precision bf16-mixed")
    text = job.model.config.get("text_config", job.model.config)
    for field, name in COUNTS.items():
        count = text.get(field)
        if isinstance(count, int) and count % plan.tp:
            possible = [size for size in divisors(count) if cluster.gpus_per_node % size == 0]
            return _refused(
                plan,
                f"{job.model.name} has {count:,} {name}, which {plan.tp} does not divide",
                f"choose tp {_listed(possible)}",
            )
    if divides_sequence(plan) and job.seq_len % (plan.tp * plan.cp):
        return _refused(
            plan,
            f"sequences of {job.seq_len:,} tokens cannot be cut into {plan.tp * plan.cp} parts",
            "choose another seq-len, or sequence-parallel off",
        )
    return None


def _refused(plan: Plan, reason: str, instead: str = "choose tp 1") -> Refusal:
    return Refusal(technique=f"tp={plan.tp}", reason=reason, instead=instead)


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))


def divides_sequence(plan: Plan) -> bool:
    """Whether hidden states between the blocks are cut along the sequence."""
    return plan.sequence_parallel == "on" or (plan.sequence_parallel == "auto" and plan.tp > 1)


def apply(step: Step) -> Step:
    """Cut the network before it has memory, and work on parts of the vocabulary in the loss."""
    from torch.distributed.tensor.parallel import loss_parallel

    from tonnage import clipping

    return replace(
        step,
        divide=(*step.divide, _divided),
        contexts=(*step.contexts, loss_parallel),
        clip=partial(clipping.clip, world=step.world),
    )


def _divided(step: Step, module: nn.Module) -> nn.Module:
    return divided(
        module,
        mesh=step.world.along("tp"),
        sequence=divides_sequence(step.plan),
        local_parameters=not step.shards_parameters,
    )


def divided(module: nn.Module, *, mesh: DeviceMesh, sequence: bool, local_parameters: bool) -> nn.Module:
    """The network on the meta device with what this rank of `mesh` holds of it.

    Divided parameters are DTensors, which FSDP2 divides further; with `local_parameters` they are plain tensors that
    are DTensors only while their module runs, so that DDP and every optimizer can take them.
    Raises CannotEstimate where it is not known how the network is cut.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    from tonnage.stages import Stage
    from tonnage.techniques.chunked_loss import causal_network

    network = causal_network(module)
    styles = dict(_styles(network, sequence))
    ties = _ties(network)
    parallelize_module(network, mesh, styles, src_data_rank=None)
    _tie(ties)
    if sequence:
        _gather_around(network, styles)
        if isinstance(module, Stage):
            module.between = mesh
    if local_parameters:
        made: dict[Any, Any] = {}
        for child in network.modules():
            _keep_local(child, mesh, made)
    return module


def _styles(network: Any, sequence: bool) -> Iterator[tuple[str, Any]]:
    """What torch is told, by the names of modules."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    between: Placement = Shard(1) if sequence else Replicate()
    local = not sequence
    names = {module: name for name, module in network.named_modules()}
    ends = (
        (network.get_input_embeddings(), RowwiseParallel, {"output_layouts": between, "use_local_output": local}),
        (network.get_output_embeddings(), ColwiseParallel, {"output_layouts": Shard(-1), "use_local_output": False}),
    )
    for module, style, options in ends:
        if _holds(module):
            yield names[module], style(input_layouts=Replicate(), **options)
    kinds = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(output_layouts=between, use_local_output=local),
        "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=HEADS_AXIS, use_local_output=True),
    }
    plan = _plan_of_layers(network)
    for name, style in plan.items():
        if style not in kinds:
            raise _not_known(network, f"{name} is {style}")
        yield name, kinds[style]
    if sequence:
        for name in _norms(network, plan):
            yield name, SequenceParallel()


def _plan_of_layers(network: Any) -> dict[str, str]:
    """How transformers cuts the modules inside the layers, by their names.  Raises CannotEstimate if it does not."""
    wanted: dict[str, str] = getattr(network, "tp_plan", None) or getattr(network, "_tp_plan", None) or {}
    ends = (network.get_input_embeddings(), network.get_output_embeddings())
    found = {
        name: wanted[generic]
        for name, module in network.named_modules()
        if (generic := _generic(name)) in wanted and module not in ends
    }
    if not found:
        raise _not_known(network, "transformers has no tp_plan for it")
    return found


def _generic(name: str) -> str:
    """`model.layers.3.mlp` -> `model.layers.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _not_known(network: Any, why: str) -> CannotEstimate:
    return CannotEstimate(
        f"How {type(network).__name__} is cut for tensor parallelism is not known: {why}; choose tp 1."
    )


def _norms(network: Any, plan: dict[str, str]) -> Iterator[str]:
    """Modules with parameters that stand between the blocks of the layers, and behind the last layer."""
    names = {module: name for name, module in network.named_modules()}
    for parent in (*_layers(network), network.base_model):
        for child in parent.children():
            name = names[child]
            within = any(planned == name or planned.startswith(f"{name}.") for planned in plan)
            if _holds(child) and not within and child is not network.get_input_embeddings():
                yield name


def _holds(module: Any) -> bool:
    return next(module.parameters(), None) is not None


def _layers(network: Any) -> list[Any]:
    from tonnage.model import layers

    return layers(network)


def _gather_around(network: Any, styles: dict[str, Any]) -> None:
    """Before each block, and before the head, the whole sequence is gathered."""
    names = {module: name for name, module in network.named_modules()}
    for layer in _layers(network):
        for block in layer.children():
            planned = [name for name in styles if name.startswith(f"{names[block]}.")]
            if planned:
                whole = all(_covered(block, part, names, styles) for part in block.modules())
                if not whole:
                    raise _not_known(network, f"{names[block]} holds modules that tp_plan leaves out")
                block.register_forward_pre_hook(_whole_sequence, with_kwargs=True)
    head = network.get_output_embeddings()
    head.register_forward_pre_hook(_whole_sequence, with_kwargs=True, prepend=True)


def _covered(block: Any, part: Any, names: dict[Any, str], styles: dict[str, Any]) -> bool:
    return not part._parameters or all(p is None for p in part._parameters.values()) or names[part] in styles


def _whole_sequence(module: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return tuple(map(_replicated, positional)), {name: _replicated(value) for name, value in named.items()}


def _replicated(value: Any) -> Any:
    from torch.distributed.tensor import DTensor, Replicate

    if isinstance(value, DTensor) and value.placements != (Replicate(),):
        return value.redistribute(placements=[Replicate()])
    return value


def _ties(network: Any) -> list[list[tuple[Any, str]]]:
    """Where each parameter that several modules share is kept."""
    places: dict[int, list[tuple[Any, str]]] = {}
    for module in network.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return [found for found in places.values() if len(found) > 1]


def _tie(ties: list[list[tuple[Any, str]]]) -> None:
    for (first, name), *others in ties:
        for module, other in others:
            module._parameters[other] = first._parameters[name]


def _keep_local(module: Any, mesh: DeviceMesh, made: dict[Any, Any]) -> None:
    """The module's DTensors become plain parameters, of which DTensors are made for each forward.

    torch's own hooks for this (those of DDP with a 2-D mesh) make new parameters in each step, which neither DDP nor
    an optimizer knows.  `made` has the plain parameters so far: modules that share one go on sharing.
    """
    from torch.distributed.tensor import DTensor

    layouts: dict[str, Any] = {}
    for name, parameter in module._parameters.items():
        if isinstance(parameter, DTensor):
            layouts[name] = (parameter.placements, parameter.shape, parameter.stride())
            if parameter not in made:
                made[parameter] = _local(parameter)
            module._parameters[name] = made[parameter]
    if layouts:
        module.register_forward_pre_hook(partial(_as_dtensors, mesh=mesh, layouts=layouts), prepend=True)
        module.register_forward_hook(partial(_as_parameters, layouts=layouts), always_call=True)


def _local(parameter: Any) -> Any:
    """What this rank holds, as a parameter that says whether the others hold the rest."""
    from torch import nn

    local: Any = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
    local.divided = any(placement.is_shard() for placement in parameter.placements)
    return local


def _as_dtensors(module: Any, _arguments: Any, *, mesh: DeviceMesh, layouts: dict[str, Any]) -> None:
    from torch.distributed.tensor import DTensor

    for name, (placements, shape, stride) in layouts.items():
        module.__dict__[name] = DTensor.from_local(
            module._parameters[name], mesh, placements, run_check=False, shape=shape, stride=stride
        )  # an attribute of the instance hides the parameter of that name


def _as_parameters(module: Any, _arguments: Any, _output: Tensor, *, layouts: dict[str, Any]) -> None:
    for name in layouts:
        module.__dict__.pop(name, None)


TENSOR_PARALLEL: Final = Technique(option="tp", values=("N",), accepts=accepts, apply=apply)
