"""Tensor parallelism: the ranks of `tp` share each matrix, by torch's own styles (torch.distributed.tensor.parallel).

Which matrices are cut how, transformers says for each family (`tp_plan`): queries, keys, values, gate and up by their
rows (each rank has some heads), the projections back to the model's width by their columns.  Embedding and head are
cut by the vocabulary, and the loss works on each rank's part of it: a plain one by torch's `loss_parallel`, one in
slices by our own (`vocabulary`).

With `sequence_parallel` the hidden states between the blocks are cut along the sequence: what was an all-reduce
after a block becomes a reduce-scatter, and an all-gather before the next; norms see a part of the sequence.  They are
DTensors then, so the network's own code sees whole sequences everywhere.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, Final

from tonnage.errors import CannotEstimate
from tonnage.mesh import divisors
from tonnage.techniques.expert_parallel import experts_of
from tonnage.techniques.technique import Refusal, Technique

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from tonnage.case import Case
    from tonnage.plans import Plan
    from tonnage.step.step import Step

EXPERTS: Final = "moe_tp_experts"
"""transformers' name for a module whose 3-D weights hold all experts."""

EXPERTS_DIMS: Final = 3
"""Dimensions of a weight that holds all experts."""

HEADS_AXIS: Final = 2
"""Of what a norm of queries or keys gets: (batch, sequence, heads, width of a head)."""

COUNTS: Final = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key and value heads",
    "intermediate_size": "columns of the MLP",
}
"""Fields of a configuration that tp must divide."""


def accepts(case: Case) -> Refusal | None:
    """Plain training of a causal language model whose heads can be dealt out."""
    job, plan = case.job, case.plan
    if job.method == "qlora":
        return _refused(plan, "matrices that bitsandbytes packs are not divided, and the method is qlora")
    if job.method == "lora" and job.lora_targets == ("all-linear",) and (experts_of(job) or 1) > 1:
        return _refused(
            plan,
            "adapters on experts are not divided",
            "choose lora-targets q_proj,k_proj,v_proj,o_proj, or tp 1",
        )
    if job.model.kind == "factory":
        return _refused(plan, "how a factory's network is cut is not known")
    if plan.loss not in ("plain", "chunked"):
        return _refused(plan, f"loss {plan.loss} takes a whole head", "choose loss plain or chunked")
    if plan.precision in ("fp8", "fp16-mixed"):
        return _refused(plan, f"precision {plan.precision} is not built for it", "choose precision bf16-mixed")
    if plan.optimizer in ("muon", "adafactor"):
        return _refused(plan, f"{plan.optimizer} needs whole matrices", "choose optimizer adamw")
    if job.generate is not None or job.eval_logits is not None:
        return _refused(plan, "it is not built for generate and eval-logits", "leave them out, or choose tp 1")
    text = job.model.text
    for field, name in COUNTS.items():
        count = text.get(field)
        if isinstance(count, int) and count % plan.tp:
            possible = [size for size in divisors(count) if case.cluster.gpus_per_node % size == 0]
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

    from tonnage.step import clipping

    return replace(
        step,
        divide=(*step.divide, _divided),
        contexts=step.contexts if in_slices(step.plan) else (*step.contexts, loss_parallel),
        clip=partial(clipping.clip, world=step.world),
    )


def in_slices(plan: Plan) -> bool:
    """Whether the head and the loss work on plain tensors, a slice of tokens at a time."""
    return plan.loss == "chunked"


def _divided(step: Step, module: nn.Module) -> nn.Module:
    return divided(
        module,
        mesh=step.world.along("tp"),
        sequence=divides_sequence(step.plan),
        local_parameters=not step.shards_parameters,
        experts=step.plan.ep == 1,
        plain_head=in_slices(step.plan),
    )


def divided(
    module: nn.Module,
    *,
    mesh: DeviceMesh,
    sequence: bool,
    local_parameters: bool,
    experts: bool = True,
    plain_head: bool = False,
) -> nn.Module:
    """The network on the meta device with what this rank of `mesh` holds of it.

    Divided parameters are DTensors, which FSDP2 divides further; with `local_parameters` they are plain tensors that
    are DTensors only while their module runs, so that DDP and every optimizer can take them.  Without `experts`
    those stay whole; with `plain_head` the head takes and gives plain tensors (`vocabulary.divide`).
    Raises CannotEstimate where it is not known how the network is cut.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    from tonnage.step.model import causal_network
    from tonnage.step.stages import Stage
    from tonnage.techniques import vocabulary

    network = causal_network(module, "Tensor parallelism", "tp 1")
    plan = _plan_of_layers(network)
    of_experts = {name: style for name, style in plan.items() if _is_of_experts(name, plan)}
    of_layers = {name: plan[name] for name in plan.keys() - of_experts.keys()}
    styles = dict(_styles(network, of_layers, sequence, plain_head))
    ties = _ties(network)
    frozen = [name for name, parameter in network.named_parameters() if not parameter.requires_grad]
    for name, style in styles.items():  # all at once, each name would be looked for among all layers
        parallelize_module(network.get_submodule(name), mesh, style, src_data_rank=None)
    head = network.get_output_embeddings() if plain_head else None
    if head is not None:
        vocabulary.divide(head, mesh)
    _tie(ties)
    for name in frozen:  # torch's style of norms makes new parameters, which are trained
        network.get_parameter(name).requires_grad_(False)
    if experts and of_experts:
        _divide_experts(network, mesh, of_experts)
    if sequence:
        _gather_around(network, styles, mesh, around_head=not plain_head)
        if isinstance(module, Stage):
            module.between = mesh
    if local_parameters:
        made: dict[Any, Any] = {}
        for child in network.modules():
            _keep_local(child, mesh, made, works_on_local=child is head or _works_on_local(child))
    return module


def _is_of_experts(name: str, plan: dict[str, str]) -> bool:
    return plan.get(name) == EXPERTS or plan.get(name.rpartition(".")[0]) == EXPERTS


def _divide_experts(network: Any, mesh: DeviceMesh, plan: dict[str, str]) -> None:
    """Each rank has columns of every expert: transformers' own code, because torch has none for 3-D weights."""
    unknown = _not_known(network, "this version of transformers does not divide experts by a plan that it is given")
    try:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError as error:
        raise unknown from error
    if len(signature(apply_tensor_parallelism).parameters) < 3:  # as in 5.17, which takes the network's own
        raise unknown
    apply_tensor_parallelism(network, mesh, dict(sorted(plan.items(), key=lambda item: item[1] == EXPERTS)))


def _styles(network: Any, plan: dict[str, str], sequence: bool, plain_head: bool) -> Iterator[tuple[str, Any]]:
    """What torch is told, by the names of modules; nothing about a head that takes plain tensors."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    from tonnage.step import adapters

    between: Placement = Shard(1) if sequence else Replicate()
    local = not sequence
    names = {module: name for name, module in network.named_modules()}
    head = network.get_output_embeddings()
    ends = (
        (network.get_input_embeddings(), RowwiseParallel, {"output_layouts": between, "use_local_output": local}),
        (head, ColwiseParallel, {"output_layouts": Shard(-1), "use_local_output": False}),
    )
    for module, style, options in ends:
        if adapters.are_in(module):
            raise _not_known(network, "adapters on its embedding or head are not divided")
        if _holds(module) and not (plain_head and module is head):
            yield names[module], style(input_layouts=Replicate(), **options)
    kinds = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(output_layouts=between, use_local_output=local),
        "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=HEADS_AXIS, use_local_output=True),
    }
    for name, style in plan.items():
        if style not in kinds:
            raise _not_known(network, f"{name} is {style}")
        if adapters.are_in(network.get_submodule(name)):
            yield from adapters.styles(name, network.get_submodule(name), style, kinds[style], between)
        else:
            yield name, kinds[style]
    if sequence:
        for name in _norms(network):
            yield name, SequenceParallel()


def _plan_of_layers(network: Any) -> dict[str, str]:
    """How transformers cuts modules and parameters inside the layers, by their names.

    Raises CannotEstimate if it does not.
    """
    wanted: dict[str, str] = getattr(network, "tp_plan", None) or getattr(network, "_tp_plan", None) or {}
    ends = (network.get_input_embeddings(), network.get_output_embeddings())
    here = [name for name, module in network.named_modules() if module not in ends]
    here += [name for name, _ in network.named_parameters()]
    found = {name: wanted[generic] for name in here if (generic := _generic(name)) in wanted}
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


def _norms(network: Any) -> Iterator[str]:
    """Modules with parameters of their own that stand between the blocks of the layers, and behind the last layer."""
    names = {module: name for name, module in network.named_modules()}
    for parent in (*_layers(network), network.base_model):
        for child in parent.children():
            if _holds(child) and not list(child.children()) and child is not network.get_input_embeddings():
                yield names[child]


def _holds(module: Any) -> bool:
    return next(module.parameters(), None) is not None


def _layers(network: Any) -> list[Any]:
    from tonnage.step.model import layers

    return layers(network)


def _gather_around(network: Any, styles: dict[str, Any], mesh: DeviceMesh, *, around_head: bool) -> None:
    """Before each block, and before the head unless a loss in slices does it, the whole sequence is gathered.

    A block with modules that are not cut, such as a router, works on plain tensors, whole on every rank.
    """
    names = {module: name for name, module in network.named_modules()}
    for layer in _layers(network):
        for block in layer.children():
            if names[block] in styles or not _holds(block):
                continue
            if all(_covered(part, names, styles) for part in block.modules()):
                block.register_forward_pre_hook(_whole_sequence, with_kwargs=True)
            else:
                _leave_plain(block, mesh, [part for part in block.modules() if names[part] in styles])
    if around_head:
        head = network.get_output_embeddings()
        head.register_forward_pre_hook(_whole_sequence, with_kwargs=True, prepend=True)


def _leave_plain(block: Any, mesh: DeviceMesh, cut: list[Any]) -> None:
    """Whole plain tensors go in and come out; `cut` modules inside hand theirs on as they are after an all-reduce."""
    for part in cut:
        part.register_forward_hook(lambda _module, _inputs, output: _plain(output))
    block.register_forward_pre_hook(_whole_plain_sequence, with_kwargs=True)
    block.register_forward_hook(partial(_divided_sequence, mesh=mesh))


def _whole_plain_sequence(module: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return tuple(map(_plain, positional)), {name: _plain(value) for name, value in named.items()}


def _plain(value: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return _replicated(value).to_local() if isinstance(value, DTensor) else value


def _divided_sequence(module: Any, _inputs: Any, output: Any, *, mesh: DeviceMesh) -> Any:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if isinstance(output, tuple):
        return (_divided_sequence(module, None, output[0], mesh=mesh), *output[1:])
    return DTensor.from_local(output, mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(1)])


def _covered(part: Any, names: dict[Any, str], styles: dict[str, Any]) -> bool:
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


def _keep_local(module: Any, mesh: DeviceMesh, made: dict[Any, Any], *, works_on_local: bool) -> None:
    """The module's DTensors become plain parameters and buffers, of which DTensors are made for each forward, unless
    it works on plain ones.

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
    for name, buffer in module._buffers.items():  # torch's styles replicate them, such as Gemma's scale of embeddings
        if isinstance(buffer, DTensor):
            layouts[name] = (buffer.placements, buffer.shape, buffer.stride())
            module._buffers[name] = buffer.to_local()
    if layouts and not works_on_local:
        module.register_forward_pre_hook(partial(_as_dtensors, mesh=mesh, layouts=layouts), prepend=True)
        module.register_forward_hook(partial(_as_parameters, layouts=layouts), always_call=True)


def _works_on_local(module: Any) -> bool:
    """Modules of experts take their own weights as plain tensors themselves."""
    return any(parameter is not None and parameter.dim() == EXPERTS_DIMS for parameter in module._parameters.values())


def _local(parameter: Any) -> Any:
    """What this rank holds, as a parameter that says whether the others hold the rest."""
    from torch import nn

    local: Any = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
    local.divided = not all(placement.is_replicate() for placement in parameter.placements)
    return local


def _as_dtensors(module: Any, _arguments: Any, *, mesh: DeviceMesh, layouts: dict[str, Any]) -> None:
    from torch.distributed.tensor import DTensor

    for name, (placements, shape, stride) in layouts.items():
        local = module._parameters[name] if name in module._parameters else module._buffers[name]
        module.__dict__[name] = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=shape, stride=stride
        )  # an attribute of the instance hides the parameter of that name


def _as_parameters(module: Any, _arguments: Any, _output: Tensor, *, layouts: dict[str, Any]) -> None:
    for name in layouts:
        module.__dict__.pop(name, None)


TENSOR_PARALLEL: Final = Technique(option="tp", values=("N",), accepts=accepts, apply=apply)
