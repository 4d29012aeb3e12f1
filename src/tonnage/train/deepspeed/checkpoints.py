"""Checkpoints of DeepSpeed's engine, in the folders of `train/checkpoints.py`: whole or not at all.

A folder holds what `save_checkpoint` writes, under the tag `states`, with DeepSpeed's scripts that make one file of
its parts, and the random states of each rank.  As many ranks read it again.
"""

from __future__ import annotations

import copyreg
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from tonnage.errors import UnreadableFile, UsageError
from tonnage.step import random_states
from tonnage.train import checkpoints
from tonnage.units import pluralise

if TYPE_CHECKING:
    from tonnage.step.step import ReadyStep

TAG: Final = "states"
"""Folder of DeepSpeed's files."""

_KNOWN: Final = (
    *("deepspeed.runtime.fp16.loss_scaler.LossScaler", "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    *("deepspeed.runtime.zero.config.ZeroStageEnum", "deepspeed.utils.tensor_fragment.fragment_address"),
    "deepspeed.runtime.fp16.loss_scaler.LossScaleConfig",
)
"""Classes in DeepSpeed's files beside those that torch takes to be safe; any other is refused unread."""


def save(ready: ReadyStep, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
    """Write a checkpoint into a new folder, whole or not at all.  All ranks must call it with the same folder."""

    from deepspeed.runtime.zero.config import ZeroStageEnum

    copyreg.pickle(ZeroStageEnum, lambda stage: (ZeroStageEnum, (stage.value,)))  # Python 3.11.2 would call getattr

    def write(partial: Path) -> set[str]:
        engine: Any = ready.model
        if not engine.save_checkpoint(str(partial), tag=TAG):
            raise OSError("DeepSpeed did not save")
        torch.save(random_states.take(ready.step.world.device), partial / _random_file(checkpoints.own_rank()))
        return {_random_file(rank) for rank in range(checkpoints.count_ranks())}

    checkpoints.save_whole(ready, folder, extra, write, groups={})


def resume(ready: ReadyStep, folder: Path) -> dict[str, Any]:
    """Load a checkpoint into the engine, and return its `extra`.  All ranks must call it.

    Raises UsageError if it was saved under another plan or by other ranks, and UnreadableFile if it is not whole.
    """
    with checkpoints.together(ready, UnreadableFile, f"{folder} cannot be read"):
        manifest = checkpoints.read_manifest(folder)
        checkpoints.check_same(ready, manifest, may_differ=("micro_batch", "grad_accum"))
        ranks = checkpoints.count_ranks()
        if manifest["ranks"] != ranks:
            raise UsageError(
                f"{folder} was saved by {pluralise(manifest['ranks'], 'rank')}, and here are {ranks}: DeepSpeed "
                "resumes on as many; to go on with other ranks, start anew from saved weights."
            )
        checkpoints.check_whole(folder, manifest, part=checkpoints.own_rank(), parts=ranks)
        for file in sorted((folder / TAG).glob("*.pt")):
            _check_harmless(file)
    with checkpoints.together(ready, UnreadableFile, f"{folder} cannot be read"):
        engine: Any = ready.model
        found, _ = engine.load_checkpoint(str(folder), tag=TAG)
        if found is None:
            raise UnreadableFile(f"{folder / TAG} is no checkpoint of DeepSpeed; resume another checkpoint.")
        saved = torch.load(folder / _random_file(checkpoints.own_rank()), weights_only=True)
        random_states.put(ready.step.world.device, saved)
    extra: dict[str, Any] = manifest["extra"]
    return extra


def _random_file(rank: int) -> str:
    return f"random.{rank}.pt"


def _check_harmless(file: Path) -> None:
    """Raise UnreadableFile for a pickle that names what DeepSpeed's files do not: reading it would execute code."""
    others = set(torch.serialization.get_unsafe_globals_in_checkpoint(file)) - set(_KNOWN)
    if others:
        raise UnreadableFile(f"{file} names {min(others)}, which was not executed; resume another checkpoint.")
