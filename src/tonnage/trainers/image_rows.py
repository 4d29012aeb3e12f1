"""The tensors of an image-text network's row, from the network's own code in a process of its own.

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
class ImageRow:
    """A row of one sequence and its images."""

    image_token: int | None
    """The token that stands for a part of an image; None where images take no tokens."""
    image_size: tuple[int, int] | None
    """Width and height of the images; None where the network has a size of its own."""
    layers: tuple[str, ...]
    """Classes of layers that FSDP is told to divide; empty where it knows them by itself."""
    row: Mapping[str, Any]
    """made_up.json, as `scripts/images.py` reads it."""


def describe_row(job: Job) -> ImageRow:
    """Return what a row of the job holds.

    Raises UsageError for networks that do not continue a sequence of words and images, and for images that do not
    fit into a row.
    """
    fields = {name: getattr(job, name) for name in ("seq_len", "images", "image_size")}
    return _ask(json.dumps({"name": job.model.name, "config": job.model.config, "job": fields}))


@cache
def _ask(question: str) -> ImageRow:
    child = subprocess.run(
        [sys.executable, "-P", "-m", "tonnage.trainers.image_rows"],  # files of this folder must not hide a library
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error"},
        input=question,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    lines = (child.stderr if child.returncode else child.stdout).strip().splitlines() or ["it said nothing"]
    if child.returncode == UsageError.exit_code:
        raise UsageError(lines[-1])
    if child.returncode == CannotEstimate.exit_code:
        raise CannotEstimate(lines[-1])
    if child.returncode:
        raise CannotEstimate(f"The network was asked for the tensors of a row, and failed: {lines[-1][:300]}")
    fields = json.loads(lines[-1])
    size, layers = fields.pop("image_size"), fields.pop("layers")
    return ImageRow(**fields, image_size=None if size is None else (size[0], size[1]), layers=tuple(layers))


def _row_fields(name: str, config: dict[str, Any], job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ImageRow, from the network itself."""
    import torch

    from tonnage.job import IGNORED_LABEL, Job
    from tonnage.model import ModelRef
    from tonnage.step import heads, model
    from tonnage.step.inputs import images, text
    from tonnage.trainers import common

    of_row = Job(model=ModelRef(name=name, kind="config", config=config), **job)
    network: Any = model.build(of_row.model, dtype=torch.float32, attention=None, device=torch.device("meta"))
    batch = model.batch(of_row, network, torch.float32)
    is_known = heads.of(network).task == "image-text-to-text" and heads.trained_part(config)[1] is None
    if not is_known or network.config.is_encoder_decoder or not {"input_ids", "labels"} <= set(batch):
        raise UsageError(
            f"The scripts train networks that read words and images and write on, and {name} is a "
            f"{type(network).__name__}."
        )
    is_image = batch.pop("labels")[0] == IGNORED_LABEL
    return {
        "image_token": images.token_of(network.config),
        "image_size": images.chosen_size(of_row, network),
        "layers": common.layers_to_wrap(network),
        "row": {"vocabulary": text.vocabulary(network.config), **_describe_tensors(batch, is_image)},
    }


def _describe_tensors(batch: Mapping[str, torch.Tensor], is_image: torch.Tensor) -> dict[str, Any]:
    """Return the tensors of a row beside its words: their shapes and, where these are not enough, their values."""
    described: dict[str, Any] = {
        "images": _runs(is_image.tolist()),
        "marks": [],
        "pixels": {},
        "ones": {},
        "values": {},
    }
    for name, tensor in batch.items():
        if name == "input_ids":
            continue
        if tensor.is_floating_point():
            described["pixels"][name] = list(tensor.shape)
        elif tensor.shape == (1, len(is_image)) and tensor[0].equal(is_image.long()):
            described["marks"].append(name)
        elif tensor.dtype == is_image.long().dtype and bool((tensor == 1).all()):
            described["ones"][name] = list(tensor.shape)
        else:
            described["values"][name] = tensor.tolist()
    return described


def _runs(mask: list[bool]) -> list[tuple[int, int]]:
    """Return the beginning and the end of each stretch that is true."""
    edges = [index for index, (before, here) in enumerate(pairwise([False, *mask, False])) if before != here]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _main() -> None:
    try:
        print(json.dumps(_row_fields(**json.load(sys.stdin))))
    except TonnageError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    _main()
