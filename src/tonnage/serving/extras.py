"""Memory of an engine beside its network: slots for LoRA adapters, and layers or a network that drafts tokens.

Adapters have one tensor for each matrix and slot, whether it is used or not (vllm/lora/layers, 0.33).  A draft is
verified by the network in one step; with an acceptance a, K drafted tokens give (1 - a^(K+1)) / (1 - a) tokens on
average (Leviathan et al. 2023, arXiv 2211.17192, equation 1).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import ceil
from typing import Any, Final

from tonnage.errors import CannotEstimate, UsageError
from tonnage.model import text_part
from tonnage.serving.cache_layers import read_layers
from tonnage.serving.facts import has_adapter_words, unsplit_bytes
from tonnage.serving.kv_cache import BLOCK_TOKENS, LayerCache, heads_on_rank
from tonnage.serving.network import ServedNetwork
from tonnage.serving.settings import ADAPTER_RANKS, DRAFTS_WITHOUT_NETWORK, FullSettings, ServeSettings
from tonnage.serving.stored_weights import Share, stored_bytes
from tonnage.serving.weights import Weight, list_weights
from tonnage.timing.shape import Shape

_MOST_WORDS: Final = 258_048
"""Words of a network whose adapters vLLM serves (LogitsProcessorWithLoRA)."""

_OWN: Final = ("embedding", "head", "rotation table", "norms and biases")
"""Weights that layers for further tokens share with the network, or too small to count."""

OF_VLLM: Final = {
    **dict.fromkeys(("max_loras", "max_lora_rank"), "LoRA adapters"),
    **{"draft": "drafts", "sleep_mode": "sleep mode", "no_prefix_caching": "a cache without prefixes"},
    "mm_encoder_tp_mode": "image encoders on several ranks",
}
"""Settings that are known of vLLM alone."""

_PREDICTING: Final = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Fields of configurations that count the layers which predict further tokens."""
_PREDICTS_UNSTATED: Final = "qwen3_next"
"""Kind that has one such layer where its configuration does not say so (qwen3_next_mtp.py)."""


def check_extras(full: FullSettings, network: ServedNetwork) -> None:
    """Raise UsageError or CannotEstimate for adapters or drafts that are not possible, or not known."""
    stated = full.stated
    for name, words in OF_VLLM.items():
        if getattr(stated, name) and full.engine.name != "vllm":
            raise CannotEstimate(f"The memory of {words} is known of vllm, and not of {full.engine.name}.")
    if full.engine.name == "transformers" and stated.pp * stated.ep > 1:
        raise UsageError("transformers' continuous batching has neither pipeline stages nor expert parallelism.")
    shape = network.shape
    if stated.ep > 1 and shape is not None and not shape.experts:
        raise UsageError(f"{network.name} has no experts to divide among ranks; leave --ep out.")
    if full.engine.name == "vllm" and stated.block_tokens % BLOCK_TOKENS:
        raise UsageError(
            f"block-tokens is {stated.block_tokens}; vLLM's attention takes multiples of {BLOCK_TOKENS}."
        )
    if has_adapters(stated) and shape is not None:
        if stated.max_lora_rank is not None and stated.max_lora_rank not in ADAPTER_RANKS:
            possible = ", ".join(map(str, ADAPTER_RANKS))
            raise UsageError(f"max-lora-rank is {stated.max_lora_rank}; vLLM's ranks are {possible}.")
        if shape.latent_rank:
            raise CannotEstimate("The adapters of latent attention are not known.")
        if has_adapter_words(network.text_kind) and shape.vocab > _MOST_WORDS:
            raise UsageError(f"vLLM serves adapters of networks with at most {_MOST_WORDS:,} words.")
    _check_draft(stated, network)


def _check_draft(stated: ServeSettings, network: ServedNetwork) -> None:
    if stated.draft is None:
        wrong = next((name for name in ("draft_tokens", "acceptance") if getattr(stated, name) is not None), None)
        if wrong is not None:
            raise UsageError(f"--{wrong.replace('_', '-')} needs --draft: ngram, mtp or a model.")
        return
    if stated.draft_tokens is None:
        raise UsageError(f"--draft {stated.draft} needs --draft-tokens, how many tokens are drafted in a step.")
    if stated.pp > 1:
        raise CannotEstimate("The memory of drafts on pipeline stages is not known.")
    if stated.draft == "mtp" and not count_predicting(network):
        raise UsageError(f"{network.name} has no layers that predict further tokens; draft with ngram or a model.")
    if stated.draft in DRAFTS_WITHOUT_NETWORK:
        return
    draft = network.draft
    if draft is None or draft.shape is None:
        raise CannotEstimate(f"The layers of the draft {stated.draft!r} are not known.")
    if any("eagle" in str(name).lower() for name in draft.config.get("architectures") or ()):
        raise CannotEstimate("The memory of EAGLE heads is not known; they share words with their network.")
    if network.shape is not None and draft.shape.vocab != network.shape.vocab:
        raise UsageError(
            f"{draft.name} has {draft.shape.vocab:,} words and {network.name} {network.shape.vocab:,}; a draft needs "
            "the same."
        )


def has_adapters(stated: ServeSettings) -> bool:
    """Return True if LoRA adapters are served."""
    return stated.max_loras is not None or stated.max_lora_rank is not None


def count_predicting(network: ServedNetwork) -> int:
    """Return the layers of a network that predict further tokens."""
    text = text_part(network.config)
    unstated = int(network.text_kind == _PREDICTS_UNSTATED)
    return next((text[name] for name in _PREDICTING if type(text.get(name)) is int), unstated)


def extra_weights(network: ServedNetwork, full: FullSettings, stage: range, *, ep: int) -> Mapping[str, int]:
    """Return the bytes of adapters and drafts on one rank of a stage, by part.

    Raises ValueError for a degree by which a draft cannot be divided.
    """
    parts = {}
    stated, shape, unsplit = full.stated, network.shape, unsplit_bytes(full.engine)
    if has_adapters(stated) and shape is not None:
        words = has_adapter_words(network.text_kind)
        weights = list(list_adapters(shape, full, ep=ep, layers=len(stage), words=words))
        parts["adapters"] = sum(weight.bytes(full.quantization, unsplit_bytes=unsplit) for weight in weights)
    if stated.draft == "mtp" and network.stored:
        parts["draft"] = stored_draft_bytes(network, full, ep=ep)
    elif stated.draft == "mtp" and shape is not None:
        layer = predicting_weights(shape, full, ep=ep)
        held = sum(weight.bytes(full.quantization, unsplit_bytes=unsplit) for weight in layer)
        parts["draft"] = count_predicting(network) * held
    elif stated.draft not in (None, *DRAFTS_WITHOUT_NETWORK):
        draft = network.draft
        assert draft is not None
        assert draft.shape is not None
        found = list_weights(draft.shape, tp=stated.tp, positions=draft.rotary_rows)
        parts["draft"] = sum(weight.bytes(draft.published, unsplit_bytes=unsplit) for weight in found)
    return parts


def stored_draft_bytes(network: ServedNetwork, full: FullSettings, *, ep: int) -> int:
    """Return the bytes of a folder's layers that predict further tokens: behind the last one, or named `mtp`."""
    first = 0 if network.shape is None else network.shape.layers
    behind = range(first, first + count_predicting(network))
    share = Share(layers=behind, tp=full.stated.tp, experts=max(ep, full.stated.tp))
    found = stored_bytes(network.stored, full.quantization, network.stored_as, share, further=True, allocated=True)
    return sum(found.values())


def predicting_weights(shape: Shape, full: FullSettings, *, ep: int) -> list[Weight]:
    """Return the matrices of one layer that predicts a further token: those of the last layer, and one that joins the
    token with the state."""
    last = range(shape.layers - 1, shape.layers)
    layer = [
        weight for weight in list_weights(shape, tp=full.stated.tp, ep=ep, layers=last) if weight.name not in _OWN
    ]
    return [*layer, Weight(name="joins", rows=shape.hidden, columns=2 * shape.hidden, kind="other")]


def list_adapters(shape: Shape, full: FullSettings, *, ep: int, layers: int, words: bool) -> Iterator[Weight]:
    """Yield the tensors of all adapters' slots on one rank: (rank, inputs) and (outputs, rank) of each matrix.

    Adapters of merged matrices are separate.  Of a matrix whose outputs are divided the first tensor is whole on
    each rank, and of one whose inputs are divided the second.
    """
    stated = full.stated
    slots, rank, tp = stated.max_loras or 1, stated.max_lora_rank or ADAPTER_RANKS[2], stated.tp
    h = shape.hidden

    def pair(name: str, inputs: int, outputs: int, count: int, stacked: int = 1) -> Iterator[Weight]:
        for rows, columns in ((rank, inputs), (outputs, rank)):
            yield Weight(name=name, rows=rows, columns=columns, stacked=slots * stacked, count=count, kind="other")

    queries, keys = shape.query_width // tp, heads_on_rank(shape.kv_heads, tp)
    yield from pair("queries", h, queries, layers)
    yield from pair("keys", h, keys * shape.head_dim, layers)
    yield from pair("values", h, keys * shape.value_dim, layers)
    yield from pair("output", shape.heads * shape.value_dim // tp, h, layers)
    routed = layers if shape.experts and not shape.dense_layers else max(0, layers - shape.dense_layers)
    routed = routed if shape.experts else 0
    merged = 2 if shape.gated else 1
    for inner, count in ((shape.intermediate, layers - routed), (shape.shared_intermediate, routed)):
        if inner and count:
            yield from pair("gate and up", h, inner // tp, merged * count)
            yield from pair("down", inner // tp, h, count)
    if routed:
        inner = shape.expert_intermediate // (1 if ep > 1 else tp)
        yield from pair("experts up", h, inner, merged * routed, ceil(shape.experts / ep))
        yield from pair("experts down", inner, h, routed, ceil(shape.experts / ep))
        yield from pair("router", h, shape.experts, routed)
    if words:
        yield from pair("head", h, shape.vocab, 1)
        yield from pair("embedding", shape.vocab, h, 1)


def draft_layers(
    network: ServedNetwork, full: FullSettings, layers: tuple[LayerCache, ...]
) -> tuple[LayerCache, ...]:
    """Return the layers of a draft that keep something of a request, beside the network's own `layers`."""
    stated = full.stated
    if stated.draft == "mtp":
        whole = next((layer for layer in reversed(layers) if layer.kind == "full"), layers[-1])
        return (whole,) * count_predicting(network)
    if stated.draft is None or stated.draft in DRAFTS_WITHOUT_NETWORK:
        return ()
    assert network.draft is not None
    return read_layers(network.draft.config, element_bytes=full.kv_element_bytes, tp=stated.tp)


def accepted_tokens(acceptance: float, drafted: int) -> float:
    """Return the mean tokens of a step in which so many were drafted, each accepted with this probability."""
    if acceptance >= 1:
        return drafted + 1.0
    return (1 - acceptance ** (drafted + 1)) / (1 - acceptance)


def with_draft(network: ServedNetwork, draft: ServedNetwork | None) -> ServedNetwork:
    """Return a network with the one that drafts for it."""
    return replace(network, draft=draft)


def describe_extras(network: ServedNetwork, full: FullSettings, weights_bytes: int) -> Iterator[str]:
    """Yield what is assumed of, or lacks in, the memory of adapters, drafts, exchanges and sleep."""
    from tonnage.units import format_gib

    stated = full.stated
    if has_adapters(stated):
        yield "adapters on all matrices of the layers, as without --lora-target-modules; 16 bits"
    if stated.draft is not None:
        yield "buffers of drafting and of rejecting drafts are not modelled"
        if stated.acceptance is None:
            yield "no speed: how many drafts are accepted is not stated (--acceptance 0.7)"
    if stated.sleep_mode:
        kept = format_gib(weights_bytes)
        yield f"asleep (level 1) the weights of each GPU, {kept}, are in host memory; level 2 keeps none"
    if stated.ep > 1 and stated.dp > 1:
        yield "expert-parallel ranks gather tokens as vLLM does by default; buffers of DeepEP are not known"
    if full.engine.name == "sglang" and stated.tp * stated.pp * stated.dp > 1:
        yield "sglang divides weights and cache among ranks as vLLM does"


def as_draft(value: Any) -> str | None:
    """Return the model that drafts; None for a word that names no model."""
    return value if isinstance(value, str) and value not in DRAFTS_WITHOUT_NETWORK else None
