"""The weights that one rank of an engine loads, by role: of a network's own matrices and of what is beside them."""

from typing import Final

from tonnage.errors import CannotEstimate, UsageError
from tonnage.serving import sglang
from tonnage.serving.extras import extra_weights
from tonnage.serving.facts import is_by_transformers, router_bytes, unsplit_bytes
from tonnage.serving.network import ServedNetwork
from tonnage.serving.settings import FullSettings
from tonnage.serving.stored_weights import Share, stored_bytes
from tonnage.serving.towers import elements_on_rank, tower_ranks
from tonnage.serving.weights import MADE_AT_START, Weight, list_weights
from tonnage.timing.shape import Shape

_LEVELS: Final = "deepstack_visual_indexes"
"""Levels of Qwen3-VL's tower that layers of the text take: vLLM keeps a buffer of a step for each."""


def weights_by_part(network: ServedNetwork, full: FullSettings, stage: range) -> dict[str, int]:
    """Return the bytes of the weights of one rank of a stage by role."""
    stated = full.stated
    ep = full.expert_ranks if stated.ep > 1 else 1
    try:
        return {**_own_parts(network, full, stage, ep), **extra_weights(network, full, stage, ep=ep)}
    except ValueError as error:
        degrees = ", ".join(f"--{name} {value}" for name in ("tp", "dp") if (value := getattr(stated, name)) > 1)
        raise UsageError(f"{degrees}: {error}.") from None


def known_shape(network: ServedNetwork) -> Shape:
    """Return the widths of the layers.  Raises CannotEstimate where they, or the weights, are not known."""
    kind = network.config.get("model_type")
    if not network.stored and (network.shape is None or network.tower_elements is None):
        raise CannotEstimate(
            f"The weights of a {kind!r} network are not known; give its folder with safetensors files."
        )
    if network.shape is None:
        raise CannotEstimate(
            f"The layers of a {kind!r} network are not known, so neither is the peak of a step; run its engine: "
            "tonnage dry-run --gpu NAME -- vllm serve MODEL."
        )
    return network.shape


def _own_parts(network: ServedNetwork, full: FullSettings, stage: range, ep: int) -> dict[str, int]:
    """Return the bytes of the network's own weights.  Raises ValueError for degrees that do not divide them."""
    stated, shape = full.stated, known_shape(network)
    encoder_tp = 1 if stated.mm_encoder_tp_mode == "data" else stated.tp
    of_router = router_bytes(network.text_kind) if full.engine.name == "vllm" else None
    expert_tp = stated.tp * (stated.dp if shape.experts and stated.ep == 1 else 1)
    weights = list_weights(
        shape,
        tp=stated.tp,
        expert_tp=expert_tp,
        ep=ep,
        layers=stage,
        positions=network.rotary_rows if _has_tables(network, full) else 0,
        rotating=network.rotating_part,
        table_bytes=sglang.TABLE_BYTES if full.engine.name == "sglang" else None,
        padded_experts=full.quantization.name == "mxfp4",
        router_bytes=of_router,
    )

    unsplit = unsplit_bytes(full.engine)

    def bytes_of(weight: Weight) -> int:
        return weight.bytes(full.quantization, element_bytes=full.element_bytes, unsplit_bytes=unsplit)

    if network.stored:
        share = Share(
            layers=stage,
            is_last=stage.stop == shape.layers,
            tp=stated.tp,
            experts=ep if ep > 1 else expert_tp,
            kv_heads=shape.kv_heads,
            tied=shape.tied,
            tower=tower_ranks(network.config, encoder_tp),
        )
        parts = stored_bytes(
            network.stored,
            full.quantization,
            network.stored_as,
            share,
            element_bytes=full.element_bytes,
            router_bytes=of_router,
            allocated=True,
        )
        if full.quantization.experts_only:  # the engine pads them
            parts["experts"] = sum(bytes_of(weight) for weight in weights if weight.kind == "expert")
        made = [weight for weight in weights if weight.name in MADE_AT_START and not network.is_rough]
        return {**parts, **{weight.name: bytes_of(weight) for weight in made}}
    parts = {}
    for weight in weights:
        parts[weight.name] = parts.get(weight.name, 0) + bytes_of(weight)
    if network.tower_elements and stage.start == 0:
        held = elements_on_rank(network.config, network.tower_elements, encoder_tp)
        parts["towers"] = full.element_bytes * held
        levels = len(dict(network.config.get("vision_config") or {}).get(_LEVELS) or ())
        if full.engine.name == "vllm":
            parts["towers"] += full.element_bytes * levels * full.max_batched_tokens * shape.hidden
    return parts


def _has_tables(network: ServedNetwork, full: FullSettings) -> bool:
    """Return True if the engine keeps tables of rotations."""
    is_own = full.engine.name == "vllm" and not is_by_transformers(full.engine.version, network.text_kind)
    return is_own or full.engine.name == "sglang"
