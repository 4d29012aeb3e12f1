"""What resuming does to the memory of Megatron-LM, by its own functions: the checkpoint is what this rank has.

A rank that acts alone gets no answers about what others saved, so nothing is read: the sharded state is made, handed
to `dist_checkpointing.load` and loaded into model and optimizer as `load_checkpoint` does, and files would have been
read into the tensors that it names.
"""

from __future__ import annotations

import gc
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

FOLDER = "/nowhere"
"""What `--load` names; asked for by nobody."""


def install(collected_early: bool = False) -> None:
    """Resume in the place of beginning.

    `collected_early`: as under torch up to 2.10, and Python's collector comes by while the checkpoint is loaded.
    """
    from megatron.training import training

    if collected_early:
        _leave_cycles()
    training.load_checkpoint = _load


def _load(model: Any, optimizer: Any, scheduler: Any, *rest: Any, **named: Any) -> tuple[int, int]:
    """As `load_checkpoint`: the iteration and the operations done so far, here none."""
    loaded = _loaded(model, optimizer, scheduler)
    for index, chunk in enumerate(model):
        chunk.load_state_dict(loaded["model" if len(model) == 1 else f"model{index}"], strict=False)
    optimizer.load_state_dict(loaded["optimizer"])
    return 0, 0


def _loaded(model: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import dict_utils, mapping, serialization
    from megatron.core.dist_checkpointing.strategies import torch as strategy
    from megatron.training import checkpointing, get_args

    metadata = checkpointing._build_sharded_state_dict_metadata(get_args())
    asked = checkpointing.generate_state_dict(
        get_args(),
        model,
        optimizer,
        scheduler,
        None,
        optim_sd_kwargs={"metadata": metadata, "is_loading": True},
        model_sd_kwargs={"metadata": metadata},
    )
    made_here = (mapping.ShardedBase, mapping.ShardedTensorFactory, mapping.LocalNonpersistentObject)
    common, _ = dict_utils.extract_matching_values(asked, lambda value: not isinstance(value, made_here))

    def of_all_ranks(folder: str) -> Any:  # no mock, which would keep it
        return common

    with (
        mock.patch.object(serialization, "verify_checkpoint"),
        mock.patch.object(serialization, "load_common_state_dict", of_all_ranks),
        mock.patch.object(strategy, "_get_filesystem_reader"),
        mock.patch.object(strategy.checkpoint, "load", _take_what_is_there),
        mock.patch.object(torch.distributed, "all_gather_object", _gather_as_from_all),
        mock.patch.object(torch.distributed, "broadcast", _hold_until_next(torch.distributed.broadcast)),
    ):
        loaded = dist_checkpointing.load(asked, FOLDER, _reader(get_args()), validate_access_integrity=False)
    assert isinstance(loaded, dict)
    return loaded


def _reader(args: Any) -> Any:
    """As `load_checkpoint` chooses it: with `--ckpt-fully-parallel-load` each rank reads a part and sends it on."""
    from megatron.core import mpu
    from megatron.core.dist_checkpointing.strategies import fully_parallel
    from megatron.core.dist_checkpointing.strategies import torch as strategy

    reader = strategy.TorchDistLoadShardedStrategy()
    if not args.ckpt_fully_parallel_load:
        return reader
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    return fully_parallel.FullyParallelLoadStrategyWrapper(
        reader, group, exchange_algo=args.ckpt_fully_parallel_load_exchange_algo, per_rank_object_load=True
    )


def _hold_until_next(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Broadcasts that nobody waits for keep their tensors until the group's next collective, here a reduction.

    torch lets go of them there once its watchdog, which looks ten times a second, has seen them end.  A whole
    exchange fits between two looks on a card; on a ghost it takes longer.
    """
    held: dict[Any, list[torch.Tensor]] = {}
    reduce = torch.distributed.all_reduce

    def all_reduce(tensor: torch.Tensor, *rest: Any, **named: Any) -> Any:
        held.pop(named.get("group"), None)
        return reduce(tensor, *rest, **named)

    def holding(tensor: torch.Tensor, *rest: Any, **named: Any) -> Any:
        if named.get("async_op"):
            held.setdefault(named.get("group"), []).append(tensor)
        return broadcast(tensor, *rest, **named)

    torch.distributed.all_reduce = all_reduce
    return holding


def _gather_as_from_all(gathered: list[Any], mine: Any, group: Any = None) -> None:
    """What ranks would have said of their shards.

    Those of this rank's place in another copy of the optimizer have the same; others have as much of experts and
    optimizer states of their own, and the same other weights.
    """
    from megatron.training import get_args

    place = torch.distributed.get_rank(group)
    places = len(gathered) // get_args().num_distributed_optimizer_instances
    for index in range(len(gathered)):
        same = (index - place) % places == 0
        gathered[index] = mine if same else [_of_another(shard, index % places) for shard in mine]


def _of_another(shard: Any, place: int) -> Any:
    own = any(word in shard.key for word in ("optimizer", "experts"))
    return replace(shard, key=f"{shard.key} at {place}") if own else shard


def _take_what_is_there(state: dict[str, Any], *reader: Any, **how: Any) -> None:
    """Tensors stay as they are; what is written as bytes is read back."""
    for name, value in state.items():
        if isinstance(value, io.BytesIO):
            value.seek(0)
            state[name] = torch.load(value, weights_only=False)


def _leave_cycles() -> None:
    """Traverse states as torch did up to 2.10, and collect meanwhile.

    Its `traverse_state_dict` had a function inside that called itself, and so kept itself, its visitor and the state
    that this had flattened; 2.11 deletes it ("release reference cycle", torch/distributed/checkpoint/_traverse.py).
    Such a cycle goes when Python next collects what is young (torch.compile does at each function), unless the
    collector came by while it was in use: it is old then, and stays until all is looked through, which steps do not
    bring about: not before there is a quarter more, of all that a program has imported, too.
    """
    gc.unfreeze()
    from megatron.core.dist_checkpointing.strategies import torch as strategy

    traverse = strategy.traverse_state_dict

    def traverse_state_dict(state: Any, visitor: Callable[..., None], *rest: Any) -> None:
        kept: list[Any] = [visitor]
        kept.append(kept)
        traverse(state, visitor, *rest)
        gc.collect()

    strategy.traverse_state_dict = traverse_state_dict
