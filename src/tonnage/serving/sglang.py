"""The memory that SGLang keeps free of weights and cache: by a rule of its settings, not by what a step needs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any, Final

from tonnage.cluster import Device
from tonnage.errors import CannotEstimate
from tonnage.options import is_amount
from tonnage.serving.facts import engine_facts
from tonnage.serving.kv_cache import LayerCache, Pool, Request
from tonnage.serving.network import ServedNetwork
from tonnage.serving.quantization import Quantization
from tonnage.units import GIB, MIB

TABLE_BYTES: Final = 4
"""Bytes of an element of a table of rotations, which vLLM keeps in the network's dtype."""


def facts() -> Mapping[str, Any]:
    """Return the numbers of the rule."""
    return engine_facts("sglang")


def chunk_tokens(device: Device) -> int:
    """Return the tokens of a chunk of prefill that SGLang takes on a card."""
    return int(_of_card(device)["chunk_tokens"])


def usual_part(
    device: Device,
    network: ServedNetwork,
    *,
    tokens: int | None,
    sequences: int | None,
    tp: int,
    pp: int,
    eager: bool,
) -> float:
    """Return the part of the card's memory for weights and cache.

    `tokens` of a chunk of prefill and `sequences` that run together are those that a user states.
    """
    rule, card, total_mib = facts(), _of_card(device), _total_mib(device)
    tokens = tokens or chunk_tokens(device)
    activated = max(tokens, rule["least_chunk_tokens"])
    reserved = rule["fixed_mib"] + rule["chunk_token_mib"] * activated + rule["rank_mib"] * tp * pp
    if not eager:
        largest = card["graph_sequences"][tp >= rule["many_ranks"]]
        reserved += rule["graph_sequence_mib"] * min(largest, sequences or largest)
        reserved += _prefill_graphs_mib(network, tokens) if pp == 1 else 0
    if total_mib > rule["large_mib"]:
        reserved = max(reserved, rule["least_of_large_mib"])
    return float(round(1 - reserved / total_mib, 3) * _part_beside_tower(network))


def with_state_dtype(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration that states the dtype of a recurrent state: fp32, where it states none."""
    stated = {**config, "mamba_ssm_dtype": config.get("mamba_ssm_dtype") or "float32"}
    text = config.get("text_config")
    return {**stated, "text_config": with_state_dtype(text)} if isinstance(text, Mapping) else stated


def kept_layers(layers: Sequence[LayerCache], kind: str) -> tuple[LayerCache, ...]:
    """Return the layers whose keys and values lie in the pool, which is divided by tokens.

    A layer with a window keeps all tokens; for some kinds of networks it has a pool of its own for fewer.  Raises
    CannotEstimate for a network of states alone.
    """
    rule = facts()["windows"]
    part = rule["part"] if kind in rule["kinds"] else 1.0
    kept = tuple(
        layer
        if layer.kind == "full"
        else replace(layer, kind="full", window=0, token_bytes=int(part * layer.token_bytes))
        for layer in layers
        if layer.kind != "state"
    )
    if layers and not kept:
        raise CannotEstimate("What SGLang keeps of a network of states alone is not known; name vllm with --engine.")
    return kept


def part_for_tokens(layers: Sequence[LayerCache]) -> float:
    """Return the part of the pool that is for keys and values; the rest is for states of fixed size."""
    has_states = any(layer.kind == "state" for layer in layers)
    return float(1 / (1 + facts()["states_by_tokens"])) if has_states else 1.0


def running_requests(pool: Pool, layers: Sequence[LayerCache], *, max_len: int, stated: int | None) -> int:
    """Return the requests that run together at most: the `stated` ones, or by the tokens; fewer beside states."""
    rule = facts()
    tokens = pool.tokens(Request(length=max_len, batched_tokens=0))
    usual = max(rule["sequences"], min(rule["most_sequences"], int(tokens / max_len * rule["sequences_of_longest"])))
    most = stated or min(usual, tokens // 2)
    state_bytes = sum(layer.state_bytes for layer in layers)
    if state_bytes:
        states = int(rule["states_by_tokens"] * pool.bytes / state_bytes) - 1
        most = min(most, states // rule["states_of_request"])
    return max(0, most)


def describe_longest(longest: int) -> str:
    """Return what becomes of requests that are longer than the pool, with which SGLang starts all the same."""
    return f"sglang refuses requests of more than {longest:,} tokens, as the pool holds no more"


def interval(quantization: Quantization) -> float:
    """Return by which part of itself the pool may be larger or smaller."""
    by_format = facts()["interval"]
    return float(by_format.get(quantization.name, by_format["any"]))


def towers_bytes(network: ServedNetwork) -> int:
    """Return the bytes of the cache for images or sounds that SGLang takes from the pool."""
    return int(facts()["towers"]["cache_mib"] * MIB) if network.has_towers else 0


def _of_card(device: Device) -> Mapping[str, Any]:
    total_mib = _total_mib(device)
    card: Mapping[str, Any] = next(row for row in facts()["cards"] if total_mib < row["below_mib"])
    return card


def _total_mib(device: Device) -> float:
    """Return the memory of a card as `nvidia-smi` shows it: the next whole GiB where nothing else is stated."""
    return (device.nvml_total_bytes or ceil(device.capacity_bytes / GIB) * GIB) / MIB


def _prefill_graphs_mib(network: ServedNetwork, tokens: int) -> float:
    """Return what is reserved for graphs of chunks of prefill of many sizes, which SGLang captures without images."""
    rule = facts()["prefill_graphs"]
    if network.has_towers and network.config.get("model_type") not in rule["with_towers"]:
        return 0.0
    if network.shape is not None and network.shape.latent_rank:
        return float(rule["latent_mib"])
    sizes = [size for first, last, step in rule["sizes"] for size in range(first, last + 1, step)]
    return float(rule["each_mib"] * len([size for size in sizes if size <= tokens]))


def _part_beside_tower(network: ServedNetwork) -> float:
    """Return by how much SGLang lowers the part where images enter the network (`adjust_mem_fraction_for_vlm`)."""
    tower = network.config.get("vision_config")
    if not isinstance(tower, Mapping):
        return 1.0
    rule = facts()["towers"]
    layers, width = (_amount(tower.get(name), usual) for name, usual in rule["usual"].items())
    usual_layers, usual_width = rule["usual"].values()
    growth = layers * width**2 / (usual_layers * usual_width**2) - 1
    least, most = rule["factors"]
    return float(rule["part"] * max(least, min(most, 1 - rule["part_of_growth"] * growth)))


def _amount(value: object, usual: float) -> float:
    return value if is_amount(value) else usual
