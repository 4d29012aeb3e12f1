"""Tensor parallelism: the ranks of `tp` divide each matrix, by torch's own styles
(torch.distributed.tensor.parallel).

transformers tells for each family how matrices are cut (`tp_plan`): queries, keys, values, gate and up by their rows
(each rank has some heads), the projections back to the model's width by their columns.  Embedding and head are cut by
the vocabulary, and the loss works on each rank's part of it: a plain one by torch's `loss_parallel`, one in slices by
our own (`vocabulary`).

With `sequence_parallel` the hidden states between the blocks are cut along the sequence: the all-reduce after a block
becomes a reduce-scatter, and an all-gather before the next; norms see a part of the sequence.  They are DTensors
then, so that the network's own code sees whole sequences everywhere.
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

    from torch import nn
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
"""Axis of heads in the input of a norm of queries or keys: (batch, sequence, heads, head width)."""

COUNTS: Final = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key and value heads",
    "intermediate_size": "columns of the MLP",
}
"""Configuration fields that tp must divide."""


def accepts(case: Case) -> Refusal | None:
    """Refuse all but plain training of a causal language model whose heads tp divides."""
    job, plan = case.job, case.plan
    if job.method == "qlora":
        return _refuse(plan, "matrices that bitsandbytes packs are not divided, and the method is qlora")
    if job.method == "lora" and job.lora_targets == ("all-linear",) and (experts_of(job) or 1) > 1:
        return _refuse(
            plan,
            "adapters on experts are not divided",
            "choose lora-targets q_proj,k_proj,v_proj,o_proj, or tp 1",
        )
    if job.model.kind == "factory":
        return _refuse(plan, "how a factory's network is cut is not known")
    if plan.loss not in ("plain", "chunked"):
        return _refuse(plan, f"loss {plan.loss} takes a whole head", "choose loss plain or chunked")
    if plan.precision in ("fp8", "fp16-mixed"):
        return _refuse(plan, f"precision {plan.precision} is not built for it", "choose precision bf16-mixed")
    if plan.optimizer in ("muon", "adafactor"):
        return _refuse(plan, f"{plan.optimizer} needs whole matrices", "choose optimizer adamw")
    if job.generate is not None or job.eval_logits is not None:
        return _refuse(plan, "it is not built for generate and eval-logits", "leave them out, or choose tp 1")
    text = job.model.text
    for field, name in COUNTS.items():
        count = text.get(field)
        if isinstance(count, int) and count % plan.tp:
            possible = [size for size in divisors(count) if case.cluster.gpus_per_node % size == 0]
            return _refuse(
                plan,
                f"{job.model.name} has {count:,} {name}, which {plan.tp} does not divide",
                f"choose tp {_join_sizes(possible)}",
            )
    if divides_sequence(plan) and job.seq_len % (plan.tp * plan.cp):
        return _refuse(
            plan,
            f"sequences of {job.seq_len:,} tokens cannot be cut into {plan.tp * plan.cp} parts",
            "choose another seq-len, or sequence-parallel off",
        )
    return None


def _refuse(plan: Plan, reason: str, instead: str = "choose tp 1") -> Refusal:
    return Refusal(technique=f"tp={plan.tp}", reason=reason, instead=instead)


def _join_sizes(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))


def divides_sequence(plan: Plan) -> bool:
    """Return True if hidden states between the blocks are cut along the sequence."""
    return plan.sequence_parallel == "on" or (plan.sequence_parallel == "auto" and plan.tp > 1)


def apply(step: Step) -> Step:
    """Cut the network before it has memory, and let the loss work on parts of the vocabulary."""
    from torch.distributed.tensor.parallel import loss_parallel

    from tonnage.step import clipping

    return replace(
        step,
        divide=(*step.divide, _divide_step),
        contexts=step.contexts if in_slices(step.plan) else (*step.contexts, loss_parallel),
        clip=partial(clipping.clip, world=step.world),
    )


def in_slices(plan: Plan) -> bool:
    """Return True if the head and the loss work on plain tensors, a slice of tokens at a time."""
    return plan.loss == "chunked"


def _divide_step(step: Step, module: nn.Module) -> nn.Module:
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
    """Return the network on the meta device with what this rank of `mesh` holds of it.

    Divided parameters are DTensors, which FSDP2 shards further; with `local_parameters` they are plain tensors that
    are DTensors only while their module runs, so that DDP and every optimizer can take them.  Without `experts` those
    stay whole; with `plain_head` the head takes and returns plain tensors (`vocabulary.divide`).  Raises
    CannotEstimate if it is not known how the network is cut.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    from tonnage.step.model import causal_network
    from tonnage.step.stages import Stage
    from tonnage.techniques import vocabulary
    from tonnage.techniques.local_parameters import keep_local
    from tonnage.techniques.sequence_parallel import gather_around

    network = causal_network(module, "Tensor parallelism", "tp 1")
    plan = _layer_plan(network)
    expert_plan = {name: style for name, style in plan.items() if _belongs_to_experts(name, plan)}
    layer_plan = {name: plan[name] for name in plan.keys() - expert_plan.keys()}
    styles = dict(_styles(network, layer_plan, sequence, plain_head))
    ties = _find_ties(network)
    frozen = [name for name, parameter in network.named_parameters() if not parameter.requires_grad]
    for name, style in styles.items():  # given together, torch would search all layers for each name
        parallelize_module(network.get_submodule(name), mesh, style, src_data_rank=None)
    head = network.get_output_embeddings() if plain_head else None
    if head is not None:
        vocabulary.divide(head, mesh)
    _tie(ties)
    for name in frozen:  # torch's style of norms makes new parameters with gradients
        network.get_parameter(name).requires_grad_(False)
    if experts and expert_plan:
        _divide_experts(network, mesh, expert_plan)
    if sequence:
        gather_around(network, styles, mesh, around_head=not plain_head)
        if isinstance(module, Stage):
            module.between = mesh
    if local_parameters:
        made: dict[Any, Any] = {}
        for child in network.modules():
            keep_local(child, mesh, made, works_on_local=child is head or _works_on_local(child))
    return module


def _belongs_to_experts(name: str, plan: dict[str, str]) -> bool:
    return plan.get(name) == EXPERTS or plan.get(name.rpartition(".")[0]) == EXPERTS


def _divide_experts(network: Any, mesh: DeviceMesh, plan: dict[str, str]) -> None:
    """Give each rank columns of every expert by transformers' own code, because torch has none for 3-D weights."""
    unknown = _not_known(network, "this version of transformers does not divide experts by a plan that it is given")
    try:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError as error:
        raise unknown from error
    if len(signature(apply_tensor_parallelism).parameters) < 3:  # as in 5.17, which uses the network's own plan
        raise unknown
    apply_tensor_parallelism(network, mesh, dict(sorted(plan.items(), key=lambda item: item[1] == EXPERTS)))


def _styles(network: Any, plan: dict[str, str], sequence: bool, plain_head: bool) -> Iterator[tuple[str, Any]]:
    """Yield torch's styles by module names; none for a head that takes plain tensors."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    from tonnage.step import adapters
    from tonnage.step.model import has_parameters

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
        if has_parameters(module) and not (plain_head and module is head):
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
        for name in _norm_names(network):
            yield name, SequenceParallel()


def _layer_plan(network: Any) -> dict[str, str]:
    """Return how transformers cuts modules and parameters inside the layers, by their names.

    Raises CannotEstimate if it does not.
    """
    patterns: dict[str, str] = getattr(network, "tp_plan", None) or getattr(network, "_tp_plan", None) or {}
    ends = (network.get_input_embeddings(), network.get_output_embeddings())
    names = [name for name, module in network.named_modules() if module not in ends]
    names += [name for name, _ in network.named_parameters()]
    plan = {name: patterns[generic] for name in names if (generic := _pattern_of(name)) in patterns}
    if not plan:
        raise _not_known(network, "transformers has no tp_plan for it")
    return plan


def _pattern_of(name: str) -> str:
    """Return the name with layer numbers replaced: `model.layers.3.mlp` -> `model.layers.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _not_known(network: Any, why: str) -> CannotEstimate:
    return CannotEstimate(
        f"How {type(network).__name__} is cut for tensor parallelism is not known: {why}; choose tp 1."
    )


def _norm_names(network: Any) -> Iterator[str]:
    """Yield the names of modules with own parameters between the blocks of layers, and after the last layer."""
    from tonnage.step.model import has_parameters, layers

    names = {module: name for name, module in network.named_modules()}
    for parent in (*layers(network), network.base_model):
        for child in parent.children():
            if has_parameters(child) and not list(child.children()) and child is not network.get_input_embeddings():
                yield names[child]


def _find_ties(network: Any) -> list[list[tuple[Any, str]]]:
    """Return where each parameter that several modules share is stored."""
    places_by_id: dict[int, list[tuple[Any, str]]] = {}
    for module in network.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places_by_id.setdefault(id(parameter), []).append((module, name))
    return [places for places in places_by_id.values() if len(places) > 1]


def _tie(ties: list[list[tuple[Any, str]]]) -> None:
    for (first, name), *others in ties:
        for module, other in others:
            module._parameters[other] = first._parameters[name]


def _works_on_local(module: Any) -> bool:
    """Return True for modules of experts, which take their own weights as plain tensors themselves."""
    return any(parameter is not None and parameter.dim() == EXPERTS_DIMS for parameter in module._parameters.values())


TENSOR_PARALLEL: Final = Technique(option="tp", values=("N",), accepts=accepts, apply=apply)
