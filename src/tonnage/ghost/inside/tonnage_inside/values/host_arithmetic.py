"""Arithmetic on the host that is skipped: it would take minutes and touch memory, and its values do not matter."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tonnage_recorder.host import ZEROS

from .policy import BIG_ELEMENTS, Policy

OPTIMIZERS = (
    *("adadelta", "adagrad", "adam", "adamax", "adamw", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd"),
    *("_adafactor", "_muon"),
)
"""Modules of torch.optim with a function of their name that updates parameters."""


def patch(policy: Policy) -> None:
    """Patch torch for tensors on the host."""
    _patch_initialisation(policy)
    _patch_host_memory(policy)


def _patch_host_memory(policy: Policy) -> None:
    """Keep zeros untouched: offloaded states and shards hold computed values, zeros that need no host memory.

    Arithmetic that leaves them zero does not touch them either: an accumulated, clipped or unscaled gradient, or a
    copy in another dtype.
    """
    torch, native = policy.torch, policy.native
    if native is None:
        return
    aten, pin = torch.ops.aten, torch.Tensor.pin_memory
    fill, copy = aten.fill_.Scalar, aten.copy_.default
    # torch's own kernels: one for host and card, and one for all devices
    on_card, anywhere = (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)) for key in ("CUDA", "HPU"))

    def big(tensor: Any) -> bool:
        return bool(tensor.numel() >= BIG_ELEMENTS and tensor.device.type == "cpu" and tensor.is_contiguous())

    def zero(tensor: Any) -> bool:
        return big(tensor) and native.reads_zero(tensor.data_ptr(), tensor.nbytes)

    def zero_(tensor: Any) -> Any:
        if not big(tensor):
            return aten.fill_.Scalar(tensor, 0)
        native.zero_host(tensor.data_ptr(), tensor.nbytes)
        ZEROS.add(tensor)
        return tensor

    def fill_(tensor: Any, value: Any) -> Any:
        unset = value != value and torch.are_deterministic_algorithms_enabled()  # torch's fill of empty memory
        if (value == 0 or unset) and big(tensor):
            return zero_(tensor)
        return fill.redispatch(on_card, tensor, value)

    def copy_(tensor: Any, source: Any, non_blocking: bool = False) -> Any:
        if not isinstance(source, torch.Tensor):  # what a number was made for
            source = torch.scalar_tensor(source, dtype=tensor.dtype)
        if source.numel() == tensor.numel() and big(tensor) and zero(source):
            return zero_(tensor)
        return copy.redispatch(anywhere, tensor, source, non_blocking)

    def mul_(tensor: Any, other: Any) -> Any:
        return tensor if zero(tensor) else aten.mul.out(tensor, other, out=tensor)

    def add_(tensor: Any, other: Any, *, alpha: Any = 1) -> Any:
        if zero(tensor) and (zero(other) if isinstance(other, torch.Tensor) else other == 0):
            return tensor
        return aten.add.out(tensor, other, alpha=alpha, out=tensor)

    def norm(tensor: Any, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
        if zero(tensor) and not dim:
            return torch.zeros((1,) * tensor.dim() if keepdim else (), dtype=dtype or tensor.dtype.to_real())
        made = torch.empty(0, dtype=dtype or tensor.dtype.to_real())
        return aten.linalg_vector_norm.out(tensor, order, dim, keepdim, dtype=dtype, out=made)

    def unscale(tensors: Any, found_infinite: Any, inverse_scale: Any) -> None:
        for tensor in tensors:
            if zero(tensor):
                continue
            if not tensor.isfinite().all():
                found_infinite.fill_(1)
            tensor.mul_(inverse_scale)

    @functools.wraps(pin)
    def pin_memory(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not big(tensor) or tensor.is_pinned():
            return pin(tensor, *args, **kwargs)
        pinned = torch.empty_like(tensor, pin_memory=True, requires_grad=False)
        native.copy_host(pinned.data_ptr(), tensor.data_ptr(), tensor.nbytes)
        return pinned

    for operation, kernel in (
        *(("zero_", zero_), ("fill_.Scalar", fill_), ("copy_", copy_)),
        *(("mul_.Tensor", mul_), ("add_.Tensor", add_)),
        *(("linalg_vector_norm", norm), ("_amp_foreach_non_finite_check_and_unscale_", unscale)),
    ):
        policy.implement(operation, kernel, "CPU")
    torch.Tensor.pin_memory = pin_memory


def _patch_initialisation(policy: Policy) -> None:
    """Skip random initialisation of large host tensors: it takes minutes and touches memory, for unused values."""
    torch = policy.torch

    def patched(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def initialise(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if tensor.device.type == "cpu" and tensor.numel() >= BIG_ELEMENTS:
                policy.use("initialisation")
                if type(tensor) in (torch.Tensor, torch.nn.Parameter):
                    ZEROS.add(tensor)
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


def patch_optimizer(policy: Policy, module: ModuleType) -> None:
    """Skip an optimizer's arithmetic on large host tensors, which takes minutes; its states are created anyway."""
    name = module.__name__.rpartition(".")[2].lstrip("_")
    original = getattr(module, name)

    @functools.wraps(original)
    def update(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        plain = [getattr(parameter, "_local_tensor", parameter) for parameter in parameters]
        on_host = all(tensor.device.type == "cpu" for tensor in plain)
        if on_host and sum(tensor.numel() for tensor in plain) >= BIG_ELEMENTS:
            policy.use("host_optimizer")
            return None
        return original(parameters, *args, **kwargs)

    setattr(module, name, update)
