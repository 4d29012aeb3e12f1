"""transformers' `from_pretrained` without weights, with shapes from the configuration."""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tonnage_recorder.host import ZEROS

if TYPE_CHECKING:
    from .policy import Policy

SMALL_WEIGHTS_BYTES = 1 << 30
"""Largest size of a local checkpoint that is really read."""

_LOCATING_OPTIONS = ("cache_dir", "force_download", "proxies", "local_files_only", "token", "revision", "subfolder")
_PLACING_OPTIONS = ("quantization_config", "device_map", "tp_plan", "tp_size", "device_mesh", "distributed_config")
"""Options with which transformers' loader decides the network's modules and their devices."""

_LOADING_OPTIONS = {
    *_LOCATING_OPTIONS,
    *("state_dict", "output_loading_info", "_from_pipeline", "_from_auto", "dtype", "torch_dtype", "device_map"),
    *("max_memory", "offload_folder", "offload_buffers", "variant", "adapter_kwargs", "adapter_name", "tqdm_class"),
    *("mirror", "from_tf", "from_flax", "tp_plan", "tp_size", "device_mesh", "distributed_config", "fusion_config"),
    *("generation_config", "use_safetensors", "weights_only", "low_cpu_mem_usage", "_commit_hash", "key_mapping"),
    *("ignore_mismatched_sizes", "offload_state_dict", "trust_remote_code", "_fast_init", "quantization_config"),
    *("allow_all_kernels", "use_kernels", "kernel_config", "disable_mmap"),
}
"""Options of `from_pretrained` that networks do not take."""


def small_checkpoint(name: Any) -> bool:
    """Return whether this is a local folder with weights small enough to be read."""
    if not isinstance(name, str | os.PathLike) or not os.path.isdir(name):
        return False
    sizes = [
        entry.stat().st_size
        for entry in os.scandir(str(name))
        if entry.name.endswith((".safetensors", ".bin", ".pt"))
    ]
    return 0 < sum(sizes) <= SMALL_WEIGHTS_BYTES


def patch(policy: Policy, module: ModuleType) -> None:
    """Take shapes from the configuration instead of weights from files, unless these are local and small."""
    base = module.PreTrainedModel
    original = base.from_pretrained.__func__

    def from_pretrained(
        cls: Any, /, pretrained_model_name_or_path: Any, *args: Any, config: Any = None, **kwargs: Any
    ) -> Any:
        name = pretrained_model_name_or_path
        if args or kwargs.get("state_dict") is not None or kwargs.get("gguf_file") or small_checkpoint(name):
            return original(cls, name, *args, config=config, **kwargs)
        if not hasattr(config, "to_dict"):
            locating = {key: kwargs[key] for key in _LOCATING_OPTIONS if key in kwargs}
            own = {key: value for key, value in kwargs.items() if key not in _LOADING_OPTIONS}
            config, rest = cls.config_class.from_pretrained(
                config or name, return_unused_kwargs=True, **locating, **own
            )
            kwargs = {key: value for key, value in kwargs.items() if key in rest or key not in own}
        config = copy.deepcopy(config)
        config.name_or_path = str(name)  # trainers look for tokenizers there
        stored = _unpacked(config, kwargs)
        if stored not in (None, "bitsandbytes"):  # packed in a way that only its files describe
            return original(cls, name, config=config, **kwargs)
        policy.use("weights")
        if any(kwargs.get(option) is not None for option in _PLACING_OPTIONS):
            model = _load(policy, original, cls, config, kwargs)
        else:
            model = _from_configuration(policy, cls, config, kwargs)
        _set_generation_config(model[0] if isinstance(model, tuple) else model, name, kwargs)
        return model

    base.from_pretrained = classmethod(from_pretrained)


def _unpacked(config: Any, kwargs: dict[str, Any]) -> str | None:
    """Return the quantization of a checkpoint that the program does not ask for, and remove it from `config`.

    Weights that bitsandbytes has packed are quantized at loading instead, which leaves the same in memory.
    """
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return None
    wanted = kwargs.get("quantization_config")
    method = stored.get("quant_method", "bitsandbytes") if isinstance(stored, dict) else str(stored.quant_method)
    if getattr(wanted, "dequantize", False):
        kwargs.pop("quantization_config")
    elif method == "bitsandbytes":
        kwargs["quantization_config"] = wanted if wanted is not None else _bits_and_bytes(stored)
    elif wanted is None:
        return method
    del config.quantization_config
    return "bitsandbytes" if method == "bitsandbytes" else None


def _bits_and_bytes(stored: Any) -> Any:
    kind = importlib.import_module("transformers").BitsAndBytesConfig
    return kind.from_dict(stored) if isinstance(stored, dict) else stored


def _load(policy: Policy, original: Any, cls: Any, config: Any, kwargs: dict[str, Any]) -> Any:
    """Have transformers' loader place, divide and quantize a checkpoint whose values are never read."""
    torch = policy.torch
    dtype = _dtype(torch, config, kwargs)
    if kwargs.get("quantization_config") is not None and not _says_dtype(torch, kwargs):
        dtype = torch.float16
    with torch.device("meta"):
        network = cls._from_config(copy.deepcopy(config), dtype=dtype)
    network.tie_weights()
    saved = network.state_dict()
    tensors = [*network.named_parameters(), *network.named_buffers()]
    checkpoint = {key: torch.empty_like(t, device="cpu") for key, t in tensors if key in saved}
    options = {key: value for key, value in kwargs.items() if key not in _LOCATING_OPTIONS}
    name = config.name_or_path
    answer = original(cls, None, config=config, state_dict=checkpoint, **options)
    loaded = answer[0] if isinstance(answer, tuple) else answer
    loaded.config.name_or_path = loaded.name_or_path = name
    return answer


def _from_configuration(policy: Policy, cls: Any, config: Any, kwargs: dict[str, Any]) -> Any:
    options = {key: value for key, value in kwargs.items() if key not in _LOADING_OPTIONS}
    dtype = _dtype(policy.torch, config, kwargs)
    mapped = dtype == getattr(config, "dtype", None)  # weights as they were saved stay in mapped files
    with policy.torch.device("cpu"), ZEROS.paused() if mapped else contextlib.nullcontext():
        model = cls._from_config(config, dtype=dtype, **options)
    for tensor in () if mapped else (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu":  # DeepSpeed divides parameters on the card as they are made
            ZEROS.add(tensor)
    ZEROS.peak_bytes()  # looks at all of them now: they may be moved to the card next
    model.eval()
    if kwargs.get("output_loading_info"):
        return model, {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": [], "error_msgs": []}
    return model


def _says_dtype(torch: Any, kwargs: dict[str, Any]) -> bool:
    return isinstance(kwargs.get("dtype", kwargs.get("torch_dtype")), torch.dtype)


def _dtype(torch: Any, config: Any, kwargs: dict[str, Any]) -> Any:
    """Return the dtype of the weights: the program's choice, or else the one in which they were saved."""
    dtype = kwargs.get("dtype", kwargs.get("torch_dtype")) or "auto"
    return (getattr(config, "dtype", None) or torch.float32) if dtype == "auto" else dtype


def _set_generation_config(model: Any, name: Any, kwargs: dict[str, Any]) -> None:
    """Give a model its generation settings (beams, lengths, end tokens), which are stored beside its weights."""
    if not model.can_generate():
        return
    given = kwargs.get("generation_config")
    if given is not None:
        model.generation_config = given
        return
    locating = {key: kwargs[key] for key in _LOCATING_OPTIONS if key in kwargs}
    kind = importlib.import_module("transformers").GenerationConfig
    with contextlib.suppress(OSError):  # few of the older ones have one
        model.generation_config = kind.from_pretrained(name, **locating)
