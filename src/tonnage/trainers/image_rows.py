"""What a row of an image-text network holds, asked of the network's own code in a process of its own.

A plan has a configuration and no processor.  Our scripts make rows in these shapes to be tried without data.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from tonnage.errors import CannotEstimate, TonnageError, UsageError

if TYPE_CHECKING:
    import torch

    from tonnage.job import Job

AUTO_CLASS: Final = "AutoModelForImageTextToText"
"""transformers' class that loads such networks."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A row of one sequence and its images."""

    image_token: int | None
    """The token that stands for a part of an image; None where images take no tokens."""
    image_size: tuple[int, int] | None
    """Width and height of the images; None where the network has a size of its own."""
    layers: tuple[str, ...]
    """Classes of layers that FSDP is told to divide; empty where it knows them by itself."""
    row: Mapping[str, Any]
    """made_up.json, as `scripts/images.py` reads it."""


def asked(job: Job) -> Seen:
    """What a row of the job holds.

    Raises UsageError for networks that do not write on where words and images end, and for images that do not fit
    into a row.
    """
    said = {name: getattr(job, name) for name in ("seq_len", "images", "image_size")}
    return _answer(json.dumps({"name": job.model.name, "config": job.model.config, "job": said}))


@cache
def _answer(question: str) -> Seen:
    child = subprocess.run(
        [sys.executable, "-P", "-m", "tonnage.trainers.image_rows"],  # files of this folder stand in for no library
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error"},
        input=question,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    said = (child.stderr if child.returncode else child.stdout).strip().splitlines() or ["it said nothing"]
    if child.returncode == UsageError.exit_code:
        raise UsageError(said[-1])
    if child.returncode == CannotEstimate.exit_code:
        raise CannotEstimate(said[-1])
    if child.returncode:
        raise CannotEstimate(f"The network was asked what a row holds, and failed: {said[-1][:300]}")
    found = json.loads(said[-1])
    size, layers = found.pop("image_size"), found.pop("layers")
    return Seen(**found, image_size=None if size is None else (size[0], size[1]), layers=tuple(layers))


def _seen(name: str, config: dict[str, Any], job: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of Seen, by the network itself."""
    import torch

    from tonnage.job import IGNORED_LABEL, Job
    from tonnage.model import ModelRef
    from tonnage.step import heads, model
    from tonnage.step.inputs import images, text
    from tonnage.trainers import common as given

    one = Job(model=ModelRef(name=name, kind="config", config=config), **job)
    network: Any = model.build(one.model, dtype=torch.float32, attention=None, device=torch.device("meta"))
    batch = model.batch(one, network, torch.float32)
    known = heads.of(network).task == "image-text-to-text" and heads.trained_part(config)[1] is None
    if not known or network.config.is_encoder_decoder or not {"input_ids", "labels"} <= set(batch):
        raise UsageError(
            f"The scripts train networks that read words and images and write on, and {name} is a "
            f"{type(network).__name__}."
        )
    images_here = batch.pop("labels")[0] == IGNORED_LABEL
    return {
        "image_token": images.token_of(network.config),
        "image_size": images.chosen_size(one, network),
        "layers": given.divided(network),
        "row": {"vocabulary": text.vocabulary(network.config), **_described(batch, images_here)},
    }


def _described(batch: Mapping[str, torch.Tensor], images_here: torch.Tensor) -> dict[str, Any]:
    """The tensors of a row beside its words: by their shapes, and where these say too little by their values."""
    found: dict[str, Any] = {
        "images": _runs(images_here.tolist()),
        "marks": [],
        "pixels": {},
        "ones": {},
        "values": {},
    }
    for name, tensor in batch.items():
        if name == "input_ids":
            continue
        if tensor.is_floating_point():
            found["pixels"][name] = list(tensor.shape)
        elif tensor.shape == (1, len(images_here)) and tensor[0].equal(images_here.long()):
            found["marks"].append(name)
        elif tensor.dtype == images_here.long().dtype and bool((tensor == 1).all()):
            found["ones"][name] = list(tensor.shape)
        else:
            found["values"][name] = tensor.tolist()
    return found


def _runs(mask: list[bool]) -> list[tuple[int, int]]:
    """Beginning and end of each stretch that is true."""
    edges = [place for place, (before, here) in enumerate(pairwise([False, *mask, False])) if before != here]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _main() -> None:
    try:
        print(json.dumps(_seen(**json.load(sys.stdin))))
    except TonnageError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    _main()
