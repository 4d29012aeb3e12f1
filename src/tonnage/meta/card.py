"""Fake tensors of a GPU in a torch without CUDA: the choices of their kernels, and torch.cuda's answers.

To Python and to the dispatcher such a tensor is one of `cuda:0`, with CUDA's keys for autograd and autocast.  To
torch's C++ it is one of `meta`, since a build for the CPU has no guards, streams or threads of a CUDA device.  What
C++ code decides by a tensor's device is decided here instead (`choices`, `autocast`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import torch
from torch._ops import OpOverload
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import DefaultDeviceType

from tonnage.meta.streams import Streams

if TYPE_CHECKING:
    from tonnage.cluster import Device

CARD: Final = torch.device("cuda", 0)


class FakeCard(FakeTensorMode):  # type: ignore[misc]
    """A fake tensor mode in which new tensors on the device of a GPU tensor are the GPU's, also if C++ makes them."""

    meta_is_meant = False
    """True if the function that the program called is about tensors without memory."""
    number_is_put = False
    """True while something is written into a part of a tensor: a number comes from the host."""
    avoid_device_init = True
    """Prevents `torch.tensor` from initialising the GPU by itself."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation on fake tensors."""
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and not self.meta_is_meant and torch.device(device).type == "meta":
            put = self.number_is_put and op is torch.ops.aten.scalar_tensor.default
            kwargs["device"] = torch.device("cpu") if put else CARD
        return super().__torch_dispatch__(op, types, args, kwargs)


class _CallIntent(TorchFunctionMode):  # type: ignore[misc]
    """Tells a FakeCard if the program's call is about tensors without memory."""

    def __init__(self, fake: FakeCard) -> None:
        super().__init__()
        self._fake = fake

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function."""
        kwargs = kwargs or {}
        if isinstance(function, OpOverload):  # the dispatcher's call passed on: C++ made it
            return function(*args, **kwargs)
        if function is torch.tensor:  # it reads the tensors among its data without the dispatcher
            args = (tree_map_only(FakeTensor, _as_number, args[0]), *args[1:])
        elif function is torch.Tensor.to:
            function, args, kwargs = _redirect_to(*args, **kwargs)
        self._fake.meta_is_meant, before = _means_meta(args, kwargs), self._fake.meta_is_meant
        try:
            return function(*args, **kwargs)
        finally:
            self._fake.meta_is_meant = before


def _redirect_to(tensor: torch.Tensor, *rest: Any, **options: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the call for `tensor.to` if it names the GPU or meta, between which C++ sees no difference.

    What is on the GPU stays there: by `meta`, which C++ reported, torch means the GPU (`clip_grad_norm_`).
    """
    named = rest[0] if rest else options.get("device")
    kind = torch.device(named).type if isinstance(named, str | torch.device) else ""
    dtype = rest[1] if len(rest) > 1 else options.get("dtype")
    if kind == "meta" and tensor.device.type == "cpu":
        return torch.empty_like, (tensor,), {"device": kind, "dtype": dtype or tensor.dtype}
    if kind != CARD.type:
        return torch.Tensor.to, (tensor, *rest), options
    others = {name: value for name, value in options.items() if name not in ("device", "dtype")}
    first = (CARD, dtype) if tensor.device != CARD else (dtype or tensor.dtype,)
    return torch.Tensor.to, (tensor, *first, *rest[2:]), others


def _as_number(tensor: torch.Tensor) -> Any:
    return tensor.item() if tensor.dim() == 0 else [_as_number(part) for part in tensor]


def _means_meta(args: Any, kwargs: Any) -> bool:
    """Return True if a call asks for tensors without memory: by name, or by being about such."""
    device = kwargs.get("device")
    if device is not None:
        return bool(torch.device(device).type == "meta")
    return any(argument.fake_device.type == "meta" for argument in args if isinstance(argument, FakeTensor))


@contextmanager
def present(device: Device, streams: Streams | None = None, cards: int = 1) -> Iterator[FakeCard]:
    """Make torch see the GPU; yield the mode whose tensors are the GPU's."""
    fake = FakeCard(allow_non_fake_inputs=True)  # imports modules that must not see the patched answers
    with ExitStack() as stack:
        streams = streams or Streams(CARD)
        for name, answer in {**_answers(device, cards), **streams.answers()}.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        stack.enter_context(patch.object(torch.accelerator, "current_stream", lambda device=None: streams.current))
        stack.enter_context(patch.object(DefaultDeviceType, "_default_device_type", CARD.type))
        stack.enter_context(patch.object(torch.Tensor, "_make_subclass", staticmethod(_make_subclass_on_meta())))
        stack.enter_context(
            patch.object(torch.Tensor, "_make_wrapper_subclass", staticmethod(_make_wrapper_on_meta()))
        )
        stack.enter_context(patch.object(DTensor, "__new__", _new_dtensor_with_keys()))
        stack.enter_context(patch.object(torch.Tensor, "__setitem__", _set_item(fake)))
        stack.enter_context(patch.object(fake_tensor, "init_gpu_context", lambda device: None))
        for name in ("device", "is_cuda", "is_meta"):
            stack.enter_context(patch.object(DTensor, name, _property_of_local(name), create=True))
        stack.enter_context(patch.object(FakeTensor, "is_cuda", _device_type_property("cuda"), create=True))
        stack.enter_context(patch.object(FakeTensor, "is_meta", _device_type_property("meta"), create=True))
        stack.enter_context(patch.object(optimizer, "_foreach_supported_types", _foreach_types()))
        stack.enter_context(_CallIntent(fake))
        stack.enter_context(_clear_caches_of_transformers())
        yield fake


@contextmanager
def _clear_caches_of_transformers() -> Iterator[None]:
    """Make transformers forget what it has cached about devices, before and after."""
    from transformers.utils import import_utils

    cached_functions = [value for value in vars(import_utils).values() if hasattr(value, "cache_clear")]
    for function in cached_functions:
        function.cache_clear()
    try:
        yield
    finally:
        for function in cached_functions:
            function.cache_clear()


def _device_type_property(kind: str) -> property:
    return property(lambda tensor: tensor.device.type == kind)


def _property_of_local(name: str) -> property:
    """Return a property that a DTensor takes from its local tensor; C++, which knows no GPU, would answer it."""
    return property(lambda tensor: getattr(tensor._local_tensor, name))


def _make_wrapper_on_meta() -> Callable[..., torch.Tensor]:
    """Return `Tensor._make_wrapper_subclass`, by which torch before 2.9 makes DTensors, on `meta` for C++ as well."""
    make = torch.Tensor._make_wrapper_subclass

    def made(cls: type, *arguments: Any, **options: Any) -> torch.Tensor:
        if issubclass(cls, DTensor) and options.get("device") == CARD:
            options["device"] = torch.device("meta")
        return make(cls, *arguments, **options)

    return made


def _new_dtensor_with_keys() -> Callable[..., DTensor]:
    """Return `DTensor.__new__`, whose tensors get the dispatch keys of their local tensor's device, which C++
    takes for `meta`.
    """
    original = DTensor.__new__

    def made(cls: type, local: torch.Tensor, spec: Any, *, requires_grad: bool) -> DTensor:
        tensor = original(cls, local, spec, requires_grad=requires_grad)
        if local.device != CARD:
            return tensor
        with torch._C._DisableTorchDispatch():  # the next call detaches it, which would make another one
            with_keys = torch.Tensor._make_subclass(cls, tensor, requires_grad, device_for_backend_keys=CARD)
        with_keys._spec, with_keys._local_tensor = spec, local
        return with_keys

    return made


def _foreach_types() -> list[type]:
    """Return the types that optimizers update all at once by default, as they do on a GPU."""
    return [*optimizer._foreach_supported_types, FakeTensor]


def _make_subclass_on_meta() -> Callable[..., torch.Tensor]:
    """Return `Tensor._make_subclass`, which leaves the GPU's tensors on `meta` for C++."""
    make = torch.Tensor._make_subclass

    def made(cls: type, data: torch.Tensor, requires_grad: bool = False, **options: Any) -> torch.Tensor:
        on_card = issubclass(cls, FakeTensor) and options.get("device_for_backend_keys", CARD).type == "cuda"
        if on_card and options.get("dispatch_device"):
            options["dispatch_device"] = False
        return make(cls, data, requires_grad, **options)

    return made


def _set_item(fake: FakeCard) -> Callable[..., None]:
    """Return `Tensor.__setitem__`, which makes a tensor of a number: on the host for a GPU, on `meta` for `meta`."""
    original = torch.Tensor.__setitem__

    def put(tensor: torch.Tensor, place: Any, value: Any) -> None:
        fake.number_is_put, before = tensor.device.type == CARD.type, fake.number_is_put
        try:
            original(tensor, place, value)
        finally:
            fake.number_is_put = before

    return put


def _answers(device: Device, cards: int) -> dict[str, Any]:
    """Return what torch.cuda tells about the GPU."""
    major, minor = device.capability
    properties = SimpleNamespace(
        name=device.name,
        major=major,
        minor=minor,
        total_memory=device.capacity_bytes,
        multi_processor_count=device.sms,
        max_threads_per_multi_processor=device.threads_per_sm,
        warp_size=32,
        gcnArchName="",
    )

    def nothing(*arguments: Any, **options: Any) -> None:
        return None

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: cards,
        "current_device": lambda: 0,
        "set_device": nothing,
        "synchronize": nothing,
        "empty_cache": nothing,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (major, minor),
        "get_device_name": lambda device=None: properties.name,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or major >= 8,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": nothing,
    }
