"""Hooks between a batch of plain tensors and a forward with a loss, for tasks that need more than a call.

They are registered on the network itself, so that they run under any wrapper, checkpointing or trainer.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from tonnage.step.remarks import remark

_Call = tuple[tuple[Any, ...], dict[str, Any]]


def prepare(network: nn.Module, task: str) -> None:
    """Install the hooks that `task` needs; most tasks need none."""
    wanted = inspect.signature(network.forward).parameters
    if "return_loss" in wanted:
        network.register_forward_pre_hook(_ask_for_loss, with_kwargs=True)
    if task == "object-detection":
        network.register_forward_pre_hook(_list_boxes, with_kwargs=True)
    if task == "universal-segmentation":
        network.register_forward_pre_hook(_list_masks, with_kwargs=True)
    if task == "features":
        network.register_forward_hook(_add_mean_as_loss)
        remark(network, "the network has no loss of its own: the mean of its output replaces it")


def _ask_for_loss(network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
    return args, {"return_loss": True, **kwargs}


def _list_boxes(network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
    """Turn `class_labels` (rows, objects) and `boxes` (rows, objects, 4) into the list of dicts that DETR's
    family takes.
    """
    rest = dict(kwargs)
    kinds, boxes = rest.pop("class_labels", None), rest.pop("boxes", None)
    if kinds is not None and boxes is not None:
        rest["labels"] = [{"class_labels": kind, "boxes": box} for kind, box in zip(kinds, boxes, strict=True)]
    return args, rest


def _list_masks(network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
    """Turn `mask_labels` (rows, objects, height, width) and `class_labels` (rows, objects) into lists of rows."""
    rows: dict[str, Any] = {name: list(kwargs[name]) for name in ("mask_labels", "class_labels") if name in kwargs}
    return args, {**kwargs, **rows}


def _add_mean_as_loss(network: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    tensors = output.to_tuple() if hasattr(output, "to_tuple") else output
    tensors = tensors if isinstance(tensors, tuple | list) else (tensors,)
    learned = next(tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.requires_grad)
    return (learned.mean(), output)
