"""A network to be served: its dimensions, the format of its weights, the tensors of its folder if there is one."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Final

from tonnage.catalog.configurations import find_config_file, read_config, resolve
from tonnage.catalog.models import find_model
from tonnage.errors import CannotEstimate, UnknownNetwork, UnreadableModel, UsageError
from tonnage.job import Job
from tonnage.model import ModelRef, text_part
from tonnage.options import is_amount
from tonnage.serving.quantization import (
    NONE,
    Quantization,
    describe_format,
    find_quantization,
    keeps_fp8_cache,
    read_quantization,
)
from tonnage.serving.safetensors import StoredTensor, read_folder
from tonnage.serving.towers import TOWERS
from tonnage.timing.kinds import read_shape
from tonnage.timing.shape import Shape
from tonnage.timing.stacks import read_stacks
from tonnage.units import format_size


@dataclass(frozen=True, kw_only=True)
class ServedNetwork:
    """A network, and what its publisher made of its weights."""

    name: str
    """The catalog's name, or the folder's."""
    model: str
    """The model as the user wrote it."""
    config: Mapping[str, Any]
    """Hugging Face configuration."""
    shape: Shape | None
    """Dimensions of the layers for text; None for a kind that is not known."""
    tower_elements: int | None
    """Weights of towers for images or sounds; None where they are not known."""
    max_positions: int | None
    """Longest request that the configuration allows."""
    published: Quantization
    """Format of the published weights."""
    stored: tuple[StoredTensor, ...] = ()
    """Tensors of the folder's safetensors files, or those that `is_built` says; empty without them."""
    is_built: bool = False
    """True if `stored` has the weights of the network that transformers builds, in 16 bits."""
    has_rough_tower: bool = False
    """True if the weights of a tower are estimated from its widths."""
    is_rough: bool = False
    """True if the kind of the network is not known, and `shape` has its widths as if its layers were Qwen3's, or
    feed-forward networks where they have no attention."""
    has_fp8_cache: bool = False
    """True if the checkpoint says that keys and values are kept in 8-bit floats."""
    draft: "ServedNetwork | None" = None
    """Network that drafts tokens for this one."""

    @property
    def text_kind(self) -> str:
        """Return the type of the layers for text."""
        return str(text_part(self.config).get("model_type"))

    @property
    def has_towers(self) -> bool:
        """Return True if images or sounds enter the network too."""
        return bool(self.tower_elements) or any(name in self.config for name in TOWERS)

    @property
    def parameters(self) -> int | None:
        """Return the number of weights; None where it is not known."""
        if self.is_built:
            return sum(prod(tensor.shape) for tensor in self.stored)
        if self.shape is None or self.is_rough:
            return None
        return self.shape.parameters + (self.tower_elements or 0)

    @property
    def stored_as(self) -> Quantization:
        """Return the format of the tensors of `stored`."""
        return NONE if self.is_built else self.published

    @property
    def is_quantized(self) -> bool:
        """Return True if the user's own folder or file says that its weights are quantized."""
        return self.published.bits < NONE.bits and find_model(self.model) is None

    def load_as(self, word: str | None) -> Quantization:
        """Return the format in which an engine loads the weights, with this word of `--quantization`.

        A word for the method of the weights as they are leaves them so.  Raises UsageError for a format into which
        they cannot be turned.
        """
        published, wanted = self.published, self.published if word is None else find_quantization(word)
        if wanted.name == published.name or (wanted.method and wanted.method == published.method):
            return published
        if self.is_quantized or (published.bits < NONE.bits and wanted.online):
            raise UsageError(
                f"{self.name} has {published.name} weights already, and engines refuse another --quantization; leave "
                f"it out, or name a checkpoint with {describe_format(NONE if wanted.online else wanted)} weights."
            )
        return wanted

    @property
    def most_positions(self) -> int:
        """Return the longest request with scaled rotations: YaRN's make it longer than the configuration states."""
        return max((_stretched(part, self.max_positions or 0, _LONGER) for part in self._rotations), default=0)

    @property
    def rotary_rows(self) -> int:
        """Return the rows of all tables of rotations: two where layers with a window rotate otherwise."""
        rows = {str(part): self._rows(part) for part in self._rotations}
        return sum(rows.values())

    def _rows(self, part: Mapping[str, Any]) -> int:
        """Return the rows of a table: vLLM makes more where an image's patches have places of several dimensions."""
        more = "mrope_section" in part and not str(self.config.get("model_type")).startswith(_FEWER_PLACES)
        return _stretched(part, self.max_positions or 0, _MORE_ROWS) * (_MORE_PLACES if more else 1)

    @property
    def rotating_part(self) -> float:
        """Return the part of the layers that rotate queries and keys."""
        rotates = self._text.get("no_rope_layers")  # 1 for each layer that rotates
        return sum(map(bool, rotates)) / len(rotates) or 1.0 if isinstance(rotates, list) and rotates else 1.0

    @property
    def _rotations(self) -> tuple[Mapping[str, Any], ...]:
        """Return the parameters of each way in which layers rotate."""
        text = self._text
        stated = text.get("rope_scaling") or text.get("rope_parameters")
        if not isinstance(stated, Mapping):
            stated = {}
        parts = tuple(part for part in stated.values() if isinstance(part, Mapping)) or (stated,)
        return (*parts, {"local": True}) if text.get("rope_local_base_freq") and len(parts) == 1 else parts

    @property
    def _text(self) -> Mapping[str, Any]:
        return ModelRef(name="", kind="config", config=dict(self.config)).text


_WIDEST: Final = 10**6
"""Width, or number of layers, that no tower has."""

_MOST_STRETCHED: Final = 10_000
"""Factor by which no rotation is stretched."""

_LONGER: Final = ("yarn",)
"""Scaled rotations with which requests may be longer than the configuration states."""

_MORE_ROWS: Final = ("yarn", "linear", "dynamic")
"""Scaled rotations whose table has a row for each position times their factor."""

_MORE_PLACES: Final = 4
_FEWER_PLACES: Final = ("qwen3_vl", "qwen3_5")
"""Factor of a table's rows for images with places of several dimensions, and kinds without it (`positions_factor` of
`MRotaryEmbedding` in vLLM 0.33.0)."""

_LEAST_BYTES: Final = 0.4
"""Bytes of a parameter that no format goes below: 4 bits, and a head that may be the embedding's."""


def _stretched(part: Mapping[str, Any], positions: int, kinds: tuple[str, ...]) -> int:
    """Return the positions with a way to rotate, stretched by its factor if it is one of these kinds."""
    kind, factor = part.get("rope_type") or part.get("type"), part.get("factor")
    original = part.get("original_max_position_embeddings") if kind == "yarn" else positions
    if kind in kinds and is_amount(original) and is_amount(factor) and factor < _MOST_STRETCHED:
        return int(original * factor)
    return positions


def generates_no_text(name: str, kind: object) -> CannotEstimate:
    """Return the error for a network whose head, a class or a type, gives no words of an answer."""
    return CannotEstimate(
        f"{name} generates no text ({kind}), and what an engine makes of "
        "such a network has no closed form; vLLM serves some for embeddings or classes, not for images: tonnage "
        "dry-run --gpu NAME -- vllm serve MODEL --runner pooling."
    )


def read_network(model: str, *, offline: bool = False) -> ServedNetwork:
    """Return the network that MODEL names.  Raises UnknownModel, UnreadableModel, CannotEstimate."""
    reference = resolve(model, offline=offline)
    if reference.kind == "factory":
        raise CannotEstimate(
            f"{model} is a factory; engines serve models with a config.json: give its folder or file."
        )
    known = find_model(model)
    published = read_quantization(known.quantization) if known is not None and known.quantization else NONE
    file = find_config_file(model)
    stored: tuple[StoredTensor, ...] = ()
    has_fp8_cache = False
    if known is None and file is not None:
        stated = read_config(file).get("quantization_config")
        published = NONE if stated is None else read_quantization(stated)
        has_fp8_cache = keeps_fp8_cache(stated)
        if Path(model).is_dir():
            stored = read_folder(Path(model))
    network = replace(make_network(reference, model, published, stored), has_fp8_cache=has_fp8_cache)
    _check_complete(network)
    return network


def _check_complete(network: ServedNetwork) -> None:
    """Raise UnreadableModel if a folder holds far less than its configuration: files are missing."""
    if not network.stored or network.shape is None or network.is_rough:
        return
    held, parameters = sum(tensor.bytes for tensor in network.stored), network.shape.parameters
    if held < _LEAST_BYTES * parameters:
        raise UnreadableModel(
            f"{network.model!r} holds {format_size(held)} of weights, too little for the {parameters:,} parameters "
            "of its configuration; files are missing."
        )


def make_network(
    reference: ModelRef, model: str, published: Quantization = NONE, stored: tuple[StoredTensor, ...] = ()
) -> ServedNetwork:
    """Return the network of a configuration, as the user named it `model`."""
    shape, towers, has_rough_tower = _dimensions(reference)
    published_model = find_model(model)
    if published_model is not None and shape is not None and towers and not has_rough_tower:
        towers = published_model.parameters - shape.parameters  # with parts between tower and text
    is_rough = shape is None and bool(stored)
    if is_rough:  # its weights are in the files; the rest needs only widths
        shape = rough_shape(reference)
    return ServedNetwork(
        name=reference.name,
        model=model,
        config=reference.config,
        shape=shape,
        tower_elements=towers,
        max_positions=reference.positions,
        published=published,
        stored=stored,
        has_rough_tower=has_rough_tower,
        is_rough=is_rough and shape is not None,
    )


def rough_shape(reference: ModelRef) -> Shape | None:
    """Return the widths of a network of an unknown kind, as if its layers were Qwen3's; None where fields lack.

    Layers without attention count as feed-forward networks of the inner width: as many weights as a Mamba layer has.
    """
    text = dict(reference.text)
    has_experts = any(text.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    kind = "qwen3_moe" if has_experts else "qwen3"
    has_attention = any(text.get(name) for name in ("num_attention_heads", "n_head"))
    if not has_attention:
        inner = text.get("intermediate_size") or text.get("expand", 2) * text.get("hidden_size", 0)
        text |= {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 1, "intermediate_size": inner}
    try:
        shape = replace(read_shape({**text, "model_type": kind}), unmeasured="")
    except UnknownNetwork:
        return None
    if has_attention:
        return shape
    shape = replace(shape, heads=0, kv_heads=0, head_dim=0, value_dim=0)
    return replace(shape, head_norms=False, head_norm_parameters=0)


def _dimensions(reference: ModelRef) -> tuple[Shape | None, int | None, bool]:
    """Return the Shape of the layers for text, the weights of all others, and whether these are estimated.

    None stands for what is not known.
    """
    try:
        stacks = read_stacks(Job(model=reference))
        return replace(stacks[-1].shape, unmeasured=""), sum(stack.shape.parameters for stack in stacks[:-1]), False
    except UnknownNetwork:
        pass
    text = {"tie_word_embeddings": reference.config.get("tie_word_embeddings", False), **reference.text}
    try:
        shape = replace(read_shape(text), unmeasured="")
    except UnknownNetwork:
        return None, None, False
    return shape, _rough_tower(reference.config, shape.hidden), True


def _rough_tower(config: Mapping[str, Any], hidden: int) -> int | None:
    """Return about how many weights a tower for images has, with a projection to `hidden`; None if it is not known.

    Layers have four square matrices and two, or with a gate three, of the inner width; the others are a few percent.
    """
    tower = config.get("vision_config")
    if not isinstance(tower, dict) or any(name in config for name in ("audio_config", "speech_config")):
        return None
    names = (("hidden_size",), ("intermediate_size",), ("num_hidden_layers", "depth"))
    sizes = [next((tower[name] for name in options if name in tower), None) for options in names]
    known = [value for value in sizes if type(value) is int and 0 < value < _WIDEST]
    if len(known) < len(names):
        return None
    width, inner, layers = known
    matrices = 3 if tower.get("hidden_act") in ("silu", "swiglu") else 2
    return int(layers * (4 * width**2 + matrices * width * inner) + hidden * (4 * width + hidden))
