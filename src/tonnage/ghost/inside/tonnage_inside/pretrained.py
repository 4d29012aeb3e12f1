"""`from_pretrained` without weights: shapes from the configuration."""

from __future__ import annotations

import os
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .values import Policy

SMALL_WEIGHTS_BYTES = 1 << 30
"""A local checkpoint up to this size is really read."""

_LOCATING_OPTIONS = ("cache_dir", "force_download", "proxies", "local_files_only", "token", "revision", "subfolder")
_LOADING_OPTIONS = {
    *_LOCATING_OPTIONS,
    *("state_dict", "output_loading_info", "_from_pipeline", "_from_auto", "dtype", "torch_dtype", "device_map"),
    *("max_memory", "offload_folder", "offload_buffers", "variant", "adapter_kwargs", "adapter_name"),
    *("mirror", "from_tf", "from_flax"),
    *("generation_config", "use_safetensors", "weights_only", "low_cpu_mem_usage", "_commit_hash", "key_mapping"),
    *("ignore_mismatched_sizes", "offload_state_dict", "trust_remote_code", "_fast_init", "quantization_config"),
}


def _single_device(torch: Any, device_map: Any) -> Any:
    """Where a model with this device_map is built: the card, or the host when there is no map."""
    if device_map is None:
        return "cpu"
    if isinstance(device_map, dict):
        places = {str(place) for place in device_map.values()}
        device_map = places.pop() if len(places) == 1 else "auto"
    if device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        return f"cuda:{torch.cuda.current_device()}"
    return torch.device(int(device_map) if str(device_map).isdigit() else device_map)


def _small_checkpoint(name: Any) -> bool:
    """True for a local folder whose weights are few enough to be read."""
    if not isinstance(name, str | os.PathLike) or not os.path.isdir(name):
        return False
    sizes = [
        entry.stat().st_size
        for entry in os.scandir(str(name))
        if entry.name.endswith((".safetensors", ".bin", ".pt"))
    ]
    return 0 < sum(sizes) <= SMALL_WEIGHTS_BYTES


def patch(policy: Policy, module: ModuleType) -> None:
    """Shapes from the configuration instead of weights from files, unless these are local and small."""
    base = module.PreTrainedModel
    original = base.from_pretrained.__func__

    def from_pretrained(cls: Any, /, name: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        if args or kwargs.get("state_dict") is not None or _small_checkpoint(name):
            return original(cls, name, *args, config=config, **kwargs)
        policy.use("weights")
        if kwargs.get("quantization_config") is not None:
            return _quantized(policy, original, cls, name, config, kwargs)
        return _from_configuration(policy, cls, name, config, kwargs)

    base.from_pretrained = classmethod(from_pretrained)


def _quantized(policy: Policy, original: Any, cls: Any, name: Any, config: Any, kwargs: dict[str, Any]) -> Any:
    """transformers' loader quantizes layer by layer: hand it a checkpoint whose values nobody reads."""
    torch = policy.torch
    if not hasattr(config, "to_dict"):
        locating = {key: kwargs[key] for key in _LOCATING_OPTIONS if key in kwargs}
        config = cls.config_class.from_pretrained(config or name, **locating)
    dtype = kwargs.get("dtype", kwargs.get("torch_dtype"))
    with torch.device("meta"):
        network = cls._from_config(config, dtype=dtype if isinstance(dtype, torch.dtype) else torch.float16)
    network.tie_weights()
    saved = network.state_dict()
    tensors = [*network.named_parameters(), *network.named_buffers()]
    checkpoint = {key: torch.empty_like(t, device="cpu") for key, t in tensors if key in saved}
    options = {key: value for key, value in kwargs.items() if key not in _LOCATING_OPTIONS}
    loaded = original(cls, None, config=config, state_dict=checkpoint, **options)
    loaded.config.name_or_path = loaded.name_or_path = str(name)
    return loaded


def _from_configuration(policy: Policy, cls: Any, name: Any, config: Any, kwargs: dict[str, Any]) -> Any:
    torch = policy.torch
    options = {key: value for key, value in kwargs.items() if key not in _LOADING_OPTIONS}
    if not hasattr(config, "to_dict"):
        locating = {key: kwargs[key] for key in _LOCATING_OPTIONS if key in kwargs}
        config, options = cls.config_class.from_pretrained(
            config or name, return_unused_kwargs=True, **locating, **options
        )
    config.name_or_path = str(name)  # trainers look for tokenizers there
    dtype = kwargs.get("dtype", kwargs.get("torch_dtype")) or "auto"
    if dtype == "auto":
        dtype = getattr(config, "dtype", None) or torch.float32
    placed = _single_device(torch, kwargs.get("device_map"))
    with torch.device(placed):
        model = cls._from_config(config, dtype=dtype, **options)
    model.eval()
    if kwargs.get("output_loading_info"):
        return model, {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": [], "error_msgs": []}
    return model
