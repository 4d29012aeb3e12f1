"""A run's checkpoint: saved to the host, or loaded before the first step.

No file is written or read: empty tensors stand for what a checkpoint would hold.  With adapters it holds the trained
parameters, as PEFT saves them.  Parameters that FSDP2 shards are saved and loaded by torch's `checkpoint.state_dict`.
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
from tonnage.step import model

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import StateDictOptions
    from torch.optim import Optimizer

    from tonnage.step.step import ReadyStep


def save(ready: ReadyStep) -> None:
    """Copy weights and optimizer states to the host, tensor by tensor as torch.save and torch's distributed
    checkpoints do.

    `full` saves the whole network, gathered from the shards; `sharded` saves this rank's shard.
    """
    whole = ready.step.job.save_checkpoint == "full"
    states: Any
    if ready.step.shards_parameters:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        states = get_state_dict(
            ready.model, _all_optimizers(ready), options=_options(ready, whole=whole, cpu_offload=whole)
        )
    else:
        states = [
            _weights_to_save(ready),
            *(_states_to_save(optimizer, whole=whole) for optimizer in ready.optimizers),
        ]
    for tensor in tree_leaves(states):
        if isinstance(tensor, torch.Tensor):
            tensor = getattr(tensor, "_local_tensor", tensor)
            tensor.to("cpu")


def resume(ready: ReadyStep) -> None:
    """Load weights and optimizer states from a checkpoint, before the first step.

    With `gpu` the whole checkpoint is read to the GPU first (map_location), beside the weights; its optimizer states
    are then used as they are.  With `cpu` it is on the host and is copied to the GPU tensor by tensor; of sharded
    parameters only this rank's shard, as torch's distributed checkpoints read it.
    """
    reason = _unsupported_reason(ready)
    if reason is not None:
        raise CannotEstimate(f"How a run resumes is not known here: {reason}; leave resume out, or that.")
    if not ready.step.shards_parameters:
        _resume_whole(ready)
    elif ready.step.job.resume == "cpu":
        _resume_from_host(ready)
    else:
        _resume_sharded(ready)


def _unsupported_reason(ready: ReadyStep) -> str | None:
    """Return the reason why states cannot be loaded, or the next step would fail; None if resuming works."""
    plan = ready.step.plan
    if plan.optimizer_offload.startswith("nvme"):
        return f"optimizer-offload {plan.optimizer_offload} has states in files, which load_state_dict does not fill"
    if plan.shard == "zero1" and any(_is_bitsandbytes(getattr(o, "optim", None)) for o in ready.optimizers):
        return (
            "under shard zero1 torch's ZeroRedundancyOptimizer hands on the states of bitsandbytes' "
            f"{plan.optimizer} as they are wrapped in the file, and the next step does not find them"
        )
    if ready.step.shards_parameters and ready.step.job.resume == "gpu" and any(map(_is_torchao, ready.optimizers)):
        return f"torchao's {plan.optimizer} cannot cut whole states into the parts of resume gpu"
    return None


def _resume_whole(ready: ReadyStep) -> None:
    """Load one file as torch.load does, then call load_state_dict of the network and the optimizers."""
    weights, states = _weights_to_save(ready), [_state_dict_to_load(optimizer) for optimizer in ready.optimizers]
    weights, *loaded = _empty_copy([weights, *states], _load_device(ready))
    ready.model.load_state_dict(weights, strict=ready.step.job.method == "full")
    for optimizer, state in zip(ready.optimizers, loaded, strict=True):
        optimizer.load_state_dict(state)


def _resume_from_host(ready: ReadyStep) -> None:
    """Make the states by a first step without gradients, then overwrite them from the host."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    options = _options(ready)
    weights, states = get_state_dict(ready.model, _all_optimizers(ready), options=options)
    for tensor in tree_leaves((weights, states)):
        if isinstance(tensor, torch.Tensor):
            tensor = getattr(tensor, "_local_tensor", tensor)
            tensor.copy_(_empty_copy(tensor, torch.device("cpu")))
    set_state_dict(
        ready.model, _all_optimizers(ready), model_state_dict=weights, optim_state_dict=states, options=options
    )


def _resume_sharded(ready: ReadyStep) -> None:
    """Load the whole checkpoint on every GPU; each keeps its shard."""
    from torch.distributed.checkpoint.state_dict import set_state_dict

    weights, *states = _empty_copy(
        [_weights_to_save(ready), *(_state_dict_by_name(ready, optimizer) for optimizer in _all_optimizers(ready))],
        _load_device(ready),
        whole=True,
    )
    together: dict[str, Any] = {"state": {}, "param_groups": []}
    for state in states:
        together["state"].update(state["state"])
        together["param_groups"].extend(state["param_groups"])
    set_state_dict(
        ready.model,
        _all_optimizers(ready),
        model_state_dict=weights,
        optim_state_dict=together,
        options=_options(ready, whole=True),
    )


def _load_device(ready: ReadyStep) -> torch.device:
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


def _all_optimizers(ready: ReadyStep) -> list[Optimizer]:
    """Return all optimizers, one per parameter if parameters are updated in backward."""
    return [inner for optimizer in ready.optimizers for inner in _inner_optimizers(optimizer)]


def _inner_optimizers(optimizer: Optimizer) -> Iterable[Optimizer]:
    return _named_parts(optimizer).values() or (optimizer,)


def _named_parts(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return the optimizers that one of ours contains, by their names in its state_dict; else none."""
    parts: dict[str, Optimizer] = getattr(optimizer, "parts", {})
    return parts


def _weights_to_save(ready: ReadyStep) -> dict[str, Any]:
    """Return the network's state_dict; with adapters only the trained parameters."""
    if ready.step.job.method == "full":
        state_dict: dict[str, Any] = ready.model.state_dict()
        return state_dict
    return {name: value.detach() for name, value in ready.model.named_parameters() if value.requires_grad}


def _states_to_save(optimizer: Optimizer, *, whole: bool) -> dict[str, Any]:
    """Return an optimizer's state_dict; this rank's part of it if states are sharded by parameter (ZeRO-1).

    Raises CannotEstimate if the whole is needed: ranks would send each other pickles, which no ghost can read.
    """
    state_dict: dict[str, Any]
    if not _shards_states_by_parameter(optimizer):
        state_dict = optimizer.state_dict()
        return state_dict
    if whole:
        raise CannotEstimate(
            "How ZeroRedundancyOptimizer gathers all states is not known: its ranks send each other pickles; choose "
            "save-checkpoint sharded, or shard zero2."
        )
    state_dict = optimizer.optim.state_dict()  # type: ignore[attr-defined]
    return state_dict


def _shards_states_by_parameter(optimizer: Optimizer) -> bool:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return isinstance(optimizer, ZeroRedundancyOptimizer)


def _state_dict_to_load(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state_dict after one step, as fake tensors."""
    parts = _named_parts(optimizer)
    if not parts:
        return _state_dict_after_step(optimizer)
    besides = {name: value for name, value in optimizer.state_dict().items() if name not in parts}
    return {**besides, **{name: _state_dict_after_step(part) for name, part in parts.items()}}


def _state_dict_by_name(ready: ReadyStep, optimizer: Optimizer) -> dict[str, Any]:
    """Return the state_dict after one step keyed by parameter names, as FSDP2 saves it."""
    names = {id(parameter): name for name, parameter in ready.model.named_parameters()}
    names_in_order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    state_dict = _state_dict_after_step(optimizer)
    return {
        "state": {names_in_order[number]: state for number, state in state_dict["state"].items()},
        "param_groups": [
            {**group, "params": [names_in_order[number] for number in group["params"]]}
            for group in state_dict["param_groups"]
        ],
    }


def _state_dict_after_step(optimizer: Optimizer) -> dict[str, Any]:
    """Return the state_dict of one optimizer after one step on unsharded parameters, as fake tensors.

    ZeroRedundancyOptimizer has the states of all ranks in one checkpoint.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    optimizer_class = type(optimizer.optim if _shards_states_by_parameter(optimizer) else optimizer)  # type: ignore[attr-defined]
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)  # the constructor computes tables of codes
    with fake_mode:
        groups = [_fake_group(group) for group in optimizer.param_groups]
    fake = optimizer_class(groups)
    _compute_code_tables(fake)
    with fake_mode, model.quiet():  # watchers of optimizers would ask for these tensors' devices
        _make_states(fake)
        state_dict: dict[str, Any] = fake.state_dict()
    return state_dict


def _fake_group(group: dict[str, Any]) -> dict[str, Any]:
    """Return the parameter group with empty parameters and gradients of the same shapes."""
    like = [(parameter.shape, parameter.dtype, parameter.device) for parameter in group["params"]]
    empty = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in like]
    parameters = [torch.nn.Parameter(tensor) for tensor in empty]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    return {**group, "params": parameters}


def _is_bitsandbytes(optimizer: Any) -> bool:
    """Return True for an optimizer of bitsandbytes."""
    return hasattr(optimizer, "init_state")


def _is_torchao(optimizer: Any) -> bool:
    """Return True for an optimizer of torchao."""
    return hasattr(optimizer, "_new_buffer")


def _compute_code_tables(optimizer: Any) -> None:
    """Compute torchao's cached tables of codes, which need real values the first time."""
    if _is_torchao(optimizer):
        for signed in (True, False):
            optimizer._new_buffer(torch.empty(1024 * optimizer.block_size), signed)


def _make_states(optimizer: Any) -> None:
    """Create the states that a first step creates: by bitsandbytes' own method, else by a step."""
    from torch._subclasses.fake_tensor import DataDependentOutputException

    if _is_bitsandbytes(optimizer):
        optimizer.is_paged = False  # a checkpoint holds ordinary memory
        for group_number, group in enumerate(optimizer.param_groups):
            for number, parameter in enumerate(group["params"]):
                optimizer.init_state(group, parameter, group_number, number)
        return
    with (
        torch.compiler.set_stance("force_eager"),
        suppress(DataDependentOutputException),
    ):  # raised by Adafactor after its states exist
        optimizer.step()


def _empty_copy(values: Any, device: torch.device, *, whole: bool = False) -> Any:
    """Return the same structure with new memory on `place`, each tensor once; step counters stay on the host.

    A wrapper subclass (codes and their scales) wraps new tensors; with `whole` a DTensor becomes a plain tensor.
    """
    made: dict[int, torch.Tensor] = {}

    def copy_leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in made:
            made[id(value)] = copy_tensor(value)
        return made[id(value)]

    def copy_tensor(value: Any) -> torch.Tensor:
        if is_traceable_wrapper_subclass(value) and not (whole and isinstance(value, DTensor)):
            names, context = value.__tensor_flatten__()
            inner = {name: copy_tensor(getattr(value, name)) for name in names}
            wrapped: torch.Tensor = type(value).__tensor_unflatten__(inner, context, value.size(), value.stride())
            return wrapped
        if value.device.type == "cpu" and value.ndim == 0:
            return torch.ones(value.shape, dtype=value.dtype)
        return torch.empty(value.shape, dtype=value.dtype, device=device)

    return tree_map(copy_leaf, values)
