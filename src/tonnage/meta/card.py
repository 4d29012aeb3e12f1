"""Fake tensors of a card in a torch that knows no CUDA: their kernels' choices, and torch.cuda's answers.

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
    """Where C++ code asks for memory on the device of a tensor of the card, the new tensor is the card's."""

    meta_is_meant = False
    """Whether the function that the program called is about tensors without memory."""
    number_is_put = False
    """Whether something is put into a part of a tensor: a number comes from the host."""
    avoid_device_init = True
    """`torch.tensor` must not look for the card's memory by itself."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation on fake tensors."""
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and not self.meta_is_meant and torch.device(device).type == "meta":
            put = self.number_is_put and op is torch.ops.aten.scalar_tensor.default
            kwargs["device"] = torch.device("cpu") if put else CARD
        return super().__torch_dispatch__(op, types, args, kwargs)


class _Asked(TorchFunctionMode):  # type: ignore[misc]
    """Tells a FakeCard whether what the program calls is about tensors without memory."""

    def __init__(self, fake: FakeCard) -> None:
        super().__init__()
        self._fake = fake

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function."""
        kwargs = kwargs or {}
        if isinstance(function, OpOverload):  # the dispatcher's call, handed on: C++ asked for it
            return function(*args, **kwargs)
        if function is torch.tensor:  # which reads what tensors among its data hold without asking the dispatcher
            args = (tree_map_only(FakeTensor, _number, args[0]), *args[1:])
        elif function is torch.Tensor.to:
            function, args, kwargs = _moved(*args, **kwargs)
        self._fake.meta_is_meant, before = _means_meta(args, kwargs), self._fake.meta_is_meant
        try:
            return function(*args, **kwargs)
        finally:
            self._fake.meta_is_meant = before


def _moved(tensor: torch.Tensor, *rest: Any, **options: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What `tensor.to` is to call, where it names the card or meta, between which C++ sees no difference.

    What is on the card stays there: torch means it by the `meta` that C++ told it (`clip_grad_norm_`).
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


def _number(tensor: torch.Tensor) -> Any:
    return tensor.item() if tensor.dim() == 0 else [_number(part) for part in tensor]


def _means_meta(args: Any, kwargs: Any) -> bool:
    """Whether a call asks for tensors without memory: by name, or by being about such."""
    device = kwargs.get("device")
    if device is not None:
        return bool(torch.device(device).type == "meta")
    return any(each.fake_device.type == "meta" for each in args if isinstance(each, FakeTensor))


@contextmanager
def present(device: Device, streams: Streams | None = None, cards: int = 1) -> Iterator[FakeCard]:
    """Within it torch takes the card to be there; gives the mode whose tensors are the card's."""
    fake = FakeCard(allow_non_fake_inputs=True)  # imports what must not meet the answers
    with ExitStack() as stack:
        streams = streams or Streams(CARD)
        for name, answer in {**_answers(device, cards), **streams.answers()}.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        stack.enter_context(patch.object(torch.accelerator, "current_stream", lambda device=None: streams.current))
        stack.enter_context(patch.object(DefaultDeviceType, "_default_device_type", CARD.type))
        stack.enter_context(patch.object(torch.Tensor, "_make_subclass", staticmethod(_made_of_meta())))
        stack.enter_context(patch.object(torch.Tensor, "_make_wrapper_subclass", staticmethod(_wrapped_on_meta())))
        stack.enter_context(patch.object(DTensor, "__new__", _divided_with_keys()))
        stack.enter_context(patch.object(torch.Tensor, "__setitem__", _put(fake)))
        stack.enter_context(patch.object(fake_tensor, "init_gpu_context", lambda device: None))
        for name in ("device", "is_cuda", "is_meta"):
            stack.enter_context(patch.object(DTensor, name, _of_the_local(name), create=True))
        stack.enter_context(patch.object(FakeTensor, "is_cuda", _is_of("cuda"), create=True))
        stack.enter_context(patch.object(FakeTensor, "is_meta", _is_of("meta"), create=True))
        stack.enter_context(patch.object(optimizer, "_foreach_supported_types", _foreach_types()))
        stack.enter_context(_Asked(fake))
        stack.enter_context(_forgotten())
        yield fake


@contextmanager
def _forgotten() -> Iterator[None]:
    """transformers remembers what it finds out about cards; neither before nor after is what holds within."""
    from transformers.utils import import_utils

    found = [each for each in vars(import_utils).values() if hasattr(each, "cache_clear")]
    for function in found:
        function.cache_clear()
    try:
        yield
    finally:
        for function in found:
            function.cache_clear()


def _is_of(kind: str) -> property:
    return property(lambda tensor: tensor.device.type == kind)


def _of_the_local(name: str) -> property:
    """A divided tensor is where its part is; C++ would answer for it, which knows of no card."""
    return property(lambda tensor: getattr(tensor._local_tensor, name))


def _wrapped_on_meta() -> Callable[..., torch.Tensor]:
    """`Tensor._make_wrapper_subclass`, by which torch before 2.9 makes divided tensors: on `meta` for C++ as well."""
    make = torch.Tensor._make_wrapper_subclass

    def made(cls: type, *arguments: Any, **options: Any) -> torch.Tensor:
        if issubclass(cls, DTensor) and options.get("device") == CARD:
            options["device"] = torch.device("meta")
        return make(cls, *arguments, **options)

    return made


def _divided_with_keys() -> Callable[..., DTensor]:
    """`DTensor.__new__`, whose tensors have the keys of where their part is: C++ knows that to be `meta`."""
    original = DTensor.__new__

    def made(cls: type, local: torch.Tensor, spec: Any, *, requires_grad: bool) -> DTensor:
        tensor = original(cls, local, spec, requires_grad=requires_grad)
        if local.device != CARD:
            return tensor
        with torch._C._DisableTorchDispatch():  # what follows detaches it, which would make another one
            found = torch.Tensor._make_subclass(cls, tensor, requires_grad, device_for_backend_keys=CARD)
        found._spec, found._local_tensor = spec, local
        return found

    return made


def _foreach_types() -> list[type]:
    """What optimizers' default, which is to update all parameters at once on a card, is for."""
    return [*optimizer._foreach_supported_types, FakeTensor]


def _made_of_meta() -> Callable[..., torch.Tensor]:
    """`Tensor._make_subclass`, which leaves the card's tensors on `meta` for C++."""
    make = torch.Tensor._make_subclass

    def made(cls: type, data: torch.Tensor, requires_grad: bool = False, **options: Any) -> torch.Tensor:
        on_card = issubclass(cls, FakeTensor) and options.get("device_for_backend_keys", CARD).type == "cuda"
        if on_card and options.get("dispatch_device"):
            options["dispatch_device"] = False
        return make(cls, data, requires_grad, **options)

    return made


def _put(fake: FakeCard) -> Callable[..., None]:
    """`Tensor.__setitem__`, which makes a tensor of a number: for a card on the host, for `meta` on `meta`."""
    original = torch.Tensor.__setitem__

    def put(tensor: torch.Tensor, place: Any, value: Any) -> None:
        fake.number_is_put, before = tensor.device.type == CARD.type, fake.number_is_put
        try:
            original(tensor, place, value)
        finally:
            fake.number_is_put = before

    return put


def _answers(device: Device, cards: int) -> dict[str, Any]:
    """What torch.cuda says of the card."""
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
