"""Asking a network's own code for shapes, on tensors without memory."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tonnage.errors import CannotEstimate
from tonnage.step.constants import KnownValues

if TYPE_CHECKING:
    from tonnage.job import Job

_ATEN = torch.ops.aten
_BY_INDEX = (_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default, _ATEN._index_put_impl_.default)


_TOWERS = ("vision_config", "audio_config")
"""What of a configuration says how a network sees and hears."""

_DEPTHS = ("num_hidden_layers", "depth", "encoder_layers", "num_layers")
"""What such a configuration calls the number of its layers."""


class _WithoutComputing(TorchDispatchMode):  # type: ignore[misc]
    """Among fake tensors: whole numbers and masks that are known have values, other masks select everything."""

    def __init__(self) -> None:
        super().__init__()
        self._values = KnownValues()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if op is _ATEN._local_scalar_dense.default:
            known = self._values.compute(op, args, options)
            return 0 if known is None else known
        if op is _ATEN.nonzero.default:
            return self._selected(args[0])
        if op in _BY_INDEX and any(_is_mask(index) for index in args[1]):
            args = (args[0], [place for index in args[1] for place in self._places(index)], *args[2:])
        try:
            result = op(*args, **options)
        except DynamicOutputShapeException:
            known = self._values.compute(op, args, options)
            if known is None:
                raise
            result = torch.empty_like(known)
            self._values.keep(result, known)
            return result
        if op is _ATEN.eq.Scalar and args[0].is_floating_point():  # a computed number equals no constant
            self._values.keep(result, torch.zeros((), dtype=torch.bool).expand(result.shape))
            return result
        self._values.follow(op, args, options, result)
        return result

    def _places(self, index: Any) -> list[Any]:
        return list(self._selected(index).unbind(1)) if _is_mask(index) else [index]

    def _selected(self, mask: torch.Tensor) -> torch.Tensor:
        known = self._values.compute(_ATEN.nonzero.default, (mask,), {})
        rows = math.prod(mask.shape) if known is None else known.shape[0]
        places = torch.empty(rows, mask.dim(), dtype=torch.long)
        if known is not None:
            self._values.keep(places, known)
        return places


class _Scalars(torch.overrides.TorchFunctionMode):  # type: ignore[misc, name-defined]
    """`torch.tensor` of a list that holds tensors of one number takes the numbers."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.tensor and isinstance(args[0], list):
            values = [each.item() if isinstance(each, torch.Tensor) and each.dim() == 0 else each for each in args[0]]
            args = (values, *args[1:])
        return function(*args, **(kwargs or {}))


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def rows_of(
    job: Job, network: Any, method: str, inputs: Callable[[], Mapping[str, torch.Tensor]], options: Mapping[str, Any]
) -> int:
    """How many rows `method` of the network's model gives for a micro-batch of `inputs`.

    Nothing is computed but whole numbers and masks, whose values are those of `inputs`; what is on the meta device
    there stands for tensors of that shape.  Raises CannotEstimate with what the network's code stumbled over.
    """
    from tonnage.step import model

    def asked(config: Any) -> int:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        nobody = _disable_current_modes(), _no_function_modes(), _no_global_hooks()
        with ExitStack() as stack:
            for each in (*nobody, fake, _WithoutComputing(), _Scalars(), torch.no_grad()):
                stack.enter_context(each)
            shapes = model.without_memory(network, "cpu", config)
            given = {name: torch.empty(each.shape) if each.is_meta else each for name, each in inputs().items()}
            inner = getattr(shapes, "model", shapes)
            ask = getattr(inner, method, None) or getattr(shapes, method)
            return _rows(_features(ask(**given, **options)))

    try:
        with contextlib.suppress(Exception):  # a tower of which a certain layer is taken, say
            return asked(_shallow(network.config, perception=True))
        return asked(_shallow(network.config))
    except Exception as error:  # whatever a family's code stumbles over
        what = "a sound" if "audio" in method else "an image"
        raise CannotEstimate(
            f"How many tokens {what} of {job.model.name} takes was not found "
            f"({type(error).__name__}: {' '.join(str(error).split())[:160]}); "
            "give package.module:factory with batch(job), or images=0 for text alone."
        ) from error


def _shallow(config: Any, *, perception: bool = False) -> Any:
    """The configuration of a network that reads with one layer, which is not asked.

    With `perception` it sees and hears with one layer as well: how many rows come out does not hang on the others.
    """
    text = config.get_text_config()
    if text is config or not isinstance(getattr(text, "num_hidden_layers", None), int):
        return config
    changed = copy.deepcopy(config)
    text = changed.get_text_config()
    text.num_hidden_layers = 1
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    for tower in (getattr(changed, name, None) for name in _TOWERS if perception):
        for depth in _DEPTHS:
            if isinstance(getattr(tower, depth, None), int):
                setattr(tower, depth, 1)
    return changed


@contextlib.contextmanager
def _no_function_modes() -> Iterator[None]:
    """Without the modes that follow what the card computes: nothing here is on it."""
    if torch._C._len_torch_function_stack() == 0:
        yield
        return
    with torch.overrides._pop_mode_temporarily(), _no_function_modes():
        yield


@contextlib.contextmanager
def _no_global_hooks() -> Iterator[None]:
    """Without the hooks of all modules: who watches the program would take what is asked here for a pass of its."""
    modules = torch.nn.modules.module
    names = ("_global_forward_pre_hooks", "_global_forward_hooks")
    kept = {name: getattr(modules, name) for name in names}
    for name, hooks in kept.items():
        setattr(modules, name, type(hooks)())
    try:
        yield
    finally:
        for name, hooks in kept.items():
            setattr(modules, name, hooks)


def _features(found: Any) -> Any:
    """What a text model gets of an output, where the family packs it into one."""
    for name in ("pooler_output", "last_hidden_state"):
        if getattr(found, name, None) is not None:
            return getattr(found, name)
    return found


def _rows(features: Any) -> int:
    if isinstance(features, torch.Tensor):
        return math.prod(features.shape[:-1])
    return sum(_rows(part) for part in features)
