"""Checks of micro-batches, whose faults would else come up deep inside a network, on a GPU without a place.

    Reader.of(network).check([{"input_ids": ids, "labels": labels}])      # raises UsageError with the first fault

Values are looked at on the host alone: reading them from a GPU would wait for it and take memory there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tonnage.errors import TonnageError, UsageError
from tonnage.job import IGNORED_LABEL
from tonnage.step import model as models
from tonnage.step.configuration import text_config
from tonnage.step.model import Batch
from tonnage.train import checks, labels
from tonnage.units import pluralise

_IDS: Final = "input_ids"


@dataclass(frozen=True, kw_only=True)
class Reader:
    """The inputs that a network can read."""

    is_language_model: bool
    """True for transformers' own language models, whose inputs are known; of other networks little is checked."""
    vocabulary: int | None = None
    """Number of token ids; None if it is not known."""
    longest: int | None = None
    """Tokens for which there are learned positions; None without a limit."""

    @classmethod
    def of(cls, network: nn.Module) -> Reader:
        """Return what this network, which may have adapters, can read."""
        inner = models.hugging_face(network)
        if (
            inner is None
            or not _own_class(inner).__module__.startswith("transformers.")
            or network not in (inner, checks.adapted(network))
            or not labels.shifts_labels(network)
        ):
            return cls(is_language_model=False)
        size = getattr(text_config(inner.config), "vocab_size", None)
        try:
            longest = models.longest_text(inner)
        except TonnageError:
            longest = None
        return cls(is_language_model=True, vocabulary=size if isinstance(size, int) else None, longest=longest)

    def check(self, batches: Sequence[Batch]) -> None:
        """Raise UsageError for what cannot be the micro-batches of a step."""
        if not isinstance(batches, list | tuple) or not batches:
            raise UsageError("A step takes a list of micro-batches, each a dict of tensors, and at least one.")
        for index, batch in enumerate(batches):
            if not hasattr(batch, "items") or not batch:
                kind = "an empty one" if hasattr(batch, "items") else f"a {type(batch).__name__}"
                raise UsageError(f"A micro-batch is a dict of tensors, not {kind}.")
            for name, value in batch.items():
                if not hasattr(value, "to"):
                    raise UsageError(f"A micro-batch is a dict of tensors, and {name} is a {type(value).__name__}.")
                if getattr(value, "is_meta", False):
                    raise UsageError(f"A micro-batch has values, and {name} is on the meta device.")
            if self.is_language_model and (fault := next(self._faults(batch), None)):
                raise UsageError(f"Micro-batch {index + 1} of {len(batches)}: {fault}.")

    def _faults(self, batch: Batch) -> Iterator[str]:
        """Yield what is wrong with a micro-batch of a language model."""
        if not {"labels", "shift_labels"} & batch.keys():
            yield (
                f"it has {', '.join(batch)} and no labels, and the network computes no loss; give labels, a copy of "
                f"{_IDS} with {IGNORED_LABEL} where nothing is to be learned"
            )
        if "num_items_in_batch" in batch:
            yield "it has num_items_in_batch, and the step counts the labels of all its micro-batches; leave it out"
        ids = batch.get(_IDS)
        names: list[str] = [name for name in (_IDS, "labels", "shift_labels") if name in batch]
        for name in names:
            yield from self._value_faults(name, batch[name])
        if ids is None:
            return
        if ids.ndim != 2:
            yield f"{_IDS} has the shape {_shape(ids)}; it is rows x tokens"
        for name in (*names[1:], "attention_mask"):
            if name in batch and batch[name].ndim <= 2 and batch[name].shape != ids.shape:
                yield f"{name} has the shape {_shape(batch[name])} and {_IDS} {_shape(ids)}; they must be equal"
        if self.longest is not None and ids.shape[1] > self.longest:
            yield (
                f"its rows have {pluralise(ids.shape[1], 'token')}, and the network has learned positions for "
                f"{self.longest:,}; cut them"
            )

    def _value_faults(self, name: str, values: torch.Tensor) -> Iterator[str]:
        """Yield what is wrong with the token ids of one input."""
        if values.dtype not in (torch.long, torch.int):
            kind = str(values.dtype).removeprefix("torch.")
            yield f"{name} are {kind}, and token ids are whole numbers; make them with dtype=torch.long"
        if values.numel() == 0:
            yield f"{name} is empty (the shape {_shape(values)}); leave the micro-batch out"
        if self.vocabulary is None or values.device.type != "cpu":
            return
        used = values if name == _IDS else values[values != IGNORED_LABEL]
        if used.numel() == 0:
            return
        least, most = (int(bound) for bound in torch.aminmax(used))
        if least < 0 or most >= self.vocabulary:
            others = "" if name == _IDS else f", or {IGNORED_LABEL} for what is left out"
            yield (
                f"{name} has {least if least < 0 else most:,}, and the network's vocabulary is 0 to "
                f"{self.vocabulary - 1:,}{others}; use its own tokenizer, or resize_token_embeddings"
            )


def _own_class(network: nn.Module) -> type:
    """Return the class that a network had before FSDP2 put its own over it."""
    return next(kind for kind in type(network).__mro__ if not issubclass(kind, FSDPModule))


def _shape(tensor: torch.Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "of a single number"
