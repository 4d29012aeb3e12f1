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
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from . import compiled, descent, detection, diffusion, generation, pretrained, routed, sized, swapped, tuning
from .host import ZEROS
from .imports import after_import
from .integers import KNOWN_BYTES, is_sparse, known_integers, of_compiler, unseen
from .native import Native

BIG_ELEMENTS = 1 << 16
"""Host tensors from this size on are not filled with random numbers."""

ASSUMED = {
    "finite": "torch.isfinite of a computed tensor is True",
    "all": "tensor.all() of a computed mask is True",
    "checks": "conditions that were computed and checked hold",
    "exact": "a computed number is nowhere exactly the constant that it is compared with",
    "nonzero": "nonzero() (also boolean indexing, where(mask)) of a computed mask selects every element",
    "descending": "L-BFGS does not converge: each step makes all its iterations, and each of them is remembered",
    "sized": "unique of computed values finds one (of rows all), bincount and one_hot of computed classes one",
    "routing": "topk of computed scores picks in turn: each expert gets its balanced share of the tokens",
    "detected": "a detector's samplers find as many objects as they take, and each box that it finds has one class",
    "padding": "attention masks computed on the GPU hold no padding",
    "packing": "position_ids computed on the GPU are one unpacked sequence",
    "generation": "generate() meets no end token: it goes on to its length limit",
    "weights": "pretrained weights were not read: shapes and dtypes come from the configuration",
    "files": "what was saved went into a folder that was deleted, without values; nothing was sent to the Hub",
    "trackers": "experiment trackers worked offline, in a folder that was deleted where they can be told one",
    "initialisation": "host tensors were not filled with random numbers",
    "host_optimizer": "optimizers did no arithmetic on host tensors (offloaded parameters)",
    "compiled_adam": "DeepSpeed's FusedAdam and CPUAdam were not compiled: their kernels do nothing, the rest is run",
    "swapped": "DeepSpeed's files of tensors were not written: reads and writes of them are counted alone",
}

_OPTIMIZERS = (
    *("adadelta", "adagrad", "adam", "adamax", "adamw", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd"),
    *("_adafactor", "_muon"),
)
"""Modules of torch.optim with a function of their name that updates parameters."""

TRACKERS = ("wandb", "mlflow", "comet_ml", "clearml", "swanlab", "neptune", "neptune_scale", "trackio")
"""Packages that the dry-run's environment told to work offline (tonnage.trackers)."""

DECIDING = frozenset({"all", "checks", "exact", "nonzero", "sized", "routing"})
"""Those with which a patch tells the program what else it would have copied from the card."""


class Policy:
    """The patches of one process, and which of them were needed."""

    def __init__(self, torch: Any, native: Native | None) -> None:
        self.torch = torch
        self.native = native
        self._used: dict[str, None] = {}
        self._library = torch.library.Library("aten", "IMPL")
        self._turns: dict[int, tuple[Any, Callable[[Any], Any]]] = {}
        self._nowhere: dict[int, Any] = {}
        self._told: Callable[[Any], Any] | None = None
        self._quiet = False

    def assumed(self) -> list[str]:
        """One sentence for each patch that was needed."""
        return [ASSUMED[name] for name in self._used]

    def use(self, name: str) -> None:
        """Note that the assumption `name` was made, unless a more telling one covers it."""
        if name in DECIDING and self.native is not None:
            self.native.note_computed_read()
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

    @contextlib.contextmanager
    def telling(self, rule: Callable[[Any], Any]) -> Iterator[None]:
        """Of a mask that is not known, `rule(shape)` says the values, or None."""
        self._told, before = rule, self._told
        try:
            yield
        finally:
            self._told = before

    def install(self) -> None:
        """Patch torch now, and other libraries when they are imported."""
        package = (sys.modules[f"{__package__}.{name}"] for name in _OF_VALUES)
        compiled.leave_alone(self.torch, package)
        self._patch_finite()
        self._patch_all()
        self._patch_equal()
        self._patch_first_gradients()
        self._patch_scale()
        self._patch_initialisation()
        self._patch_host_memory()
        self._patch_comparisons()
        self._patch_checks()
        sized.patch(self)
        routed.patch(self)
        for name in _OPTIMIZERS:
            after_import(f"torch.optim.{name}", functools.partial(self._patch_optimizer, name.lstrip("_")))
        after_import("torch.optim.lbfgs", functools.partial(descent.patch, self))
        for name in TRACKERS:
            after_import(name, lambda module: self.use("trackers"))
        self.torch.cuda._lazy_call(self._patch_nonzero)
        after_import("deepspeed.ops.op_builder.builder", self._patch_compiled_adam)
        after_import("triton.runtime.autotuner", tuning.patch)
        after_import("torch.distributed.distributed_c10d", self._patch_object_exchange)
        after_import("transformers.masking_utils", self._patch_masks)
        after_import("transformers.models.jetmoe.modeling_jetmoe", self._patch_counted_experts)
        after_import("transformers.models.gemma4.modeling_gemma4", self._patch_pooled_patches)
        after_import("transformers.models.switch_transformers.modeling_switch_transformers", self._patch_switch)
        for name in _DENOISING:
            after_import(f"transformers.models.{name}.modeling_{name}", self._patch_denoising)
        after_import("transformers.distributed.expert_parallel", self._patch_exchange_of_tokens)
        after_import("transformers.generation.utils", functools.partial(generation.patch, self))
        after_import("transformers.modeling_utils", functools.partial(pretrained.patch, self))
        after_import("transformers.modeling_utils", self._patch_multimodal)
        after_import("trl.trainer.sft_trainer", self._patch_counted_chunks)
        after_import("torchvision.models.detection._utils", functools.partial(detection.patch_sampler, self))
        after_import("torchvision.models.detection.rpn", functools.partial(detection.patch_proposals, self))
        after_import("torchvision.models.detection.roi_heads", functools.partial(detection.patch_heads, self))
        after_import("diffusers.models.modeling_utils", functools.partial(diffusion.patch, self))

    def read(self, tensor: Any) -> Any:
        """The tensor's values on the host if they are known or follow a rule (see `follow`), else None."""
        if self.torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # of vmap: it stands for many
            return None
        values = self.known(tensor)
        following = self.following(tensor) if values is None else None
        return values if following is None else following()

    def known(self, tensor: Any) -> Any:
        """The tensor's values on the host if they are known, else None."""
        if not tensor.is_cuda:
            return tensor
        if is_sparse(self.torch, tensor):
            return None
        if self.native is None or tensor.numel() == 0:
            return tensor.cpu()
        reach = _reach(tensor)
        if not self.native.known(tensor.data_ptr(), reach * tensor.element_size()):
            return None
        with unseen(self.torch):
            flat = self.torch.empty(reach, dtype=tensor.dtype, device="cpu")
            self.native.copy_values(flat.data_ptr(), tensor.data_ptr(), flat.nbytes)
            return self.torch.as_strided(flat, tensor.shape, tensor.stride())

    def write(self, tensor: Any, values: Any) -> None:
        """Make `values` known at `tensor`, by one copy to the card that needs no memory there.

        A tensor with gaps whose surroundings are not known stays as it is: a copy could not leave them out.
        """
        torch, reach = self.torch, _reach(tensor)
        if tensor.numel() == 0 or 0 in tensor.stride():
            return
        with unseen(torch):
            place = torch.as_strided(tensor, (reach,), (1,), tensor.storage_offset())
            whole = reach == tensor.numel()
            flat = torch.empty(reach, dtype=tensor.dtype, device="cpu") if whole else self.known(place)
            if flat is not None:
                torch.as_strided(flat, tensor.shape, tensor.stride()).copy_(values)
                if self.native is None:
                    place.copy_(flat)
                else:
                    self.native.copy_values(place.data_ptr(), flat.data_ptr(), flat.nbytes)

    def follow(self, tensor: Any, rule: Callable[[Any], Any]) -> None:
        """The fresh tensor's values are `rule(offsets of its elements)`, for it and for all views of it."""
        storage = tensor.untyped_storage()
        reductions = importlib.import_module("torch.multiprocessing.reductions")
        self._turns = {place: found for place, found in self._turns.items() if not found[0].expired()}
        self._turns[storage.data_ptr()] = (reductions.StorageWeakRef(storage), rule)

    def rule(self, tensor: Any) -> Callable[[Any], Any] | None:
        """The rule that gives its values from their offsets, if it or what it is a view of follows one."""
        if is_sparse(self.torch, tensor):
            return None
        found = self._turns.get(tensor.untyped_storage().data_ptr()) if self._turns else None
        return None if found is None or found[0].expired() else found[1]

    def following(self, tensor: Any) -> Callable[[], Any] | None:
        """What gives its values on the host, and notes that; None if it follows no rule."""
        torch, rule = self.torch, self.rule(tensor)
        if rule is None:
            return None
        start, dtype = tensor.storage_offset(), tensor.dtype
        layout = [*zip(tensor.shape, tensor.stride(), strict=True)]

        def values() -> Any:
            self.use("routing")
            offsets = torch.tensor(start)
            for size, stride in layout:
                offsets = offsets.unsqueeze(-1) + torch.arange(size) * stride
            return rule(offsets).to(dtype)

        return values

    def _filled(self, result: Any, values: Any) -> Any:
        """A result with other values: of a wrapped one by a copy of the program's own kind."""
        if not self.is_plain(result):
            return result.copy_(values)
        self.write(result, values)
        return result

    # -- torch

    def _patch_finite(self) -> None:
        torch, original = self.torch, self.torch.isfinite

        @functools.wraps(original)
        def isfinite(input: Any) -> Any:
            result = original(input)
            if torch.compiler.is_compiling() or not result.is_cuda:
                return result
            self.use("finite")
            return self._filled(result, torch.ones(result.shape, dtype=torch.bool, device="cpu"))

        torch.isfinite = isfinite
        torch.Tensor.isfinite = isfinite
        for name in ("isnan", "isinf"):
            for place in (torch, torch.Tensor):
                setattr(place, name, self._never(getattr(place, name)))
        for place in (torch, torch.Tensor):
            place.sum = self._counted(place.sum)

    def _never(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A question whose answer is no for every element; a program that counts the answers is told so."""
        torch = self.torch

        @functools.wraps(original)
        def asked(input: Any) -> Any:
            result = original(input)
            if torch.compiler.is_compiling() or not self.is_plain(result):
                return result
            small = result.is_cuda and result.numel() <= BIG_ELEMENTS
            if small and not torch.cuda.is_current_stream_capturing():
                self.write(result, torch.zeros(result.shape, dtype=torch.bool))
            return result

        return asked

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """How many elements of a mask are true, where it is known, follows a rule or holds nowhere."""
        torch = self.torch

        @functools.wraps(original)
        def total(input: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(input, *args, **kwargs)
            if torch.compiler.is_compiling() or not self.is_plain(input) or not input.is_cuda:
                return result
            following = self.following(input)
            if following is not None:
                if input.nbytes <= 64 * KNOWN_BYTES:
                    self.write(result, original(following(), *args, **kwargs))
                return result
            if input.dtype != torch.bool or result.numel() > BIG_ELEMENTS:
                return result
            if self._holds_nowhere(input):
                self.use("exact")
                self.write(result, torch.zeros(result.shape, dtype=result.dtype))
            elif not args and not kwargs and input.numel() <= BIG_ELEMENTS:
                values = self.known(input)
                if values is not None:
                    self.write(result, original(values))
            return result

        return total

    def is_plain(self, tensor: Any) -> bool:
        """Whether it is a tensor with memory of its own: not sparse, and not one of vmap, which stands for many."""
        wrapped = self.torch._C._functorch.is_functorch_wrapped_tensor
        return type(tensor) is self.torch.Tensor and not wrapped(tensor) and not is_sparse(self.torch, tensor)

    def _note_nowhere(self, mask: Any) -> None:
        """The fresh mask is false everywhere; nothing is written, but who counts it is told."""
        storage = mask.untyped_storage()
        reductions = importlib.import_module("torch.multiprocessing.reductions")
        self._nowhere = {place: found for place, found in self._nowhere.items() if not found.expired()}
        self._nowhere[storage.data_ptr()] = reductions.StorageWeakRef(storage)

    def _holds_nowhere(self, mask: Any) -> bool:
        found = self._nowhere.get(mask.untyped_storage().data_ptr()) if self._nowhere else None
        return found is not None and not found.expired()

    def _patch_all(self) -> None:
        torch = self.torch

        def patched(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def everywhere(input: Any, *args: Any, **kwargs: Any) -> Any:
                result = original(input, *args, **kwargs)
                if args or kwargs or torch.compiler.is_compiling() or not getattr(result, "is_cuda", False):
                    return result
                values = self.read(input)
                if values is None:
                    self.use("all")
                return self._filled(result, torch.tensor(values is None or bool(values.all()), device="cpu"))

            return everywhere

        torch.all = patched(torch.all)
        torch.Tensor.all = patched(torch.Tensor.all)
        torch._is_all_true = patched(torch._is_all_true)  # whose name torch.distributions checks parameters by

    def _patch_equal(self) -> None:
        """Two tensors whose values are known are equal or not; others are not, as ever."""
        torch, original = self.torch, self.torch.equal

        def equal(input: Any, other: Any) -> bool:
            result = original(input, other)
            plain = type(input) is torch.Tensor and type(other) is torch.Tensor
            if not plain or not input.is_cuda or max(input.numel(), other.numel()) > BIG_ELEMENTS:
                return bool(result)
            values, others = self.read(input), self.read(other)
            return bool(result if values is None or others is None else original(values, others))

        torch.equal = equal

    def _patch_first_gradients(self) -> None:
        """The gradient of a loss by itself is one; kernels that scale gradients look whether it is (Liger's do)."""
        torch, autograd = self.torch, self.torch.autograd
        original = autograd._make_grads

        @functools.wraps(original)
        def make_grads(outputs: Any, grads: Any, **options: Any) -> Any:
            made = original(outputs, grads, **options)
            first = (found for given, found in zip(grads, made, strict=False) if given is None)
            for found in first:
                scalar = (
                    not torch.compiler.is_compiling()
                    and self.is_plain(found)
                    and found.is_cuda
                    and found.numel() == 1
                )
                if scalar:
                    self.write(found, torch.ones(found.shape, dtype=found.dtype))
            return made

        autograd._make_grads = make_grads

    def _patch_scale(self) -> None:
        """A GradScaler's scale is what it began with: it grows after thousands of steps, and nothing overflows."""
        torch, kind = self.torch, self.torch.amp.GradScaler
        original = kind._lazy_init_scale_growth_tracker

        @functools.wraps(original)
        def begin(scaler: Any, device: Any) -> None:
            original(scaler, device)
            if self.is_plain(scaler._scale) and scaler._scale.is_cuda:
                self.write(scaler._scale, torch.full((), scaler._init_scale, device="cpu"))

        kind._lazy_init_scale_growth_tracker = begin

    def _patch_comparisons(self) -> None:
        """Where token ids from the host are compared with a number, the mask is known: image places, padding."""
        torch = self.torch

        def patched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def compared(input: Any, other: Any) -> Any:
                result = original(input, other)
                if (
                    torch.compiler.is_compiling()
                    or not isinstance(other, int | float)
                    or not getattr(input, "is_cuda", False)
                ):
                    return result
                if type(input) is torch.Tensor and input.is_floating_point() and name == "eq":
                    if self.is_plain(input) and self.known(input) is None:
                        self._note_nowhere(result)
                    return result
                if not isinstance(other, int):
                    return result
                if type(input) is torch.Tensor and not input.is_floating_point():
                    values = self.read(input)
                    if values is not None:
                        self.write(result, original(values, other))
                return result

            return compared

        for name in ("eq", "ne", "lt", "le", "gt", "ge"):
            for place, asked in ((torch, name), (torch.Tensor, name), (torch.Tensor, f"__{name}__")):
                setattr(place, asked, patched(name, getattr(place, asked)))
        torch.greater = patched("gt", torch.greater)

    def _patch_exchange_of_tokens(self, module: ModuleType) -> None:
        """Experts on several ranks: how many tokens go where is counted on the card and read back.

        With a balanced router every rank sends equally many tokens to each expert, and gets as many from each rank.
        """
        torch = self.torch
        kind = module.AllToAllEP  # type: ignore[attr-defined]
        dispatch, exchange = kind._dispatch_tokens, module.all_to_all_single  # type: ignore[attr-defined]
        integers = known_integers(self)
        choices = 0

        @functools.wraps(dispatch)
        def dispatch_tokens(experts: Any, hidden: Any, chosen: Any, weights: Any) -> Any:
            nonlocal choices
            if not hidden.is_cuda:
                return dispatch(experts, hidden, chosen, weights)
            self.use("routing")
            choices = chosen.numel() // experts.tp_mesh.size()
            with integers():
                return dispatch(experts, hidden, chosen, weights)

        @functools.wraps(exchange)
        def all_to_all_single(received: Any, sent: Any, *args: Any, **kwargs: Any) -> Any:
            work = exchange(received, sent, *args, **kwargs)
            if sent.is_cuda:
                count = sent.numel()
                balanced = torch.tensor([choices // count + (place < choices % count) for place in range(count)])
                balanced = balanced.view(sent.shape)
                self.write(sent, balanced)
                mine = torch.distributed.get_rank(kwargs.get("group"))
                self.write(received, balanced[mine].expand(received.shape))
            return work

        kind._dispatch_tokens = dispatch_tokens
        module.all_to_all_single = all_to_all_single  # type: ignore[attr-defined]

    def _patch_counted_experts(self, module: ModuleType) -> None:
        """JetMoE splits its tokens by counts of the router's choices; with a balanced router they differ by one."""
        kind = module.JetMoeTopKGating  # type: ignore[attr-defined]
        original = kind.forward

        @functools.wraps(original)
        def forward(gating: Any, hidden_states: Any) -> Any:
            order, places, gates, counts, logits = original(gating, hidden_states)
            if hidden_states.is_cuda:
                self.use("routing")
                choices, experts = order.numel(), len(counts)
                counts = [choices // experts + (place < choices % experts) for place in range(experts)]
            return order, places, gates, counts, logits

        kind.forward = forward

    def _patch_counted_chunks(self, module: ModuleType) -> None:
        """TRL 1.9 to 1.14 divide labels into chunks by a quotient that is computed on the card."""
        name = "_chunked_cross_entropy_loss"
        original = getattr(module, name, None)
        if original is None:
            return
        numbers = known_integers(self, numbers=True)

        @functools.wraps(original)
        def loss(*args: Any, **kwargs: Any) -> Any:
            with numbers():
                return original(*args, **kwargs)

        setattr(module, name, loss)

    def _patch_switch(self, module: ModuleType) -> None:
        """Switch Transformers ask expert by expert which tokens are theirs: in turn, as of topk's choices."""
        torch, kind = self.torch, module.SwitchTransformersExperts  # type: ignore[attr-defined]
        original = kind.forward

        @functools.wraps(original)
        def forward(experts: Any, hidden: Any, *args: Any) -> Any:
            asked = iter(range(experts.num_experts))

            def tokens(shape: Any) -> Any:
                self.use("routing")
                if len(shape) == 1:  # which experts are chosen at all
                    return torch.ones(shape, dtype=torch.bool)
                return (torch.arange(shape[-1]) % experts.num_experts == next(asked)).expand(shape)

            with self.telling(tokens) if hidden.is_cuda else contextlib.nullcontext():
                return original(experts, hidden, *args)

        kind.forward = forward

    def _patch_denoising(self, module: ModuleType) -> None:
        """RT-DETR's family looks up which noised queries are made of real boxes: that follows from their numbers."""
        torch = self.torch
        original = module.get_contrastive_denoising_training_group  # type: ignore[attr-defined]

        @functools.wraps(original)
        def group(targets: Any, *args: Any, **kwargs: Any) -> Any:
            counts = torch.tensor([len(target["class_labels"]) for target in targets]).unsqueeze(1)
            most = int(counts.max())

            def positive(shape: Any) -> Any:
                places = torch.arange(shape[-1]).expand(shape) % (2 * most)
                return places < counts

            with self.telling(positive) if targets[0]["class_labels"].is_cuda else contextlib.nullcontext():
                return original(targets, *args, **kwargs)

        module.get_contrastive_denoising_training_group = group  # type: ignore[attr-defined]

    def _patch_pooled_patches(self, module: ModuleType) -> None:
        """Gemma 4 keeps the pooled patches that weights say are no padding; the weights follow from known places."""
        torch, kind = self.torch, module.Gemma4VisionPooler  # type: ignore[attr-defined]
        original = kind._avg_pool_by_positions

        @functools.wraps(original)
        def pooled(pooler: Any, hidden: Any, places: Any, length: int) -> Any:
            output, mask = original(pooler, hidden, places, length)
            known = self.known(places) if hidden.is_cuda else None
            if known is not None:
                self.write(mask, original(pooler, torch.zeros(*hidden.shape[:2], 1), known, length)[1])
            return output, mask

        kind._avg_pool_by_positions = pooled

    def _patch_checks(self) -> None:
        """`torch._check_tensor_all`: a condition that was computed holds, as it does for data that is right."""
        torch = self.torch
        original = getattr(torch, "_check_tensor_all_with", None)
        if original is None:
            return

        @functools.wraps(original)
        def check(error: Any, condition: Any, message: Any = None) -> None:
            if isinstance(condition, torch.Tensor) and condition.is_cuda:
                # In a graph torch's own would ask for the value when that is run.
                values = None if of_compiler(condition) else self.read(condition)
                if values is None:
                    self.use("checks")
                    return
                condition = values
            original(error, condition, message)

        torch._check_tensor_all_with = check

    def _patch_nonzero(self) -> None:
        """At the dispatcher, because boolean indexing calls it from C++."""
        torch = self.torch

        def nonzero(mask: Any) -> Any:
            values = self.read(mask)
            if values is None and self._told is not None:
                values = self._told(mask.shape)
            if values is None:
                self.use("nonzero")
                values = torch.ones(mask.shape, dtype=torch.bool)
            return torch.nonzero(values).to(mask.device)

        def masked_select(tensor: Any, mask: Any) -> Any:
            """As torch's own kernel: by an index that is made of the mask."""
            tensor, mask = torch.broadcast_tensors(tensor, mask)
            return torch.ops.aten.index.Tensor(tensor, [mask])

        def masked_scatter_backward(gradient: Any, mask: Any, sizes: Any) -> Any:
            """As torch's own.  What was scattered says how many the mask chooses, also where that is computed."""
            count = math.prod(sizes)
            with self.telling(lambda shape: (torch.arange(math.prod(shape)) < count).view(shape)):
                chosen = torch.ops.aten.masked_select(gradient, mask)
            if chosen.numel() < count:
                chosen = torch.cat([chosen, chosen.new_zeros(count - chosen.numel())])
            return chosen.view(sizes)

        self.implement("masked_scatter_backward", masked_scatter_backward, "CUDA")
        self.implement("nonzero", nonzero, "CUDA")
        self.implement("masked_select", masked_select, "CUDA")

    def implement(self, operation: str, kernel: Callable[..., Any], device: str) -> None:
        """In place of torch's own kernel."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._library.impl(operation, kernel, device)

    def _patch_host_memory(self) -> None:
        """Offloaded states and shards hold nothing but what the card computed: zeros, which take no host memory.

        Nor does arithmetic that leaves them zero: an accumulated, clipped or unscaled gradient.
        """
        torch, native = self.torch, self.native
        if native is None:
            return
        aten, pin = torch.ops.aten, torch.Tensor.pin_memory

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
            *(("zero_", zero_), ("mul_.Tensor", mul_), ("add_.Tensor", add_)),
            *(("linalg_vector_norm", norm), ("_amp_foreach_non_finite_check_and_unscale_", unscale)),
        ):
            self.implement(operation, kernel, "CPU")
        torch.Tensor.pin_memory = pin_memory

    def _patch_initialisation(self) -> None:
        """Random numbers for billions of host elements take minutes and touch memory; their values do not matter."""
        torch = self.torch

        def patched(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def initialise(tensor: Any, *args: Any, **kwargs: Any) -> Any:
                if tensor.device.type == "cpu" and tensor.numel() >= BIG_ELEMENTS:
                    self.use("initialisation")
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

    def _patch_object_exchange(self, module: ModuleType) -> None:
        """Ranks that send each other objects compute with their sizes on the card: sum them, take the longest."""
        integers = known_integers(self)

        def patched(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def exchange(*args: Any, **kwargs: Any) -> Any:
                with integers():
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
        files = SimpleNamespace(aio_handle=swapped.operation(self.torch, lambda: self.use("swapped")))
        module.OpBuilder._loaded_ops |= {
            **{"fused_adam": on_card, "cpu_adam": on_host},
            **{"async_io": files, "pin_memory": SimpleNamespace(pin_handle=files.aio_handle)},
        }

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

    def follow_integers(self, *, numbers: bool = False) -> None:
        """From here on, in this thread, what is computed from known integers is known; or of all small `numbers`."""
        if self.torch._C._len_torch_function_stack() == 0:
            mode = known_integers(self, numbers=numbers)()
            self._take_over_in_backward(mode)
            mode.__enter__()

    def _take_over_in_backward(self, mode: Any) -> None:
        """Layers that were checkpointed run again in the engine's threads, which take over the caller's modes.

        A mode is put aside while it is asked, as it is about `backward`: the engine is then called without it.
        """
        autograd = self.torch.autograd
        original = autograd._engine_run_backward

        @functools.wraps(original)
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            aside = self.torch._C._len_torch_function_stack() == 0
            with mode if aside else contextlib.nullcontext():
                return original(*args, **kwargs)

        autograd._engine_run_backward = run_backward

    def _patch_multimodal(self, module: ModuleType) -> None:
        """Sizes of images, audio and video are integers on the card: what is computed from known ones is known.

        From the first call of such a model on, in this thread and in the backward passes that it starts.
        """
        torch = self.torch
        met: set[type] = set()

        def begin(model: Any) -> None:
            known_model = isinstance(model, module.PreTrainedModel)
            # before transformers 4.48 no configuration said which parts it has
            parts = getattr(model.config, "sub_configs", ()) if known_model else ()
            multimodal = known_model and (len(parts) > 0 or model.main_input_name in _HEARD)
            if multimodal and torch._C._len_torch_function_stack() == 0:
                handle.remove()
                compiled.follow(self)
                self.follow_integers()

        def first_call(called: Any, _args: Any) -> None:
            if type(called) in met or torch.compiler.is_compiling():
                return
            model = getattr(called, "_orig_mod", called)  # of what `torch.compile` has made
            if type(model) not in met:
                met.add(type(model))
                begin(model)

        @functools.wraps(torch.nn.Module.compile)
        def compile_in_place(model: Any, *args: Any, **kwargs: Any) -> None:
            """Its first call will be compiled as a whole."""
            begin(model)
            torch.nn.Module.compile(model, *args, **kwargs)

        module.PreTrainedModel.compile = compile_in_place  # type: ignore[attr-defined]
        handle = torch.nn.modules.module.register_module_forward_pre_hook(first_call)


_OBJECT_EXCHANGES = (
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)


def _reach(tensor: Any) -> int:
    """Elements from the first of a tensor to its last, gaps included."""
    return int(1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)))


_OF_VALUES = (
    "values",
    "integers",
    "native",
    "compiled",
    "descent",
    "detection",
    "diffusion",
    "generation",
    "pretrained",
    "routed",
    "sized",
)
"""Modules that look at values while a program runs."""
_DENOISING = ("d_fine", "deimv2", "pp_doclayout_v2", "pp_doclayout_v3", "rt_detr", "rt_detr_v2")
"""Types whose queries are noised boxes."""
_HEARD = ("input_values", "input_features")
"""Names of sounds, whose lengths and transcripts are integers."""
