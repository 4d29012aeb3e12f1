"""Pretrained weights that timm and torchvision would download: shapes are there without them."""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

if TYPE_CHECKING:
    from .policy import Policy


class _NotRead(dict[str, Any]):
    """The weights of a file that was not read; a module takes them as if they were its own."""


def patch_timm(policy: Policy, module: ModuleType) -> None:
    """Patch `timm.models._builder`, which has made the network with the wanted classes and channels by then."""
    original = module.load_pretrained  # type: ignore[attr-defined]

    @functools.wraps(original)
    def load_pretrained(model: Any, pretrained_cfg: Any = None, *args: Any, **kwargs: Any) -> None:
        given = pretrained_cfg if pretrained_cfg is not None else getattr(model, "pretrained_cfg", None)
        if getattr(given, "file", None) or (isinstance(given, dict) and given.get("file")):
            original(model, pretrained_cfg, *args, **kwargs)
            return
        policy.use("weights")

    module.load_pretrained = load_pretrained  # type: ignore[attr-defined]


def patch_hub(policy: Policy, module: ModuleType) -> None:
    """Patch `torch.hub`, by which torchvision and others download weights; a file that is there is read."""
    torch = policy.torch
    original, load = module.load_state_dict_from_url, torch.nn.Module.load_state_dict  # type: ignore[attr-defined]

    @functools.wraps(original)
    def load_state_dict_from_url(url: str, model_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        folder = model_dir or os.path.join(torch.hub.get_dir(), "checkpoints")
        name = kwargs.get("file_name") or os.path.basename(urlparse(url).path)
        if os.path.exists(os.path.join(folder, name)):
            return original(url, model_dir, *args, **kwargs)
        policy.use("weights")
        return _NotRead()

    @functools.wraps(load)
    def load_state_dict(network: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(state_dict, _NotRead):
            return torch.nn.modules.module._IncompatibleKeys([], [])
        return load(network, state_dict, *args, **kwargs)

    module.load_state_dict_from_url = load_state_dict_from_url  # type: ignore[attr-defined]
    torch.nn.Module.load_state_dict = load_state_dict
