"""The network of a job: builds an nn.Module from a configuration or a factory, and batches that it trains on.

Hugging Face models are built on the meta device, tied, and then given memory parameter by parameter, as
`from_pretrained` does; no random number is drawn unless `initialise` is called.

Mixtures of experts run as transformers runs them by default: `grouped_mm` over 3-D expert weights if the GPU supports
it (compute capability 8.0; else, and on older torch, a loop or its own fallback over the same buffers).  In all of
them the shapes are tokens x experts-per-token whatever the router decides; only the work of each expert depends on
values.  The `eager` implementation (never the default for these families) calls `nonzero` and `where` on the routing,
which a ghost takes to be balanced.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from tonnage.errors import CannotEstimate, UnreadableModel, UsageError
from tonnage.job import beyond_positions, check_tokens
from tonnage.step import configuration, heads, remarks, training
from tonnage.step.config_defaults import describe_unstated_sizes
from tonnage.step.config_errors import NOT_BUILT, describe, first_line, works
from tonnage.step.configuration import text_config

if TYPE_CHECKING:
    from tonnage.job import Job
    from tonnage.model import ModelRef

Batch = dict[str, torch.Tensor]

_BUILD_ERRORS: Final = (
    *(ValueError, TypeError, AttributeError, KeyError, IndexError, RuntimeError, ImportError, AssertionError),
)
"""Errors that transformers raises for a configuration whose fields do not fit together."""

_IMPLEMENTATIONS: Final = {
    "eager": ("eager",),
    "sdpa": ("math", "efficient", "flash", "cudnn"),
    "flex_attention": ("flex",),
}
"""transformers' names of attention implementations, and the values of --attention that need each."""


_PLAIN_CLASSES: Final = (torch.Tensor, nn.Parameter)
"""Tensor classes without behaviour of their own."""


def build(ref: ModelRef, *, dtype: torch.dtype, attention: str | None, device: torch.device) -> nn.Module:
    """Return the untrained network with all weights in `dtype` on `device`; on meta it takes no memory.

    A factory is called under `device` with `dtype` as torch's default.
    """
    if ref.kind == "factory":
        return _from_factory(ref, dtype, device)
    network = _from_config(ref, dtype, attention)
    materialise(network, device)
    return network


def materialise(module: nn.Module, device: torch.device) -> None:
    """Give every meta parameter and buffer of `module` uninitialised memory on `device`, keeping ties.

    DTensors that have memory stay where they are: on the host if parameters are offloaded.  `Module.to_empty` would
    break the tie between embedding and head, and allocate one of them twice.
    """
    if device.type == "meta":
        return
    from torch.distributed.tensor import DTensor

    made: dict[int, torch.Tensor] = {}
    for child in module.modules():
        for store in (child._parameters, child._buffers):
            for name, tensor in store.items():
                if tensor is not None and tensor.is_meta:
                    if id(tensor) not in made:
                        made[id(tensor)] = _allocate_like(tensor, device)
                    store[name] = made[id(tensor)]
                elif not (tensor is None or tensor.device == device or isinstance(tensor, DTensor)):
                    # a buffer with values, made on the host
                    store[name] = made.setdefault(id(tensor), tensor.to(device))


def buffers_to(module: nn.Module, device: torch.device) -> None:
    """Move buffers alone; parameters may rest elsewhere and be copied only for their use."""
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.device != device:
                child._buffers[name] = buffer.to(device)


def _allocate_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if type(tensor) in _PLAIN_CLASSES and tensor.is_contiguous():  # `empty_like` of a meta tensor runs Python code
        memory = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    else:
        memory = torch.empty_like(tensor, device=device, requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        memory = nn.Parameter(memory, tensor.requires_grad)
        # Copy attributes that were set on it, but not over those that a fake tensor keeps itself, such as its device.
        memory.__dict__.update({name: value for name, value in vars(tensor).items() if name not in vars(memory)})
    return memory


def initialise(module: nn.Module) -> None:
    """Fill weights and buffers with the values of a freshly made network.

    Hugging Face models do it themselves; other modules through `reset_parameters`, as torch's own layers do.
    """
    network = hugging_face(module)
    if network is not None:
        network.initialize_weights()
    for child in module.modules():
        if hasattr(child, "reset_lora_parameters"):  # PEFT's layers: A random, B zero
            for adapter in child.lora_A:
                child.reset_lora_parameters(adapter, True)
        elif network is None and hasattr(child, "reset_parameters"):
            child.reset_parameters()


def hugging_face(module: nn.Module) -> Any | None:
    """Return the outermost transformers model inside `module`, which may be a PEFT, DDP or FSDP wrapper; None
    without one.
    """
    from transformers import PreTrainedModel

    return next((child for child in module.modules() if isinstance(child, PreTrainedModel)), None)


def elements(parameter: torch.Tensor) -> int:
    """Return how many numbers a parameter holds: bitsandbytes packs two or more into an element."""
    packed = getattr(parameter, "quant_state", None)
    return math.prod(packed.shape) if packed is not None else parameter.numel()


class Absent(nn.Identity):  # type: ignore[misc]
    """Stands for a module that another rank holds, and returns its input."""

    attention_type = "full_attention"
    """Attribute that networks of transformers 4 read from each layer to choose its mask."""

    def forward(self, given: torch.Tensor, *_others: Any, **_named: Any) -> torch.Tensor:
        return given


def layer_lists(module: nn.Module) -> list[list[nn.Module]]:
    """Return the repeated layers of a network: each outermost ModuleList or Sequential of identical-class children.

    Encoder-decoders have two.  Lists inside a layer (experts, the parts of a T5 block) do not count, nor do layers
    that another rank holds.
    """
    if is_layer_list(module):
        return [_present_children(module)]
    return [layer_list for child in module.children() for layer_list in layer_lists(child)]


def is_layer_list(module: nn.Module) -> bool:
    """Return True for a list of modules of one class that all have parameters."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    children = _present_children(module)
    weighty = all(map(has_parameters, children))
    return len(children) > 0 and weighty and len({type(child) for child in children}) == 1


def has_parameters(module: nn.Module) -> bool:
    """Return True if the module or a module inside it has parameters."""
    return next(module.parameters(), None) is not None


def _present_children(module: nn.Module) -> list[nn.Module]:
    return [child for child in module.children() if not isinstance(child, Absent)]


def layers(module: nn.Module) -> list[nn.Module]:
    """Return all repeated layers in order; see `layer_lists`."""
    return [layer for layer_list in layer_lists(module) for layer in layer_list]


def task(config: dict[str, Any]) -> str:
    """Return the task, one of `heads.TASKS`, that the configuration is for.

    Raises UnreadableModel for types that cannot be trained.
    """
    return heads.head(heads.trained_part(config)[0]).task


def network_and_task(module: nn.Module) -> tuple[Any, str]:
    """Return transformers' network inside the module and its task; None and `unknown` where there is none."""
    network = hugging_face(module)
    return network, "unknown" if network is None else task(network.config.to_dict())


def causal_network(module: nn.Module, wanted: str, instead: str) -> Any:
    """Return transformers' causal language model inside the module.

    Raises CannotEstimate when it is something else; `wanted` is what needs one, `instead` what can be chosen.
    """
    network, kind = network_and_task(module)
    if kind != "causal-lm":
        raise CannotEstimate(f"{wanted} needs a causal language model, not {kind}; choose {instead}.")
    return network


def _from_config(ref: ModelRef, dtype: torch.dtype, attention: str | None) -> nn.Module:
    fields, part_note = heads.trained_part(ref.config)
    head = heads.head(fields)
    try:
        config = configuration.make(fields)
    except ImportError as error:
        raise CannotEstimate(
            f"transformers cannot be imported with torch {torch.__version__} and what else is installed "
            f"({first_line(error)}); a library built for another torch, such as torchao, is the usual reason."
        ) from error
    except Exception as error:  # transformers' validation raises classes of several packages
        reason = describe(error, fields, configuration.make)
        raise UnreadableModel(f"The configuration of {ref.name} is not valid: {reason}") from error
    try:
        left_out = tuple(describe_unstated_sizes(config, fields))
        changes = configuration.complete_for_training(config, head, fields)
        build_with = partial(_instantiate, head, config, dtype)
        network = build_with(attention)
    except _BUILD_ERRORS as error:
        if attention in _IMPLEMENTATIONS and works(partial(_build_from_fields, head, dtype, "eager"), fields):
            raise UsageError(_explain_missing_attention(ref.name, head, attention, build_with)) from error
        reason = describe(error, fields, partial(_build_from_fields, head, dtype, attention))
        raise UnreadableModel(f"transformers cannot build {ref.name}: {reason}") from error
    heads.remember(network, head)
    network.tie_weights()
    _move_to_meta(network)
    training.prepare(network, head.task)
    for note in (part_note, head.note, *left_out, *changes, *_notes_on_missing_kernels(network)):
        if note is not None:
            remarks.remark(network, note)
    return network.train()


def _build_from_fields(head: heads.Head, dtype: torch.dtype, attention: str | None, fields: dict[str, Any]) -> Any:
    """Return the network of these fields, without memory."""
    config = configuration.make(fields)
    configuration.complete_for_training(config, head, fields)
    return _instantiate(head, config, dtype, attention)


def _instantiate(head: heads.Head, config: Any, dtype: torch.dtype, attention: str | None) -> Any:
    chosen = {"attn_implementation": attention} if attention else {}
    model_class = _class(head)
    with torch.device("meta"), without_initialisation(), quiet():
        return model_class._from_config(configuration.part_for(config, model_class), **_dtype_option(dtype), **chosen)


def _explain_missing_attention(name: str, head: heads.Head, attention: str, make: Callable[[str], Any]) -> str:
    """Return one line about a network that transformers has, but not with this implementation of attention."""
    others = [other for other in _IMPLEMENTATIONS if other != attention and works(make, other)]
    possible = ", ".join(["auto", *(value for other in others for value in _IMPLEMENTATIONS[other])])
    return (
        f"transformers' {head.class_name} has no {attention} attention, which {name} {NOT_BUILT} "
        f"{', '.join(_IMPLEMENTATIONS[attention])}; possible: {possible}."
    )


def _notes_on_missing_kernels(network: nn.Module) -> list[str]:
    """Return a sentence for each kernel library that is not installed, which transformers' own code replaces."""
    missing: dict[str, None] = {}
    for value in vars(sys.modules[type(network).__module__]).values():
        while inspect.isfunction(value):
            variables = inspect.getclosurevars(value).nonlocals
            if variables.get("is_new_implementation") is False and "package" in variables:
                missing[str(variables["package"])] = None
            value = getattr(value, "__wrapped__", None)
    return [
        f"{name} is not installed: transformers' reference code runs in its place, which keeps more for backward"
        for name in missing
    ]


def _dtype_option(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtype of weights under `_from_config`'s name for it: `torch_dtype` before transformers 4.56."""
    from transformers import PretrainedConfig

    return {"dtype" if hasattr(PretrainedConfig(), "dtype") else "torch_dtype": dtype}


def _class(head: heads.Head) -> Any:
    import transformers

    return getattr(transformers, head.class_name)


def _move_to_meta(network: nn.Module) -> None:
    """Move weights to meta that torch's oldest constructors (`torch.FloatTensor`) made on the host in spite of it.

    Weights that something shards as they are made (`deepspeed.zero.Init`) are on the GPU and stay there.
    """
    made: dict[int, nn.Parameter] = {}
    for child in network.modules():
        for name, weight in child._parameters.items():
            if weight is not None and weight.is_cpu:
                empty = torch.empty_like(weight, device="meta")
                child._parameters[name] = made.setdefault(id(weight), nn.Parameter(empty, weight.requires_grad))


def without_memory(network: Any, device: str = "meta", config: Any = None) -> Any:
    """Return another network of the same class and configuration, to ask for shapes: on `meta`, or among fake
    tensors.

    With a `config`, it has that configuration.
    """
    made_by = _class(heads.of(network))
    with torch.device(device), without_initialisation(), quiet():
        return made_by._from_config(config or network.config, **_dtype_option(torch.float32)).eval()


@contextmanager
def without_initialisation() -> Iterator[None]:
    """Make weights without drawing random numbers, in torch's layers, transformers and PEFT alike."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # before transformers 5
        from transformers.modeling_utils import no_init_weights
    with no_init_weights():
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings, such as those of libraries about each other's deprecated names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _from_factory(ref: ModelRef, dtype: torch.dtype, device: torch.device) -> nn.Module:
    name = ref.factory or ""
    factory = _import_factory(name)
    if not callable(factory):
        raise UnreadableModel(
            f"{name} is a {type(factory).__name__}; give a function that returns a torch.nn.Module."
        )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            module = factory()
    finally:
        torch.set_default_dtype(before)
    if not isinstance(module, nn.Module):
        raise UnreadableModel(f"{name} returned {type(module).__name__}; it must return a torch.nn.Module.")
    return module.train()


def _import_factory(name: str) -> Any:
    """Return what `package.module:name` names; modules in the current folder come first, as for a script there."""
    module_name, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnreadableModel(
            f"Cannot import the factory {name!r}: {first_line(error)}; give package.module:callable."
        ) from error


def check_positions(job: Job, module: nn.Module) -> None:
    """Raise UsageError for sequences longer than a table of learned positions, which a GPU would read out of
    bounds.
    """
    network = hugging_face(module)
    if network is None:
        return
    kind = heads.of(network).task
    if kind in ("image-text-contrast", "ctc"):  # whose batches are as short as the network allows
        return
    text = kind == "speech-seq2seq" or "input_ids" in inspect.signature(type(network).forward).parameters
    limit = longest_text(network) if text else None
    if limit is not None and job.seq_len > limit:
        raise beyond_positions(job, limit)


def longest_text(network: Any) -> int | None:
    """Return the tokens that a table of learned positions has room for; None without one."""
    name = "max_target_positions" if heads.of(network).task == "speech-seq2seq" else "max_position_embeddings"
    stated = getattr(text_config(network.config), name, None)
    return min(_learned_positions(network, stated), default=None) if isinstance(stated, int) else None


def _learned_positions(network: nn.Module, stated: int) -> Iterator[int]:
    """Yield the tokens that each table of about `stated` positions has room for.

    Some have spare rows before the first (OPT); if one row stands for padding, positions begin behind it (RoBERTa).
    """
    for name, child in network.named_modules():
        if isinstance(child, nn.Embedding) and ("pos" in name or name.endswith("wpe")):
            behind = 0 if child.padding_idx is None else child.padding_idx + 1
            if stated <= child.num_embeddings <= stated + 8:
                yield min(stated, child.num_embeddings - behind)


def batch(job: Job, module: nn.Module, dtype: torch.dtype) -> Batch:
    """Return one micro-batch on the host, as a data loader yields it: full sequences without padding, hence no mask.

    `dtype` is that of images.  A factory's module may offer `batch(job)`; otherwise a Hugging Face model inside it is
    used.
    """
    check_tokens(job)
    own = getattr(module, "batch", None)
    if callable(own):
        return _check_batch(own(job), type(module).__name__)
    network = hugging_face(module)
    if network is None:
        raise CannotEstimate(
            f"No batch can be made for {type(module).__name__}; give it a method batch(job) that returns "
            "a dict of CPU tensors for its forward."
        )
    from tonnage.step import inputs

    return inputs.make(job, network, heads.of(network).task, dtype)


def _check_batch(made: object, network: str) -> Batch:
    """Return what a factory's network made.  Raises CannotEstimate if it is no batch."""
    what = type(made).__name__
    if isinstance(made, Mapping):
        wrong = [f"{type(value).__name__} as {name!r}" for name, value in made.items() if not hasattr(value, "to")]
        if not wrong:
            return dict(made)
        what = wrong[0]
    raise CannotEstimate(f"batch(job) of {network} returned {what}; it must return a dict of CPU tensors.")


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss from what a forward returned: its `loss`, the tensor itself, or the first of a tuple."""
    loss = getattr(output, "loss", output[0] if isinstance(output, tuple) else output)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise CannotEstimate(
            f"The forward returned {type(output).__name__} without a loss; it must return a scalar tensor, "
            "a tuple that starts with one, or an object with .loss."
        )
    return loss
