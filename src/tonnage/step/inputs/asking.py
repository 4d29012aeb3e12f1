"""Shapes that a network's own code computes, run on tensors without memory."""

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
"""Parts of a configuration that describe how a network sees and hears."""

_DEPTHS = ("num_hidden_layers", "depth", "encoder_layers", "num_layers")
"""Names for the number of layers in such a part."""


class _ShapesOnly(TorchDispatchMode):  # type: ignore[misc]
    """Gives known integers and masks among fake tensors their values; an unknown mask selects everything."""

    def __init__(self) -> None:
        super().__init__()
        self._values = KnownValues()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if op is _ATEN._local_scalar_dense.default:
            known = self._values.compute(op, args, options)
            return 0 if known is None else known
        if op is _ATEN.nonzero.default:
            return self._positions_of_mask(args[0])
        if op in _BY_INDEX and any(_is_mask(index) for index in args[1]):
            args = (args[0], [place for index in args[1] for place in self._positions(index)], *args[2:])
        try:
            result = op(*args, **options)
        except DynamicOutputShapeException:
            known = self._values.compute(op, args, options)
            if known is None:
                raise
            result = torch.empty_like(known)
            self._values.keep(result, known)
            return result
        if op is _ATEN.eq.Scalar and args[0].is_floating_point():  # a computed number is taken to equal no constant
            self._values.keep(result, torch.zeros((), dtype=torch.bool).expand(result.shape))
            return result
        self._values.follow(op, args, options, result)
        return result

    def _positions(self, index: Any) -> list[Any]:
        return list(self._positions_of_mask(index).unbind(1)) if _is_mask(index) else [index]

    def _positions_of_mask(self, mask: torch.Tensor) -> torch.Tensor:
        known = self._values.compute(_ATEN.nonzero.default, (mask,), {})
        rows = math.prod(mask.shape) if known is None else known.shape[0]
        places = torch.empty(rows, mask.dim(), dtype=torch.long)
        if known is not None:
            self._values.keep(places, known)
        return places


class _ScalarTensors(torch.overrides.TorchFunctionMode):  # type: ignore[misc, name-defined]
    """Makes `torch.tensor` of a list of one-element tensors take their numbers."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.tensor and isinstance(args[0], list):
            values = [item.item() if isinstance(item, torch.Tensor) and item.dim() == 0 else item for item in args[0]]
            args = (values, *args[1:])
        return function(*args, **(kwargs or {}))


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def rows_of(
    job: Job, network: Any, method: str, inputs: Callable[[], Mapping[str, torch.Tensor]], options: Mapping[str, Any]
) -> int:
    """Return how many rows `method` of the network's model gives for a micro-batch of `inputs`.

    Only integers and masks are computed, whose values are those of `inputs`; a meta tensor among them stands for any
    tensor of that shape.  Raises CannotEstimate with the error of the network's code.
    """
    from tonnage.step import model

    def count_rows(config: Any) -> int:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        unobserved = _disable_current_modes(), _no_function_modes(), _no_global_hooks()
        with ExitStack() as stack:
            for context in (*unobserved, fake, _ShapesOnly(), _ScalarTensors(), torch.no_grad()):
                stack.enter_context(context)
            fake_network = model.without_memory(network, "cpu", config)
            given = {name: torch.empty(t.shape) if t.is_meta else t for name, t in inputs().items()}
            inner = getattr(fake_network, "model", fake_network)
            compute = getattr(inner, method, None) or getattr(fake_network, method)
            return _count_rows(_features(compute(**given, **options)))

    try:
        with contextlib.suppress(Exception):  # for example a tower of which a certain layer is used
            return count_rows(_shallow(network.config, perception=True))
        return count_rows(_shallow(network.config))
    except Exception as error:  # a family's code may raise anything
        what = "a sound" if "audio" in method else "an image"
        raise CannotEstimate(
            f"How many tokens {what} of {job.model.name} takes cannot be computed "
            f"({type(error).__name__}: {' '.join(str(error).split())[:160]}); "
            "give package.module:factory with batch(job), or images=0 for text alone."
        ) from error


def _shallow(config: Any, *, perception: bool = False) -> Any:
    """Return the configuration with one layer in the text model, which is not run.

    With `perception` its vision and audio towers have one layer as well: the number of rows does not depend on the
    others.
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
    """Leave the function modes that follow what the GPU computes: nothing here is on it."""
    if torch._C._len_torch_function_stack() == 0:
        yield
        return
    with torch.overrides._pop_mode_temporarily(), _no_function_modes():
        yield


@contextlib.contextmanager
def _no_global_hooks() -> Iterator[None]:
    """Remove the hooks of all modules: an observer of the program would take this call for a forward pass."""
    modules = torch.nn.modules.module
    names = ("_global_forward_pre_hooks", "_global_forward_hooks")
    hooks_by_name = {name: getattr(modules, name) for name in names}
    for name, hooks in hooks_by_name.items():
        setattr(modules, name, type(hooks)())
    try:
        yield
    finally:
        for name, hooks in hooks_by_name.items():
            setattr(modules, name, hooks)


def _features(output: Any) -> Any:
    """Return what a text model gets from an output, if the family wraps it in an output class."""
    for name in ("pooler_output", "last_hidden_state"):
        if getattr(output, name, None) is not None:
            return getattr(output, name)
    return output


def _count_rows(features: Any) -> int:
    if isinstance(features, torch.Tensor):
        return math.prod(features.shape[:-1])
    return sum(_count_rows(part) for part in features)
