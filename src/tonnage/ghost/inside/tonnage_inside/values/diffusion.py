"""diffusers' `from_pretrained` without weights, with shapes from the configuration."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .pretrained import small_checkpoint

if TYPE_CHECKING:
    from .policy import Policy

_LOCATING_OPTIONS = (
    *("cache_dir", "force_download", "proxies", "local_files_only", "token", "revision", "subfolder"),
)
_LOADING_OPTIONS = {
    *_LOCATING_OPTIONS,
    *("ignore_mismatched_sizes", "output_loading_info", "torch_dtype", "dtype", "max_memory", "offload_folder"),
    *("offload_state_dict", "low_cpu_mem_usage", "variant", "use_safetensors", "disable_mmap", "use_flashpack"),
    *("flashpack_kwargs",),
}
"""Options of `from_pretrained` that networks do not take."""

_PLACING_OPTIONS = ("device_map", "quantization_config", "parallel_config")
"""Options that need the loader's own code, and with it the files."""


def patch(policy: Policy, module: ModuleType) -> None:
    """Take shapes from the configuration instead of weights from files, unless these are local and small."""
    base = module.ModelMixin
    original = base.from_pretrained.__func__

    def from_pretrained(cls: Any, /, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        name = pretrained_model_name_or_path
        placed = any(kwargs.get(option) is not None for option in _PLACING_OPTIONS)
        folder = os.path.join(name, kwargs.get("subfolder") or "") if os.path.isdir(str(name)) else name
        if placed or kwargs.get("output_loading_info") or small_checkpoint(folder):
            return original(cls, name, **kwargs)
        policy.use("weights")
        locating = {key: kwargs[key] for key in _LOCATING_OPTIONS if key in kwargs}
        own = {key: value for key, value in kwargs.items() if key not in _LOADING_OPTIONS}
        config, rest = cls.load_config(name, return_unused_kwargs=True, **locating, **own)
        dtype = kwargs.get("dtype") or kwargs.get("torch_dtype")
        with _as_default(policy.torch, dtype):
            network = cls.from_config(config, **rest)
        network.register_to_config(_name_or_path=str(name))
        return network.eval()

    base.from_pretrained = classmethod(from_pretrained)


@contextlib.contextmanager
def _as_default(torch: Any, dtype: Any) -> Iterator[None]:
    """Create parameters in this dtype; None or another type changes nothing."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype if isinstance(dtype, torch.dtype) else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
