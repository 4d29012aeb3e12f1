"""The values policy: what a program reads back from a GPU that computes nothing.

Really there: whatever was copied to the card from the host (up to 1 MiB a copy), set by memset, or copied on
from there; libghost.so tracks which bytes these are.  Everything else was to be computed by a kernel and reads as
zero: a loss prints 0.0, `isnan(x).any()` is False, GradScaler finds no infinity, a generation never meets its end
token.  Where zero would send a program down a path that real data does not take, a small named patch below takes
the usual one instead; each says so, once used, in the report's `assumed`.
"""

import contextlib
import functools
import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from .imports import after_import
from .native import Native

BIG_ELEMENTS = 1 << 16
"""Host tensors from this size on are not filled with random numbers."""

SMALL_WEIGHTS_BYTES = 1 << 30
"""A local checkpoint up to this size is really read."""

ASSUMED = {
    "finite": "torch.isfinite of a computed tensor is True",
    "all": "tensor.all() of a computed mask is True",
    "checks": "conditions that were computed and checked hold",
    "nonzero": "nonzero() (also boolean indexing, where(mask)) of a computed mask selects every element",
    "padding": "attention masks computed on the GPU hold no padding",
    "packing": "position_ids computed on the GPU are one unpacked sequence",
    "generation": "generate() meets no end token: it goes on to its length limit",
    "weights": "pretrained weights were not read: shapes and dtypes come from the configuration",
    "initialisation": "host tensors were not filled with random numbers",
    "host_optimizer": "optimizers did no arithmetic on host tensors (offloaded parameters)",
    "compiled_adam": "DeepSpeed's FusedAdam and CPUAdam were not compiled: their kernels do nothing, the rest is run",
}


class Policy:
    """The patches of one process, and which of them were needed."""

    def __init__(self, torch: Any, native: Native | None) -> None:
        self.torch = torch
        self.native = native
        self._used: dict[str, None] = {}
        self._library: Any = None
        self._quiet = False
        self._long_enough = False

    def assumed(self) -> list[str]:
        """One sentence for each patch that was needed."""
        return [ASSUMED[name] for name in self._used]

    def use(self, name: str) -> None:
        """Note that the assumption `name` was made, unless a more telling one covers it."""
        if not self._quiet:
            self._used[name] = None

    @contextlib.contextmanager
    def covered(self) -> Iterator[None]:
        """What is assumed inside is told by its caller."""
        self._quiet, before = True, self._quiet
        try:
            yield
        finally:
            self._quiet = before

    def install(self) -> None:
        """Patch torch now, and other libraries when they are imported."""
        self._patch_finite()
        self._patch_all()
        self._patch_initialisation()
        self._patch_equality()
        self._patch_checks()
        for name in ("adam", "adamw", "sgd", "adafactor"):
            after_import(f"torch.optim.{name}", functools.partial(self._patch_optimizer, name))
        self.torch.cuda._lazy_call(self._patch_nonzero)
        after_import("deepspeed.ops.op_builder.builder", self._patch_compiled_adam)
        after_import("torch.distributed.distributed_c10d", self._patch_object_exchange)
        after_import("transformers.masking_utils", self._patch_masks)
        after_import("transformers.generation.utils", self._patch_generation)
        after_import("transformers.modeling_utils", self._patch_from_pretrained)

    def read(self, tensor: Any) -> Any:
        """The tensor's values on the host if they are known, else None."""
        if not tensor.is_cuda:
            return tensor
        if self.native is None or tensor.numel() == 0:
            return tensor.cpu()
        reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if not self.native.known(tensor.data_ptr(), reach * tensor.element_size()):
            return None
        flat = self.torch.as_strided(tensor, (reach,), (1,), tensor.storage_offset()).cpu()
        return self.torch.as_strided(flat, tensor.shape, tensor.stride())

    # -- torch

    def _patch_finite(self) -> None:
        torch, original = self.torch, self.torch.isfinite

        @functools.wraps(original)
        def isfinite(tensor: Any) -> Any:
            result = original(tensor)
            if torch.compiler.is_compiling() or not result.is_cuda:
                return result
            self.use("finite")
            return result.copy_(torch.ones(result.shape, dtype=torch.bool))

        torch.isfinite = isfinite
        torch.Tensor.isfinite = isfinite

    def _patch_all(self) -> None:
        torch = self.torch

        def patched(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def everywhere(tensor: Any, *args: Any, **kwargs: Any) -> Any:
                result = original(tensor, *args, **kwargs)
                if args or kwargs or torch.compiler.is_compiling() or not getattr(result, "is_cuda", False):
                    return result
                values = self.read(tensor)
                if values is None:
                    self.use("all")
                return result.copy_(torch.tensor(True if values is None else bool(values.all())))

            return everywhere

        torch.all = patched(torch.all)
        torch.Tensor.all = patched(torch.Tensor.all)

    def _patch_equality(self) -> None:
        """Where token ids from the host are compared with a number, the mask is known: image places, padding."""
        torch = self.torch
        original = torch.Tensor.__eq__

        @functools.wraps(original)
        def equal(tensor: Any, other: Any) -> Any:
            result = original(tensor, other)
            if torch.compiler.is_compiling() or not isinstance(other, int) or not getattr(tensor, "is_cuda", False):
                return result
            if type(tensor) is torch.Tensor and not tensor.is_floating_point():
                values = self.read(tensor)
                if values is not None:
                    result.copy_(original(values, other))
            return result

        torch.Tensor.__eq__ = equal

    def _patch_checks(self) -> None:
        """`torch._check_tensor_all`: a condition that was computed holds, as it does for data that is right."""
        torch = self.torch
        original = getattr(torch, "_check_tensor_all_with", None)
        if original is None:
            return

        @functools.wraps(original)
        def check(error: Any, condition: Any, message: Any = None) -> None:
            if isinstance(condition, torch.Tensor) and condition.is_cuda and self.read(condition) is None:
                self.use("checks")
                return
            original(error, condition, message)

        torch._check_tensor_all_with = check

    def _patch_nonzero(self) -> None:
        """At the dispatcher, because boolean indexing calls it from C++."""
        torch = self.torch

        def nonzero(mask: Any) -> Any:
            values = self.read(mask)
            if values is None:
                self.use("nonzero")
                values = torch.ones(mask.shape, dtype=torch.bool)
            return torch.nonzero(values).to(mask.device)

        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._library.impl("nonzero", nonzero, "CUDA")

    def _patch_initialisation(self) -> None:
        """Random numbers for billions of host elements take minutes and touch memory; their values do not matter."""
        torch = self.torch

        def patched(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def initialise(tensor: Any, *args: Any, **kwargs: Any) -> Any:
                if tensor.device.type == "cpu" and tensor.numel() >= BIG_ELEMENTS:
                    self.use("initialisation")
                    return tensor
                return original(tensor, *args, **kwargs)

            return initialise

        for name in (
            *("normal_", "uniform_", "trunc_normal_", "orthogonal_", "sparse_"),
            *("xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_"),
            *("zeros_", "ones_", "constant_"),
        ):
            setattr(torch.nn.init, name, patched(getattr(torch.nn.init, name)))
        for name in ("normal_", "uniform_"):
            setattr(torch.Tensor, name, patched(getattr(torch.Tensor, name)))

    def _patch_object_exchange(self, module: ModuleType) -> None:
        """Ranks that send each other objects compute with their sizes on the card: sum them, take the longest."""
        known_integers = _known_integers(self)

        def patched(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def exchange(*args: Any, **kwargs: Any) -> Any:
                with known_integers():
                    return original(*args, **kwargs)

            return exchange

        for name in _OBJECT_EXCHANGES:
            if hasattr(module, name):
                replacement = patched(getattr(module, name))
                setattr(module, name, replacement)
                if hasattr(self.torch.distributed, name):
                    setattr(self.torch.distributed, name, replacement)

    def _patch_optimizer(self, name: str, module: ModuleType) -> None:
        """Arithmetic on billions of host elements takes minutes and touches memory; states are made all the same."""
        original = getattr(module, name)

        @functools.wraps(original)
        def update(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            plain = [getattr(parameter, "_local_tensor", parameter) for parameter in parameters]
            on_host = all(tensor.device.type == "cpu" for tensor in plain)
            if on_host and sum(tensor.numel() for tensor in plain) >= BIG_ELEMENTS:
                self.use("host_optimizer")
                return None
            return original(parameters, *args, **kwargs)

        setattr(module, name, update)

    def _patch_compiled_adam(self, module: ModuleType) -> None:
        """DeepSpeed compiles Adam's kernels at first use, for minutes; its Python code makes states and lists."""

        def nothing(*_args: Any, **_kwargs: Any) -> None:
            self.use("compiled_adam")

        on_card = SimpleNamespace(multi_tensor_adam=nothing)
        on_host = SimpleNamespace(create_adam=nothing, adam_update=nothing, destroy_adam=nothing)
        module.OpBuilder._loaded_ops |= {"fused_adam": on_card, "cpu_adam": on_host}

    # -- transformers

    def _patch_masks(self, module: ModuleType) -> None:
        torch = self.torch
        if hasattr(module, "fast_all"):
            original_all = module.fast_all

            def fast_all(mask: Any) -> Any:
                result = original_all(mask)
                if not mask.is_cuda or self.torch.compiler.is_compiling():
                    return result
                values = self.read(mask)
                if values is None:
                    self.use("padding")
                    return True
                return bool(values.all())

            module.fast_all = fast_all  # type: ignore[attr-defined]
        if hasattr(module, "find_packed_sequence_indices"):
            original_packed = module.find_packed_sequence_indices

            def find_packed_sequence_indices(position_ids: Any) -> Any:
                with self.covered():
                    result = original_packed(position_ids)
                if not position_ids.is_cuda or self.torch.compiler.is_compiling():
                    return result
                values = self.read(position_ids)
                if values is None:
                    self.use("packing")
                    return None
                found = original_packed(values)
                return None if found is None else found.to(position_ids.device)

            module.find_packed_sequence_indices = find_packed_sequence_indices  # type: ignore[attr-defined]
        if hasattr(module, "_preprocess_mask_arguments"):
            original_arguments = module._preprocess_mask_arguments

            def _preprocess_mask_arguments(*args: Any, **kwargs: Any) -> Any:
                """A mask from the data loader becomes one of booleans by a kernel: its values are still known."""
                result = original_arguments(*args, **kwargs)
                given = kwargs["attention_mask"] if "attention_mask" in kwargs else args[2]
                made = result[1]
                if isinstance(given, torch.Tensor) and isinstance(made, torch.Tensor) and made is not given:
                    values = None if torch.compiler.is_compiling() or not made.is_cuda else self.read(given)
                    if values is not None:
                        made.copy_(values.to(made.dtype))
                return result

            module._preprocess_mask_arguments = _preprocess_mask_arguments  # type: ignore[attr-defined]

    def _patch_generation(self, module: ModuleType) -> None:
        """Whether all sequences are finished is computed on the card; that the length limit is met is not."""
        limit = importlib.import_module("transformers.generation.stopping_criteria").MaxLengthCriteria
        count, more = limit.__call__, module.GenerationMixin._has_unfinished_sequences

        @functools.wraps(count)
        def counted(criteria: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
            self._long_enough = bool(input_ids.shape[-1] >= criteria.max_length)
            return count(criteria, input_ids, *args, **kwargs)

        @functools.wraps(more)
        def has_unfinished_sequences(mixin: Any, finished: bool, *args: Any, **kwargs: Any) -> Any:
            unfinished = more(mixin, finished, *args, **kwargs)
            if unfinished and self._long_enough:
                self.use("generation")
                unfinished = False
            self._long_enough = False
            return unfinished

        limit.__call__ = counted
        module.GenerationMixin._has_unfinished_sequences = has_unfinished_sequences  # type: ignore[attr-defined]

    def _patch_from_pretrained(self, module: ModuleType) -> None:
        """Shapes from the configuration instead of weights from files, unless these are local and small."""
        base = module.PreTrainedModel
        original = base.from_pretrained.__func__

        def from_pretrained(cls: Any, /, name: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
            if args or kwargs.get("state_dict") is not None or _small_checkpoint(name):
                return original(cls, name, *args, config=config, **kwargs)
            self.use("weights")
            if kwargs.get("quantization_config") is not None:
                return self._quantized(original, cls, name, config, kwargs)
            return self._from_configuration(cls, name, config, kwargs)

        base.from_pretrained = classmethod(from_pretrained)

    def _quantized(self, original: Any, cls: Any, name: Any, config: Any, kwargs: dict[str, Any]) -> Any:
        """transformers' loader quantizes layer by layer: hand it a checkpoint whose values nobody reads."""
        torch = self.torch
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
        return original(cls, None, config=config, state_dict=checkpoint, **options)

    def _from_configuration(self, cls: Any, name: Any, config: Any, kwargs: dict[str, Any]) -> Any:
        torch = self.torch
        options = {key: value for key, value in kwargs.items() if key not in _LOADING_OPTIONS}
        if not hasattr(config, "to_dict"):
            locating = {key: kwargs[key] for key in _LOCATING_OPTIONS if key in kwargs}
            config, options = cls.config_class.from_pretrained(
                config or name, return_unused_kwargs=True, **locating, **options
            )
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


_OBJECT_EXCHANGES = (
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)


def _known_integers(policy: Policy) -> Any:
    """A mode in which operations on small integers whose values are known have known results."""
    torch = policy.torch

    def on_host(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            known = policy.read(value)
            if known is None:
                raise LookupError
            return known
        if isinstance(value, list | tuple):
            return type(value)([on_host(item) for item in value])
        return value

    class KnownIntegers(torch.overrides.TorchFunctionMode):  # type: ignore[misc, name-defined]
        def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            options = kwargs or {}
            result = function(*args, **options)
            if not isinstance(result, torch.Tensor) or not result.is_cuda or "device" in options:
                return result
            if result.dtype.is_floating_point or not 0 < result.numel() < BIG_ELEMENTS:
                return result
            if policy.read(result) is None:
                with contextlib.suppress(LookupError):
                    result.copy_(function(*on_host(args), **options))
            return result

    return KnownIntegers


_LOCATING_OPTIONS = ("cache_dir", "force_download", "proxies", "local_files_only", "token", "revision", "subfolder")
_LOADING_OPTIONS = {
    *_LOCATING_OPTIONS,
    *("state_dict", "output_loading_info", "_from_pipeline", "_from_auto", "dtype", "torch_dtype", "device_map"),
    *("max_memory", "offload_folder", "offload_buffers", "variant", "adapter_kwargs", "adapter_name"),
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
