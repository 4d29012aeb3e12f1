"""The network of a job: from a configuration or a factory to an nn.Module and batches that it trains on.

Hugging Face models are built on the meta device, tied, and then given memory parameter by parameter, as
`from_pretrained` does; no random number is drawn unless `initialise` is called.

Mixtures of experts run as transformers runs them by default: `grouped_mm` over 3-D expert weights where the card can
(compute capability 8.0; else, and on older torch, a loop or its own fallback over the same buffers).  In all of them
the shapes are tokens x experts-per-token whatever the router says; only the work of each expert depends on values.
The `eager` implementation (never chosen by default for these families) calls `nonzero` and `where` on the routing,
which a ghost takes to be balanced.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from tonnage.errors import CannotEstimate, UnreadableModel, UsageError
from tonnage.job import beyond_positions, check_tokens
from tonnage.step import heads, remarks, training
from tonnage.step.config_defaults import unsaid

if TYPE_CHECKING:
    from tonnage.job import Job
    from tonnage.model import ModelRef

Batch = dict[str, torch.Tensor]

_STUMBLED: Final = (
    *(ValueError, TypeError, AttributeError, KeyError, IndexError, RuntimeError, ImportError, AssertionError),
)
"""What transformers' code raises over a configuration that does not fit together."""

_IMPLEMENTATIONS: Final = {
    "eager": ("eager",),
    "sdpa": ("math", "efficient", "flash", "cudnn"),
    "flex_attention": ("flex",),
}
"""transformers' names of attention's implementations, and the values of the option that stand on each."""

_BLAMING_SECONDS: Final = 5.0
"""How long the field may be looked for that a configuration fails by."""

_PLAIN: Final = (torch.Tensor, nn.Parameter)
"""Classes of tensors that are nothing else."""

_LAYERDROPS: Final = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "speech_encoder_layerdrop")


def build(ref: ModelRef, *, dtype: torch.dtype, attention: str | None, device: torch.device) -> nn.Module:
    """The untrained network with all weights in `dtype` on `device` (meta for no memory at all).

    A factory is called under `device` with `dtype` as torch's default.
    """
    if ref.kind == "factory":
        return _from_factory(ref, dtype, device)
    network = _from_config(ref, dtype, attention)
    materialise(network, device)
    return network


def materialise(module: nn.Module, device: torch.device) -> None:
    """Give every meta parameter and buffer of `module` uninitialised memory on `device`, keeping ties.

    What is divided already stays where it is: on the host, where parameters are offloaded.  `Module.to_empty` would
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
    """Move buffers alone: parameters may rest elsewhere, and be brought for their use."""
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.device != device:
                child._buffers[name] = buffer.to(device)


def _allocate_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if type(tensor) in _PLAIN and tensor.is_contiguous():  # `empty_like` of a meta tensor is a program in Python
        memory = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    else:
        memory = torch.empty_like(tensor, device=device, requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        memory = nn.Parameter(memory, tensor.requires_grad)
        # What was noted about it; a fake tensor notes its own device there.
        memory.__dict__.update({name: noted for name, noted in vars(tensor).items() if name not in vars(memory)})
    return memory


def initialise(module: nn.Module) -> None:
    """Fill weights and buffers with the values a freshly made network has.

    Hugging Face models do it themselves; other modules through `reset_parameters`, as torch's own layers have it.
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
    """The outermost transformers model inside `module` (which may be a PEFT, DDP or FSDP wrapper), or None."""
    from transformers import PreTrainedModel

    return next((child for child in module.modules() if isinstance(child, PreTrainedModel)), None)


def elements(parameter: torch.Tensor) -> int:
    """How many numbers a parameter stands for: bitsandbytes packs two or more into an element."""
    packed = getattr(parameter, "quant_state", None)
    return math.prod(packed.shape) if packed is not None else parameter.numel()


class Absent(nn.Identity):  # type: ignore[misc]
    """Stands for a module that another rank holds, and hands on what it gets."""

    attention_type = "full_attention"
    """What networks of transformers 4 ask each layer for, to choose its mask."""

    def forward(self, given: torch.Tensor, *_others: Any, **_named: Any) -> torch.Tensor:
        return given


def layer_lists(module: nn.Module) -> list[list[nn.Module]]:
    """The repeated layers of a network: each outermost ModuleList or Sequential of identical-class children.

    Encoder-decoders have two.  Lists inside a layer (experts, the parts of a T5 block) do not count, nor do layers
    that another rank holds.
    """
    if is_layer_list(module):
        return [_present(module)]
    return [found for child in module.children() for found in layer_lists(child)]


def is_layer_list(module: nn.Module) -> bool:
    """True for a list of modules of one class that all have parameters."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    children = _present(module)
    weighty = all(next(child.parameters(), None) is not None for child in children)
    return len(children) > 0 and weighty and len({type(child) for child in children}) == 1


def _present(module: nn.Module) -> list[nn.Module]:
    return [child for child in module.children() if not isinstance(child, Absent)]


def layers(module: nn.Module) -> list[nn.Module]:
    """All repeated layers in order; see `layer_lists`."""
    return [layer for found in layer_lists(module) for layer in found]


def task(config: dict[str, Any]) -> str:
    """Which of `heads.TASKS` the configuration is for.  Raises UnreadableModel for types that cannot be trained."""
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
    fields, told = heads.trained_part(ref.config)
    head = heads.head(fields)
    try:
        config = _configuration(fields)
    except ImportError as error:
        raise CannotEstimate(
            f"transformers cannot be imported with torch {torch.__version__} and what else is installed "
            f"({_first_line(error)}); a library that is made for another torch, such as torchao, is the usual reason."
        ) from error
    except Exception as error:  # transformers' validation raises classes of several packages
        said = _said(error, fields, _configuration)
        raise UnreadableModel(f"The configuration of {ref.name} is not valid: {said}") from error
    try:
        left_out = tuple(unsaid(config, fields))
        completed = _completed(config, head, fields)
        made = partial(_made, head, config, dtype)
        network = made(attention)
    except _STUMBLED as error:
        if attention in _IMPLEMENTATIONS and _works(partial(_untrained, head, dtype, "eager"), fields):
            raise UsageError(_refused_attention(ref.name, head, attention, made)) from error
        said = _said(error, fields, partial(_untrained, head, dtype, attention))
        raise UnreadableModel(f"transformers cannot build {ref.name}: {said}") from error
    heads.remember(network, head)
    network.tie_weights()
    _without_values(network)
    training.prepare(network, head.task)
    for note in (told, head.note, *left_out, *completed, *_reference_code(network)):
        if note is not None:
            remarks.remark(network, note)
    return network.train()


def _untrained(head: heads.Head, dtype: torch.dtype, attention: str | None, fields: dict[str, Any]) -> Any:
    """The network of these fields, without memory."""
    config = _configuration(fields)
    _completed(config, head, fields)
    return _made(head, config, dtype, attention)


def _made(head: heads.Head, config: Any, dtype: torch.dtype, attention: str | None) -> Any:
    chosen = {"attn_implementation": attention} if attention else {}
    with torch.device("meta"), without_initialisation(), quiet():
        return _class(head)._from_config(_own_part(config, _class(head)), **_in(dtype), **chosen)


def _works(attempt: Callable[..., Any], *arguments: Any) -> bool:
    try:
        attempt(*arguments)
    except Exception:  # of whatever transformers raises
        return False
    return True


def _refused_attention(name: str, head: heads.Head, attention: str, make: Callable[[str], Any]) -> str:
    """One line about a network that transformers has, but not with this implementation of attention."""
    others = [other for other in _IMPLEMENTATIONS if other != attention and _works(make, other)]
    possible = ", ".join(["auto", *(value for other in others for value in _IMPLEMENTATIONS[other])])
    return (
        f"transformers' {head.class_name} has no {attention} attention, which {name} would need for --attention "
        f"{', '.join(_IMPLEMENTATIONS[attention])}; possible: {possible}."
    )


def _completed(config: Any, head: heads.Head, fields: dict[str, Any]) -> list[str]:
    """Makes the configuration one to train with; sentences on what that changes."""
    told = _complete(config, head.task)
    _tie_as_text(config, fields)
    return told


def _complete(config: Any, kind: str) -> list[str]:
    """What training needs and a published configuration may leave out; sentences on what that changes."""
    text, parts = text_config(config), _configurations(config)
    for part in (text, *parts):
        if part is text or hasattr(part, "use_cache"):
            part.use_cache = False  # a cache of keys and values has no place in training
    if kind in ("seq2seq", "speech-seq2seq", "image-text-to-text") and _is_encoder_decoder(config):
        for part in (config, text):
            if getattr(part, "pad_token_id", None) is None:
                part.pad_token_id = 0
            if getattr(part, "decoder_start_token_id", None) is None:
                part.decoder_start_token_id = part.pad_token_id
    if kind == "sequence-classification" and getattr(text, "pad_token_id", None) is None:
        text.pad_token_id = config.pad_token_id = 0  # where the last token of a row is looked for
    if getattr(config, "languages", None) and getattr(config, "default_language", "") is None:
        config.default_language = config.languages[0]  # X-MOD: adapters of one language are trained
    dropped = [(part, name) for part in parts for name in _LAYERDROPS if getattr(part, name, None)]
    for part, name in dropped:
        setattr(part, name, 0.0)
    return ["layerdrop drops no layer: the step that needs most"] if dropped else []


def _reference_code(network: nn.Module) -> list[str]:
    """A sentence for each library of kernels that is not installed, in whose place transformers' own code runs."""
    missing: dict[str, None] = {}
    for each in vars(sys.modules[type(network).__module__]).values():
        while inspect.isfunction(each):
            variables = inspect.getclosurevars(each).nonlocals
            if variables.get("is_new_implementation") is False and "package" in variables:
                missing[str(variables["package"])] = None
            each = getattr(each, "__wrapped__", None)
    return [
        f"{name} is not installed: transformers' reference code runs in its place, which keeps more for backward"
        for name in missing
    ]


def _tie_as_text(config: Any, stated: dict[str, Any]) -> None:
    """Where the configuration of several parts does not say whether the head is the embedding, its text model does.

    Some families' default is yes for the whole and no for the text model; checkpoints that then hold both are not
    tied by transformers when it loads them (modeling_utils, tie_weights).
    """
    text: Any = getattr(config, "text_config", None)
    if "tie_word_embeddings" not in stated and hasattr(text, "tie_word_embeddings"):
        config.tie_word_embeddings = text.tie_word_embeddings


def _is_encoder_decoder(config: Any) -> bool:
    return bool(getattr(config, "is_encoder_decoder", False)) or config.model_type.endswith("encoder-decoder")


def _configurations(config: Any) -> list[Any]:
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return [config, *(part for part in inner if part is not None)]


def text_config(config: Any) -> Any:
    """The configuration of the text model inside, of a decoder where there are several."""
    try:
        return config.get_text_config()
    except ValueError:  # transformers': several fit
        return config.get_text_config(decoder=True)


def _in(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype of weights by the name that `_from_config` has for it, `torch_dtype` before transformers 4.56."""
    from transformers import PretrainedConfig

    return {"dtype" if hasattr(PretrainedConfig(), "dtype") else "torch_dtype": dtype}


def _own_part(config: Any, made: Any) -> Any:
    """The configuration that the class is made from: a part of it for a text model that is listed with the whole."""
    wanted = made.config_class
    if isinstance(config, wanted):
        return config
    return next((part for part in _configurations(config) if isinstance(part, wanted)), config)


def _class(head: heads.Head) -> Any:
    import transformers

    return getattr(transformers, head.class_name)


def _without_values(network: nn.Module) -> None:
    """Weights that torch's oldest constructors (`torch.FloatTensor`) made on the host in spite of the meta device.

    Those that somebody divides as they are made (`deepspeed.zero.Init`) are on the card.
    """
    made: dict[int, nn.Parameter] = {}
    for child in network.modules():
        for name, weight in child._parameters.items():
            if weight is not None and weight.is_cpu:
                empty = torch.empty_like(weight, device="meta")
                child._parameters[name] = made.setdefault(id(weight), nn.Parameter(empty, weight.requires_grad))


def _configuration(config: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    fields = {key: copy.deepcopy(value) for key, value in config.items() if not key.startswith("_")}
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def without_memory(network: Any, device: str = "meta", config: Any = None) -> Any:
    """Another network of the same class and configuration, to ask for shapes: on `meta`, or among fake tensors.

    With a `config`, one of the same class and that configuration.
    """
    made_by = _class(heads.of(network))
    with torch.device(device), without_initialisation(), quiet():
        return made_by._from_config(config or network.config, **_in(torch.float32)).eval()


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
    """Without the warnings that libraries give each other about names that will change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _from_factory(ref: ModelRef, dtype: torch.dtype, device: torch.device) -> nn.Module:
    name = ref.factory or ""
    factory = _imported(name)
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


def _imported(name: str) -> Any:
    """What `package.module:name` names; the folder that tonnage was started in comes first, as for a script there."""
    module_name, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnreadableModel(
            f"Cannot import the factory {name!r}: {_first_line(error)}; give package.module:callable."
        ) from error


def check_positions(job: Job, module: nn.Module) -> None:
    """Refuse sequences longer than a table of learned positions, which a GPU would read beyond its end."""
    network = hugging_face(module)
    if network is None:
        return
    kind = heads.of(network).task
    if kind in ("image-text-contrast", "ctc"):  # whose batches are as short as the network has it
        return
    text = kind == "speech-seq2seq" or "input_ids" in inspect.signature(type(network).forward).parameters
    limit = longest_text(network) if text else None
    if limit is not None and job.seq_len > limit:
        raise beyond_positions(job, limit)


def longest_text(network: Any) -> int | None:
    """Tokens that a table of learned positions has room for; None without one."""
    name = "max_target_positions" if heads.of(network).task == "speech-seq2seq" else "max_position_embeddings"
    stated = getattr(text_config(network.config), name, None)
    return min(_learned_positions(network, stated), default=None) if isinstance(stated, int) else None


def _learned_positions(network: nn.Module, stated: int) -> Iterator[int]:
    """For each table of positions of about the stated length, how many tokens it serves.

    Some have spare rows before the first (OPT); where one stands for padding, positions begin behind it (RoBERTa).
    """
    for name, child in network.named_modules():
        if isinstance(child, nn.Embedding) and ("pos" in name or name.endswith("wpe")):
            behind = 0 if child.padding_idx is None else child.padding_idx + 1
            if stated <= child.num_embeddings <= stated + 8:
                yield min(stated, child.num_embeddings - behind)


def batch(job: Job, module: nn.Module, dtype: torch.dtype) -> Batch:
    """One micro-batch on the host, as a data loader hands it over: full sequences, no padding, so no mask.

    `dtype` is that of images.  A factory's module may offer `batch(job)`; a Hugging Face model inside it will do.
    """
    check_tokens(job)
    own = getattr(module, "batch", None)
    if callable(own):
        return _as_batch(own(job), type(module).__name__)
    network = hugging_face(module)
    if network is None:
        raise CannotEstimate(
            f"No batch is known for {type(module).__name__}; give it a method batch(job) that returns "
            "a dict of CPU tensors for its forward."
        )
    from tonnage.step import inputs

    return inputs.make(job, network, heads.of(network).task, dtype)


def _as_batch(made: object, network: str) -> Batch:
    """What a factory's network made, where it is a batch."""
    what = type(made).__name__
    if isinstance(made, Mapping):
        wrong = [f"{type(value).__name__} as {name!r}" for name, value in made.items() if not hasattr(value, "to")]
        if not wrong:
            return dict(made)
        what = wrong[0]
    raise CannotEstimate(f"batch(job) of {network} returned {what}; it must return a dict of CPU tensors.")


def loss_of(output: Any) -> torch.Tensor:
    """The loss in what a forward returned: its `loss`, the tensor itself, or the first of a tuple."""
    loss = getattr(output, "loss", output[0] if isinstance(output, tuple) else output)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise CannotEstimate(
            f"The forward returned {type(output).__name__} without a loss; it must return a scalar tensor, "
            "a tuple that starts with one, or an object with .loss."
        )
    return loss


def _said(error: Exception, fields: dict[str, Any], attempt: Callable[[dict[str, Any]], Any]) -> str:
    """What the error says, and where it does not say it the field to which it is due.

    Of a word that a table of transformers lacks, that is the field which has it; else the one without which
    `attempt` raises nothing.
    """
    if isinstance(error, KeyError) and error.args:
        named = list(_fields_with(error.args[0], fields))
        return f"{', '.join(named)} is {error}, which is not known there" if named else f"KeyError: {error}"
    said = _first_line(error)
    if any(name in said for name in fields):
        return said
    culprit = _culprit(fields, attempt)
    return said if culprit is None else f"{said} ({culprit} is {_shortened(fields[culprit])}; without it, it works)"


def _culprit(fields: dict[str, Any], attempt: Callable[[dict[str, Any]], Any]) -> str | None:
    """The first field that may be left out and without which the attempt works; None after some seconds."""
    until = time.monotonic() + _BLAMING_SECONDS
    for name in fields:
        left = {other: value for other, value in fields.items() if other != name}
        if name != "model_type" and _works(attempt, left):
            return name
        if time.monotonic() > until:
            return None
    return None


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _fields_with(wanted: Any, fields: dict[str, Any]) -> Iterator[str]:
    """The names of fields that have or hold a value, those of inner configurations with theirs in front."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from (f"{name}.{inner}" for inner in _fields_with(wanted, value))
        elif value == wanted or (isinstance(value, list) and wanted in value):
            yield name


def _first_line(error: Exception) -> str:
    """What the error says; of one that announces it in its first line, with the second."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
