"""The unused card of a process that has just been forked, with its own settings, for one rank."""

import os
from collections.abc import Mapping

import torch
from tonnage_recorder import native, ranks
from tonnage_recorder.native import Native

from tonnage.errors import CannotEstimate


def take(settings: Mapping[str, str], *, rank: int, world_size: int) -> Native:
    """Configure and return the ghost of this process: the card by the GHOST_* settings, and one rank that acts alone.

    Raises CannotEstimate outside a ghost's environment.
    """
    ghost = native.load()
    if ghost is None:
        raise CannotEstimate("The worker runs outside a ghost environment.")
    for name, value in settings.items():
        ghost.set(name.removeprefix("GHOST_"), value)
        os.environ[name] = value
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    ranks.act_alone(torch.distributed, ghost)
    return ghost
