"""A run's checkpoint: saved to the host, and brought in again before the first step.

Nothing is written or read: what a checkpoint would hold is made up where it would be.  Of adapters it holds what is
trained, as PEFT saves them.  Parameters that FSDP2 divides are saved and loaded by torch's `checkpoint.state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from tonnage.errors import CannotEstimate
from tonnage.step import model as models

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import StateDictOptions
    from torch.optim import Optimizer

    from tonnage.step.step import ReadyStep


def save(ready: ReadyStep) -> None:
    """Weights and optimizer states to the host, piece by piece as torch.save and torch's distributed checkpoints do.

    `full`: of the whole network, gathered from the shards; `sharded`: what this rank has.
    """
    whole = ready.step.job.save_checkpoint == "full"
    states: Any
    if ready.step.shards_parameters:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        states = get_state_dict(ready.model, _each(ready), options=_options(ready, whole=whole, cpu_offload=whole))
    else:
        states = [_weights(ready), *(_states(optimizer, whole=whole) for optimizer in ready.optimizers)]
    for tensor in tree_leaves(states):
        if isinstance(tensor, torch.Tensor):
            tensor = getattr(tensor, "_local_tensor", tensor)
            tensor.to("cpu")


def resume(ready: ReadyStep) -> None:
    """Weights and optimizer states from a checkpoint, before the first step.

    `gpu`: the whole checkpoint is on the card first (map_location), beside the weights; states are then taken as they
    are.  `cpu`: it is on the host, and goes to the card piece by piece; of divided parameters this rank's part is, as
    torch's distributed checkpoints read it.
    """
    reason = _unknown(ready)
    if reason is not None:
        raise CannotEstimate(f"How a run resumes is not known here: {reason}; leave resume out, or that.")
    if not ready.step.shards_parameters:
        _resume_whole(ready)
    elif ready.step.job.resume == "cpu":
        _resume_parts(ready)
    else:
        _resume_divided(ready)


def _unknown(ready: ReadyStep) -> str | None:
    """Why no states could be loaded, or the step after them would fail."""
    plan = ready.step.plan
    if plan.optimizer_offload.startswith("nvme"):
        return f"optimizer-offload {plan.optimizer_offload} has states in files, which load_state_dict does not fill"
    if plan.shard == "zero1" and any(_makes_states_itself(getattr(one, "optim", None)) for one in ready.optimizers):
        return (
            "under shard zero1 torch's ZeroRedundancyOptimizer hands on the states of bitsandbytes' "
            f"{plan.optimizer} as they are wrapped in the file, and the next step does not find them"
        )
    if ready.step.shards_parameters and ready.step.job.resume == "gpu" and any(map(_has_tables, ready.optimizers)):
        return f"torchao's {plan.optimizer} cannot cut whole states into the parts of resume gpu"
    return None


def _resume_whole(ready: ReadyStep) -> None:
    """torch.load of one file, then load_state_dict of network and optimizers."""
    weights, states = _weights(ready), [_to_load(optimizer) for optimizer in ready.optimizers]
    weights, *loaded = _made_up([weights, *states], _place(ready))
    ready.model.load_state_dict(weights, strict=ready.step.job.method == "full")
    for optimizer, state in zip(ready.optimizers, loaded, strict=True):
        optimizer.load_state_dict(state)


def _resume_parts(ready: ReadyStep) -> None:
    """Made by a first step without gradients, then written over from the host."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    options = _options(ready)
    weights, states = get_state_dict(ready.model, _each(ready), options=options)
    for tensor in tree_leaves((weights, states)):
        if isinstance(tensor, torch.Tensor):
            tensor = getattr(tensor, "_local_tensor", tensor)
            tensor.copy_(_made_up(tensor, torch.device("cpu")))
    set_state_dict(ready.model, _each(ready), model_state_dict=weights, optim_state_dict=states, options=options)


def _resume_divided(ready: ReadyStep) -> None:
    """The whole checkpoint on every card, of which each takes its part."""
    from torch.distributed.checkpoint.state_dict import set_state_dict

    weights, *states = _made_up(
        [_weights(ready), *(_by_name(ready, optimizer) for optimizer in _each(ready))], _place(ready), whole=True
    )
    together: dict[str, Any] = {"state": {}, "param_groups": []}
    for one in states:
        together["state"].update(one["state"])
        together["param_groups"].extend(one["param_groups"])
    set_state_dict(
        ready.model,
        _each(ready),
        model_state_dict=weights,
        optim_state_dict=together,
        options=_options(ready, whole=True),
    )


def _place(ready: ReadyStep) -> torch.device:
    return ready.step.world.device if ready.step.job.resume == "gpu" else torch.device("cpu")


def _options(ready: ReadyStep, *, whole: bool = False, cpu_offload: bool = False) -> StateDictOptions:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    trained_alone = ready.step.job.method != "full"
    return StateDictOptions(
        full_state_dict=whole,
        cpu_offload=cpu_offload,
        ignore_frozen_params=trained_alone,
        strict=not trained_alone,
    )


def _each(ready: ReadyStep) -> list[Optimizer]:
    """The optimizers; where each parameter has its own, which is updated in backward, all of them."""
    return [one for optimizer in ready.optimizers for one in _known_to_torch(optimizer)]


def _known_to_torch(optimizer: Optimizer) -> Iterable[Optimizer]:
    return _parts(optimizer).values() or (optimizer,)


def _parts(optimizer: Optimizer) -> dict[str, Optimizer]:
    """The optimizers that one of ours is made of, by their names in its state_dict; none of anybody else's."""
    found: dict[str, Optimizer] = getattr(optimizer, "parts", {})
    return found


def _weights(ready: ReadyStep) -> dict[str, Any]:
    """Of the network all that it keeps; of adapters beside it what is trained."""
    if ready.step.job.method == "full":
        found: dict[str, Any] = ready.model.state_dict()
        return found
    return {name: value.detach() for name, value in ready.model.named_parameters() if value.requires_grad}


def _states(optimizer: Optimizer, *, whole: bool) -> dict[str, Any]:
    """What an optimizer has; of one whose states are divided by parameter (ZeRO-1) this rank's part.

    Raises CannotEstimate where all of them are wanted: ranks would send each other pickles, which no ghost can read.
    """
    found: dict[str, Any]
    if not _divided_by_parameter(optimizer):
        found = optimizer.state_dict()
        return found
    if whole:
        raise CannotEstimate(
            "How ZeroRedundancyOptimizer gathers all states is not known: its ranks send each other pickles; choose "
            "save-checkpoint sharded, or shard zero2."
        )
    found = optimizer.optim.state_dict()  # type: ignore[attr-defined]
    return found


def _divided_by_parameter(optimizer: Optimizer) -> bool:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return isinstance(optimizer, ZeroRedundancyOptimizer)


def _to_load(optimizer: Optimizer) -> dict[str, Any]:
    """The state_dict of an optimizer after one step, in shapes alone."""
    parts = _parts(optimizer)
    if not parts:
        return _after_a_step(optimizer)
    besides = {name: value for name, value in optimizer.state_dict().items() if name not in parts}
    return {**besides, **{name: _after_a_step(part) for name, part in parts.items()}}


def _by_name(ready: ReadyStep, optimizer: Optimizer) -> dict[str, Any]:
    """The same with the parameters' names in the place of their numbers, as FSDP2's are saved."""
    names = {id(parameter): name for name, parameter in ready.model.named_parameters()}
    names_in_order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    found = _after_a_step(optimizer)
    return {
        "state": {names_in_order[number]: state for number, state in found["state"].items()},
        "param_groups": [
            {**group, "params": [names_in_order[number] for number in group["params"]]}
            for group in found["param_groups"]
        ],
    }


def _after_a_step(optimizer: Optimizer) -> dict[str, Any]:
    """The state_dict after one step of one optimizer on whole parameters, in shapes alone.

    ZeroRedundancyOptimizer has the states of all ranks in one checkpoint.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    steps = type(optimizer.optim if _divided_by_parameter(optimizer) else optimizer)  # type: ignore[attr-defined]
    in_shapes = FakeTensorMode(allow_non_fake_inputs=True)  # tables of codes are worked out while it is made
    with in_shapes:
        groups = [_in_shapes(group) for group in optimizer.param_groups]
    shapes = steps(groups)
    _work_out_tables(shapes)
    with in_shapes, models.quiet():  # whoever watches optimizers asks where these tensors are
        _make_states(shapes)
        found: dict[str, Any] = shapes.state_dict()
    return found


def _in_shapes(group: dict[str, Any]) -> dict[str, Any]:
    like = [(parameter.shape, parameter.dtype, parameter.device) for parameter in group["params"]]
    empty = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in like]
    parameters = [torch.nn.Parameter(tensor) for tensor in empty]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    return {**group, "params": parameters}


def _makes_states_itself(optimizer: Any) -> bool:
    """Whether it is one of bitsandbytes'."""
    return hasattr(optimizer, "init_state")


def _has_tables(optimizer: Any) -> bool:
    """Whether it is one of torchao's."""
    return hasattr(optimizer, "_new_buffer")


def _work_out_tables(optimizer: Any) -> None:
    """torchao's tables of codes, which it keeps, ask for values the first time."""
    if _has_tables(optimizer):
        for signed in (True, False):
            optimizer._new_buffer(torch.empty(1024 * optimizer.block_size), signed)


def _make_states(shapes: Any) -> None:
    """What the first step makes before it works: bitsandbytes says how by itself, others while they step."""
    from torch._subclasses.fake_tensor import DataDependentOutputException

    if _makes_states_itself(shapes):
        shapes.is_paged = False  # a checkpoint is ordinary memory
        for group_number, group in enumerate(shapes.param_groups):
            for number, parameter in enumerate(group["params"]):
                shapes.init_state(group, parameter, group_number, number)
        return
    with torch.compiler.set_stance("force_eager"), suppress(DataDependentOutputException):  # Adafactor's, afterwards
        shapes.step()


def _made_up(values: Any, place: torch.device, *, whole: bool = False) -> Any:
    """The same structure with memory of its own at a place, each tensor once; counts of steps stay on the host.

    A tensor that wraps others (codes and their scales) wraps made-up ones; with `whole` a divided one is plain.
    """
    made: dict[int, torch.Tensor] = {}

    def at_place(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in made:
            made[id(value)] = tensor_at_place(value)
        return made[id(value)]

    def tensor_at_place(value: Any) -> torch.Tensor:
        if is_traceable_wrapper_subclass(value) and not (whole and isinstance(value, DTensor)):
            names, said = value.__tensor_flatten__()
            inner = {name: tensor_at_place(getattr(value, name)) for name in names}
            wrapped: torch.Tensor = type(value).__tensor_unflatten__(inner, said, value.size(), value.stride())
            return wrapped
        if value.device.type == "cpu" and value.ndim == 0:
            return torch.ones(value.shape, dtype=value.dtype)
        return torch.empty(value.shape, dtype=value.dtype, device=place)

    return tree_map(at_place, values)
