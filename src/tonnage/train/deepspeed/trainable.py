"""A network in DeepSpeed's engine, ready to train on the user's batches."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tonnage.train import checks
from tonnage.train.deepspeed import checkpoints, effects
from tonnage.train.trainable import Trainable

if TYPE_CHECKING:
    from tonnage.cluster import Cluster
    from tonnage.step.given import GivenNetwork
    from tonnage.train.restoring import Snapshot
    from tonnage.trainers.deepspeed.step import EngineStep


class EngineTrainable(Trainable):
    """A user's network under a plan of the engine deepspeed; `model` is DeepSpeed's engine.

    It computes norms of gradients as it updates, so that `step` asks `accepts` with the loss alone and `clip` does
    nothing.
    """

    _checkpoints: ClassVar[Any] = checkpoints
    _effects: ClassVar[Any] = effects

    def __init__(
        self,
        ready: EngineStep,
        given: GivenNetwork,
        snapshot: Snapshot,
        cluster: Cluster,
        *,
        resources: ExitStack,
        before: Mapping[torch.nn.Parameter, set[str]],
    ) -> None:
        super().__init__(ready, given, snapshot, cluster)
        self._resources = resources
        """The folder of tensors in files and the process's variables, which end with the plan."""
        self._before = before
        """Names of the attributes that each parameter had before the plan."""

    def unapply(self) -> torch.nn.Module:
        """Return the user's network as it was before the plan, with the trained weights, on its own device.

        They are the optimizer's main weights in fp32.  Adapters that the plan added are removed: save them first.
        All ranks must call it.
        """
        ready = self.ready
        engine: Any = ready.model
        buffers = [(tensor, module._buffers[name]) for (module, name), tensor in self._given.buffers]
        once = {id(parameter): parameter for _, parameter in self._given.parameters}
        values = [(parameter, _whole(parameter, main=True)) for parameter in once.values()]
        engine.destroy()
        self._snapshot.restore()
        checks.UNDER_A_PLAN.discard(self._given.network)
        for parameter, names in self._before.items():
            for name in set(vars(parameter)) - names:
                delattr(parameter, name)
        self._given.give_back([*values, *buffers])
        self._ready = None
        self._resources.close()
        del ready, engine
        gc.collect()
        return self._given.network

    def _whole_state(self, network: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a network's state_dict with whole tensors in the compute dtype; all ranks must go through it."""
        made: dict[int, torch.Tensor] = {}
        for name, tensor in network.state_dict(keep_vars=True).items():
            if id(tensor) not in made:
                made[id(tensor)] = _whole(tensor, main=False)
            yield name, made[id(tensor)]

    def _overflow_mark(self) -> float:
        return -float(self.ready.model.skipped_steps)


def _whole(tensor: torch.Tensor, *, main: bool) -> torch.Tensor:
    """Return a copy on the host of a parameter that ranks may have divided; `main`: of its main weights, if any."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    whole = safe_get_full_fp32_param(tensor) if main and tensor.requires_grad else None
    if whole is not None:
        return whole.detach().to("cpu", copy=True).view(getattr(tensor, "ds_shape", tensor.shape))
    with deepspeed.zero.GatheredParameters([tensor], enabled=hasattr(tensor, "ds_id")):
        return tensor.detach().to("cpu", copy=True)
