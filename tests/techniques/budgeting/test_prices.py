"""Prices of operations on a known GPU, and on an unknown one."""

from types import SimpleNamespace

import pytest
import torch

from tonnage.catalog.devices import find_device
from tonnage.techniques.budgeting import prices

CARD = torch.device("cuda")
MM, ADD, VIEW = torch.ops.aten.mm.default, torch.ops.aten.add.Tensor, torch.ops.aten.t.default


@pytest.fixture
def named(monkeypatch):
    """Give this machine's device that name."""
    return lambda name: monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)


def matrices(*shapes):
    return [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]


def test_a_product_takes_its_flops_at_part_of_the_peak(named):
    named("NVIDIA H100 80GB HBM3")
    a, b, c = matrices((8192, 4096), (4096, 4096), (8192, 4096))
    seconds, flops = prices.on(CARD)(MM, (a, b), {}, c)
    assert flops == 2 * 8192 * 4096 * 4096
    assert 0.5 < flops / find_device("h100-80gb").peak_flops.bf16 / seconds < 1


def test_the_rest_takes_its_bytes(named):
    named("NVIDIA H100 80GB HBM3")
    a, b, c = matrices(*[(8192, 4096)] * 3)
    seconds, flops = prices.on(CARD)(ADD, (a, b), {}, c)
    assert flops == 0
    assert 0.5 < 3 * 8192 * 4096 * 2 / find_device("h100-80gb").bandwidth_bytes_per_second / seconds < 1
    assert prices.on(CARD)(VIEW, (a,), {}, a.t()) == (0.0, 0.0)


def test_attention_counts_the_heads_of_the_queries():
    """Two products forward and five backward, each 2 x 1024 x 1024 x 64 for every one of 8 heads of 2 sequences."""
    q, k, v, out = matrices((2, 8, 1024, 64), (2, 2, 1024, 64), (2, 2, 1024, 64), (2, 8, 1024, 64))
    forward = torch.ops.aten._scaled_dot_product_flash_attention.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    each = 2 * 8 * 2 * 1024 * 1024 * 64
    assert prices._flops(forward, (q, k, v), {}, (out,)) == 2 * each
    assert prices._flops(backward, (out, q, k, v), {}, (q, k, v)) == 5 * each


def test_an_unknown_card_has_bytes_and_flops(named):
    named("A card of tomorrow")
    a, b, c = matrices((64, 64), (64, 64), (64, 64))
    product, flops = prices.on(CARD)(MM, (a, b), {}, c)
    sum_, _ = prices.on(CARD)(ADD, (a, b), {}, c)
    assert product - sum_ == pytest.approx(flops / 1e14)
    assert sum_ == pytest.approx(3 * 64 * 64 * 2 / 1e12)
    assert prices.kernel_seconds(CARD) == 0.0


def test_the_link_of_a_card(named):
    named("Tesla T4")
    assert prices.link_bytes_per_second(CARD) == pytest.approx(0.85 * find_device("t4").pcie_bytes_per_second)
    assert prices.kernel_seconds(CARD) > 0


def test_a_product_with_quantized_weights(named):
    """bitsandbytes' own operation: torch has no formula for it.  Weights of 4 bits are read, and written in 16."""
    named("NVIDIA H100 80GB HBM3")
    a, b, c = matrices((8192, 4096), (14336, 4096), (8192, 14336))
    packed = torch.empty(14336 * 4096 // 2, 1, dtype=torch.uint8, device="meta")
    operation = SimpleNamespace(overloadpacket="bitsandbytes.gemm_4bit")
    seconds, flops = prices.on(CARD)(operation, (a, packed, (14336, 4096), packed, 64, "nf4"), {}, c)
    plain, same = prices.on(CARD)(MM, (a, b.t()), {}, c)
    assert flops == same
    least = 2.5 * 14336 * 4096 / find_device("h100-80gb").bandwidth_bytes_per_second
    assert plain + least < seconds < plain + 2 * least
