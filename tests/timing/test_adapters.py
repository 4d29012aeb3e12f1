"""LoRA adapters: the linear modules that have them, and the bytes they move."""

from dataclasses import replace

import pytest

from tonnage.timing.adapters import adapted_products, has_adapter
from tonnage.timing.head import head_operations
from tonnage.timing.layer import layer_operations, products
from tonnage.timing.operations import Passes, Slice
from tonnage.timing.shape import Shape

LLAMA = Shape(
    layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, value_dim=16, intermediate=128, gated=True, vocab=100,
    tied=False, parts=3,
)  # fmt: skip


@pytest.mark.parametrize(
    ("targets", "products"),
    [
        (("all-linear",), None),
        (("q_proj", "v_proj"), {"query", "value"}),
        (("self_attn.q_proj", "mlp.down_proj"), {"query", "down"}),
        (("c_attn",), {"query", "key", "value"}),
        (("gate_up_proj",), {"gate", "up"}),
        (("q_proj", "something_else"), None),
    ],
)
def test_target_modules_are_named_as_products(targets: tuple[str, ...], products: set[str] | None) -> None:
    assert adapted_products(targets) == products


def test_a_merged_product_has_an_adapter_if_any_of_its_parts_has() -> None:
    query = frozenset({"query"})
    assert has_adapter("qkv", query)
    assert not has_adapter("up", query)
    assert has_adapter("up", frozenset({"gate"}))
    assert has_adapter("expert down", frozenset({"down"}))
    assert has_adapter("anything", None)


def test_a_layer_has_adapters_beside_its_targets_only() -> None:
    def names(among: frozenset[str] | None) -> list[str]:
        layer = layer_operations(LLAMA, Slice(tokens=8, seq_len=8, trained=False, lora_rank=4, adapted=among))
        return [op.name for op in layer.forward if op.name.endswith("adapter")]

    assert names(frozenset({"query", "value"})) == ["query adapter", "value adapter"]
    assert len(names(None)) == 7


def test_adapters_bytes_by_hand() -> None:
    """10 tokens, a query of 64 by 64: read k; write, scale and add n; under autocast the input is cast once more."""

    def moved(residual_bytes: int) -> tuple[float, float]:
        part = Slice(tokens=10, seq_len=10, trained=False, lora_rank=4, adapted=frozenset({"query"}))
        layer = layer_operations(LLAMA, replace(part, residual_bytes=residual_bytes))
        return tuple(
            next(op.bytes for op in passes if op.name.startswith("query adapter"))
            for passes in (layer.forward, layer.backward)
        )  # type: ignore[return-value]

    assert moved(2) == (10 * 2 * (64 + 6 * 64), 10 * 2 * (4 * 64 + 3 * 64))
    assert moved(4) == (10 * 2 * (64 + 6 * 64) + 10 * 64 * 6, 10 * 2 * (4 * 64 + 3 * 64) + 10 * 64 * 12)


def test_adapters_in_fp32_beside_16_bits_by_hand() -> None:
    """10 tokens, a query of 64 by 64, rank 4: casts both ways, and products outside tensor cores."""
    part = Slice(tokens=10, seq_len=10, trained=False, lora_rank=4, adapted=frozenset({"query"}), wide_adapters=True)
    layer = layer_operations(LLAMA, part)
    forward, backward = (
        [op for op in passes if op.name.startswith("query adapter")] for passes in (layer.forward, layer.backward)
    )
    assert [op.bytes for op in forward] == [10 * (10 * 64 + 28 * 64), 0]
    assert [op.bytes for op in backward] == [10 * (20 * 64 + 22 * 64), 0]
    assert (forward[1].family, forward[1].dtype) == ("matmul", "fp32")
    assert forward[1].flops == 2 * 10 * 4 * (64 + 64)
    assert backward[1].flops == 2 * forward[1].flops


def test_everything_but_quantized_products_is_fp32_by_hand() -> None:
    """10 tokens, width 64: attention and head multiply in fp32, and each product has its rows cast there and back."""
    narrow = Slice(tokens=10, seq_len=10, trained=False, quantized=True, backend="eager")
    wide = replace(narrow, wide_between=True, residual_bytes=4)
    layer, head = layer_operations(LLAMA, wide), head_operations(LLAMA, wide)
    dtypes = {op.name: op.dtype for op in (*layer.forward, *head.forward)}
    assert (dtypes["attention"], dtypes["head"], dtypes["query"]) == ("fp32", "fp32", "bf16")
    [casts] = [op for op in layer.backward if op.name == "casts around products"]
    assert casts.bytes == sum(6 * 10 * (one.k + one.n) for one in products(LLAMA, wide))
    assert "casts around products" not in {op.name for op in layer_operations(LLAMA, narrow).forward}
    moved = [next(op.bytes for op in layer.forward if op.name == "activation") for layer in _layers(narrow, wide)]
    assert moved[1] == 2 * moved[0]


def test_adapters_in_fp32_have_those_casts_already() -> None:
    part = Slice(tokens=10, seq_len=10, trained=False, quantized=True, wide_between=True, residual_bytes=4)
    adapted = replace(part, lora_rank=4, wide_adapters=True)
    assert "casts around products" not in {op.name for op in layer_operations(LLAMA, adapted).forward}


def _layers(*parts: Slice) -> list[Passes]:
    return [layer_operations(LLAMA, part) for part in parts]
