"""Operations of a layer: by hand, and against PyTorch's counter on the real network."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from tonnage.case import Case
from tonnage.catalog.devices import find_device, parse_cluster
from tonnage.catalog.models import find_model
from tonnage.estimates.step_time import price
from tonnage.timing import rates
from tonnage.timing.attention import seen_tokens
from tonnage.timing.head import head_operations
from tonnage.timing.kinds import read_shape
from tonnage.timing.layer import layer_operations
from tonnage.timing.operations import Product, Slice
from tonnage.timing.shape import Shape
from tonnage.trainers.cases import request

LLAMA = Shape(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, value_dim=128, intermediate=14336, gated=True,
    vocab=128256, tied=False, parts=3,
)  # fmt: skip


def product_flops(passes, forward=True):
    return sum(op.flops for op in (passes.forward if forward else passes.backward) if op.family == "matmul")


def test_products_of_a_llama_layer_by_hand():
    # 2 flops x tokens x (query 4096^2 + output 4096^2 + key and value 2 x 4096 x 1024 + three of 4096 x 14336)
    weights = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    layer = layer_operations(LLAMA, Slice(tokens=1000, seq_len=1000))
    assert product_flops(layer) == 2 * 1000 * weights
    assert product_flops(layer, forward=False) == 2 * product_flops(layer)


def test_attention_of_a_llama_layer_by_hand():
    layer = layer_operations(LLAMA, Slice(tokens=4 * 2048, seq_len=2048))
    forward = next(op for op in layer.forward if op.family == "attention")
    # scores and values: 2 products x 2 flops x 8192 queries x 1024 keys on average x 4096
    assert forward.flops == 2 * 2 * 8192 * 1024 * 4096
    backward = next(op for op in layer.backward if op.family == "attention")
    assert backward.flops == 2.5 * forward.flops


def test_tensor_parallel_ranks_share_a_layer():
    whole, part = (layer_operations(LLAMA, Slice(tokens=512, seq_len=512, tp=t)) for t in (1, 8))
    assert product_flops(part) == pytest.approx(product_flops(whole) / 8)


def test_frozen_layers_have_one_product_less_in_backward():
    part = Slice(tokens=512, seq_len=512, trained=False, lora_rank=16)
    layer = layer_operations(LLAMA, part)
    assert product_flops(layer, forward=False) == product_flops(layer)
    assert sum("adapter" in op.name for op in layer.forward) == 7


def test_a_window_hides_keys():
    windowed = replace(LLAMA, window=512, window_fraction=1.0)
    assert seen_tokens(windowed, 4096) == 512 - 512**2 / (2 * 4096)
    assert seen_tokens(windowed, 512) == seen_tokens(LLAMA, 512)


TINY = {
    "llama": {"hidden_size": 64, "intermediate_size": 160, "num_key_value_heads": 2},
    "qwen3": {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 32},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "gpt_neox": {"hidden_size": 64, "intermediate_size": 256},
    "phi3": {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4, "pad_token_id": 0},
    "gemma2": {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 16},
}  # fmt: skip


@pytest.mark.parametrize("kind", TINY)
def test_products_and_attention_are_those_of_torchs_counter(kind):
    sizes = {"vocab_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, **TINY[kind]}
    config = AutoConfig.for_model(kind, **sizes)
    config._attn_implementation = "eager"
    network = AutoModelForCausalLM.from_config(config)
    ids = torch.zeros(3, 16, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        network(input_ids=ids, use_cache=False).logits.sum().backward()
    shape = read_shape({"model_type": kind, **config.to_dict()})
    part = Slice(tokens=48, seq_len=16, dtype="fp32", residual_bytes=4, backend="eager")
    layers = shape.layers * layer_operations(shape, part).flops
    counted = counter.get_total_flops()
    rotations = 2 * 3 * 16 * shape.head_dim * shape.rotary  # frequencies x positions: a product in eager code
    assert layers + head_operations(shape, part).flops == pytest.approx(counted, abs=rotations + 1)


MIXTRAL = read_shape(find_model("mixtral-8x7b").config())


def expert_operations(**fields):
    layer = layer_operations(MIXTRAL, Slice(tokens=512, seq_len=512, experts=True, **fields))
    return [op for op in (*layer.forward, *layer.backward) if op.name.startswith("expert")]


def test_experts_are_multiplied_together_but_one_by_one_under_autocast():
    together, one_by_one = expert_operations(), expert_operations(casts=True)
    assert all(op.grouped for op in together)
    assert sum(op.kernels for op in together) == 2 + 4  # gate and up are one matrix; two products each in backward
    assert sum(op.kernels for op in one_by_one) == 8 * sum(op.kernels for op in together)
    assert sum(op.flops for op in one_by_one) == sum(op.flops for op in together)
    assert sum(op.kernels for op in expert_operations(fused=True, dtype="fp8", ep=4)) == 2 * (2 + 4)
    assert sum(op.products for op in expert_operations(fused=True, ep=4)) == 2 * (
        2 + 4
    )  # each fills the card by itself
    assert sum(op.products for op in expert_operations(fused=True, ep=4, experts_fused=True)) == 2 + 4


def test_ranks_with_experts_of_their_own_multiply_as_much_as_ranks_with_parts_of_all():
    """Half of the tokens with whole matrices, or all with halves: fewer bytes, as half of the rows are handed on."""
    parts, whole = (expert_operations(fused=True, tp=2, ep=4, experts_whole=whole) for whole in (False, True))
    assert sum(op.flops for op in whole) == sum(op.flops for op in parts)
    routed = [layer_operations(MIXTRAL, Slice(tokens=512, seq_len=512, tp=2, experts=True, experts_whole=own))
              for own in (False, True)]  # fmt: skip
    moved = [sum(op.bytes for op in layer.forward if op.name == "routing") for layer in routed]
    assert moved[0] == 2 * moved[1]


def casts_of(shape, **fields):
    layer = layer_operations(shape, Slice(tokens=10, seq_len=10, fused=True, dtype="fp8", **fields))
    ops = [op for op in (*layer.forward, *layer.backward) if op.name.startswith("cast for")]
    return sum(op.bytes for op in ops), sum(op.kernels for op in ops)


def test_narrow_operands_are_cast_in_passes_of_their_own_by_hand():
    shape = replace(LLAMA, parts=1)
    # operands: qkv's and the gate's after a norm (1 byte), output's and down's (4); gradients of all four results (4)
    operands = 4096 + 4 * 4096 + 4096 + 4 * 14336
    results = 4 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)
    assert casts_of(shape) == (10 * (operands + results), 8)
    assert layer_operations(shape, Slice(tokens=10, seq_len=10, fused=True, dtype="bf16")).forward != ()
    wide = layer_operations(shape, Slice(tokens=10, seq_len=10, fused=True))
    assert not any(op.name.startswith("cast for") for op in (*wide.forward, *wide.backward))


def test_experts_are_cast_one_by_one_unless_one_kernel_does_it_all():
    loop, fused = (casts_of(MIXTRAL, experts=True, ep=2, experts_fused=whole) for whole in (False, True))
    assert loop[1] - fused[1] == 2 * 2 * 4  # two products, both passes, four experts
    assert loop[0] > fused[0]


GPT_OSS = read_shape(find_model("gpt-oss-20b").config())


def test_clamped_experts_with_biases_take_passes_that_one_kernel_spares():
    def around(**fields):
        layer = layer_operations(GPT_OSS, Slice(tokens=10, seq_len=10, experts=True, **fields))
        return sum(op.bytes for op in layer.forward if op.name in ("clamp", "expert biases"))

    assert around(fused=True) == 10 * 4 * (16 * 2880 + 28 * 2880)
    assert around(fused=True, experts_fused=True) == around() == 0


def test_the_loss_moves_less_the_more_of_its_steps_are_one_kernel():
    part = Slice(tokens=8, seq_len=8, fused=True)
    moved = {
        loss: sum(op.bytes for op in (*passes.forward, *passes.backward) if op.family == "loss")
        for loss, passes in ((loss, head_operations(LLAMA, part, loss)) for loss in ("plain", "compiled", "fused"))
    }
    logits = 8 * 128256
    assert moved == {"plain": 62 * logits, "compiled": 28 * logits, "fused": 4 * logits}


def test_one_expert_on_a_rank_is_still_an_expert():
    """Its tokens were handed to it, and its rows are as many: 512 x 2 of 8 ranks' tokens, among 8 experts."""
    alone, among = expert_operations(fused=True, ep=8), expert_operations(fused=True, ep=2)
    assert all(op.grouped for op in (*alone, *among))
    assert sum(op.flops for op in alone) == sum(op.flops for op in among)
    assert sum(op.kernels for op in among) == 4 * sum(op.kernels for op in alone)


def test_graphs_launch_what_they_captured():
    part = Slice(tokens=512, seq_len=512, experts=True, fused=True, captured="part")
    layer = layer_operations(MIXTRAL, part)
    assert {op.name for op in layer.forward if op.kernels} == {"expert up", "expert down"}
    whole = layer_operations(MIXTRAL, Slice(tokens=512, seq_len=512, experts=True, fused=True, captured="all"))
    assert not any(op.kernels for op in (*whole.forward, *whole.backward))


def test_adapters_of_experts_make_whole_matrices():
    adapters = [op for op in expert_operations(lora_rank=16, trained=False) if "adapter" in op.name]
    weights = 3 * 8 * 4096 * 14336
    assert sum(op.bytes for op in adapters) == (4 + 3) * 2 * weights


def test_torchs_formula_multiplies_scores_in_fp32():
    layer = layer_operations(LLAMA, Slice(tokens=512, seq_len=512, backend="math"))
    scores = [op for op in (*layer.forward, *layer.backward) if op.name.startswith("attention")]
    assert {op.dtype for op in scores} == {"fp32"}
    eager = layer_operations(LLAMA, Slice(tokens=512, seq_len=512, backend="eager"))
    assert layer.flops == eager.flops


def test_kept_scores_pass_through_memory_and_the_softmax_through_the_cards_arithmetic():
    """4 bytes of products, 5 of dropout and 3 of the softmax, backward 8, 5 and 4; an A100 is slower in fp32 than
    its memory, an L4 is not."""
    gpt = replace(LLAMA, dropout=True)
    layer = layer_operations(gpt, Slice(tokens=100, seq_len=100, fused=True, backend="eager"))
    forward, backward = (
        sum(op.bytes for op in ops if op.name.startswith(("scores", "softmax"))) / (100 * 100 * 32)
        for ops in (layer.forward, layer.backward)
    )
    assert (forward, backward) == (12, 17)
    softmax = next(op for op in layer.forward if op.family == "softmax")
    for name, bound in (("a100-40gb", softmax.flops / 19.5e12), ("l4", softmax.bytes / (300e9 * 0.77))):
        device = find_device(name)
        card = replace(rates.card(device), pass_seconds=0.0)
        taken = rates.seconds([softmax], device, card, backend="eager", seq_len=100)
        assert taken.memory == pytest.approx(bound)


def test_without_a_compiler_narrow_products_cost_more_in_casts_than_they_save():
    """2,000 tokens: six kernels of 33 bytes a value for operand and weights, and again with both gradients."""
    wide, narrow = (
        layer_operations(LLAMA, Slice(tokens=2000, seq_len=2000, dtype=dtype)) for dtype in ("bf16", "fp8")
    )
    cast = {op.name: op for op in (*narrow.forward, *narrow.backward) if op.name.startswith("cast for")}
    assert len(cast) == 2 * 7
    assert cast["cast for up"].bytes == 33 * (2000 * 4096 + 4096 * 14336)
    assert cast["cast for up backward"].bytes == 33 * (2000 * (4096 + 2 * 14336) + 4096 * 14336)
    assert cast["cast for up"].kernels == 12
    device = find_device("h100-80gb")
    seconds = [
        rates.seconds((*ops.forward, *ops.backward), device, rates.card(device), backend="cudnn", seq_len=2000).total
        for ops in (wide, narrow)
    ]
    assert seconds[1] > seconds[0]


def test_a_boards_power_holds_its_tensor_cores_back():
    # an L4 has 72 W for 121 TFLOP/s, an RTX 4090 450 W for 165
    product = Product("up", 8192, 8192, 8192).operation("bf16")
    parts = {}
    for name in ("l4", "rtx-4090"):
        device = find_device(name)
        took = rates.seconds([product], device, rates.card(device), backend="flash", seq_len=1).compute
        parts[name] = product.flops / took / device.peak_flops.bf16
    assert parts["l4"] == pytest.approx(0.49, abs=0.01)
    assert parts["rtx-4090"] == pytest.approx(0.93, abs=0.01)


def test_heads_that_do_not_begin_at_16_bytes_are_multiplied_outside_tensor_cores():
    device = find_device("a100-80gb")

    def scores(head_dim):
        wide = replace(LLAMA, head_dim=head_dim, value_dim=head_dim)
        forward = layer_operations(wide, Slice(tokens=2048, seq_len=2048, fused=True, backend="eager")).forward
        product = next(op for op in forward if op.name == "attention")
        took = rates.seconds([product], device, rates.card(device), backend="eager", seq_len=2048).compute
        return product.flops / took

    assert scores(104) > 200e12  # 208 bytes
    assert scores(108) == pytest.approx(19.5e12 / 2, rel=0.01)  # 216 bytes


def test_dropout_of_kept_scores_passes_through_memory_too():
    def softmax(dropout):
        layer = layer_operations(replace(LLAMA, dropout=dropout), Slice(tokens=100, seq_len=100, backend="eager"))
        return [op.bytes for op in (*layer.forward, *layer.backward) if op.name.startswith("softmax")]

    scores = 100 * 100 * 32
    for plain, dropped in zip(softmax(False), softmax(True), strict=True):
        assert dropped - plain == 5 * scores  # read and written in 16 bits, and a mask


@pytest.mark.parametrize(
    ("loss", "measured"), [("plain", 0.1226), ("chunked", 0.1288), ("fused", 0.1261), ("liger", 0.1285)]
)
def test_steps_with_each_loss_take_what_an_h200_took(loss, measured):
    """Measurements of h200-2026-11-20 and -26: llama-3.2-1b, two sequences of 2,048 tokens, adamw, bf16-mixed."""
    job, plan = request("llama-3.2-1b", seq_len=2048, micro_batch=2, loss=loss)
    assert price(Case(job, plan, parse_cluster("h200"))).step_seconds == pytest.approx(measured, rel=0.06)


def test_kernels_of_liger_pass_over_memory_less_often():
    eager, liger = (layer_operations(LLAMA, Slice(tokens=8, seq_len=8, liger=liger)) for liger in (False, True))
    passes = [
        sum(op.bytes for op in (*layer.forward, *layer.backward) if op.family in ("norm", "pointwise"))
        for layer in (eager, liger)
    ]
    assert passes[1] < 0.5 * passes[0]


def test_liger_casts_the_heads_weights_for_each_slice_of_a_trainer():
    """A slice has 128 of 4,096 tokens: the vocabulary is 31.3 times as large as the width, rounded up to 32."""
    part = Slice(tokens=4096, seq_len=4096, casts=True)
    weights = LLAMA.hidden * LLAMA.vocab
    added = {
        loss: next(op.bytes for op in head_operations(LLAMA, part, loss).backward if "summed" in op.name) / weights
        for loss in ("liger", "liger-trainer")
    }
    assert added == {"liger": 2 * 32 + 4, "liger-trainer": (6 + 6) * 32 + 8}
