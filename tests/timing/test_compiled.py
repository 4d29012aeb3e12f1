"""Layers under torch.compile: bytes by hand, and directions that must hold."""

from dataclasses import replace

import pytest

from tonnage.catalog.devices import find_device
from tonnage.catalog.models import find_model
from tonnage.cluster import Cluster
from tonnage.job import Job
from tonnage.model import ModelRef
from tonnage.plans import Plan
from tonnage.timing import compiled
from tonnage.timing.kinds import read_shape
from tonnage.timing.layer import layer_operations, layer_weights
from tonnage.timing.operations import Slice
from tonnage.timing.software import software
from tonnage.timing.timing import time_step
from tonnage.timing.work import Work

LLAMA = read_shape(find_model("llama-3.2-1b").config())
GPT2 = read_shape(find_model("gpt2-medium").config())
QWEN3 = read_shape(find_model("qwen3-1.7b").config())
GEMMA = read_shape(find_model("gemma-2-2b").config())
PURE = Slice(tokens=4096, seq_len=2048, backend="cudnn", compiled=True)
MIXED = replace(PURE, residual_bytes=4, casts=True)
ONE = Cluster(device=find_device("h200"))
EAGER = software("eager")


def moved(passes, *names):
    return sum(op.bytes for op in passes if op.name in names)


def test_bytes_between_the_products_of_a_llama_layer_by_hand():
    """In bf16 alone: 18 bytes a value of the stream forward (4 r + 5 e), 24 back; 3 e and 5 e of the 8,192 inside."""
    stream, inner = 4096 * 2048, 4096 * 8192
    layer = compiled.layer(LLAMA, PURE)
    assert moved(layer.forward, "norms") == 18 * stream
    assert moved(layer.backward, "norms backward") == 24 * stream
    assert moved(layer.forward, "activation") == 6 * inner
    assert moved(layer.backward, "activation backward") == 10 * inner
    assert moved(layer.forward, "rotation") == 4 * 4096 * (2048 + 512)


def test_autocast_keeps_the_stream_wide_and_casts_its_gradient():
    stream = 4096 * 2048
    layer = compiled.layer(LLAMA, MIXED)
    assert moved(layer.forward, "norms") == (4 * 4 + 5 * 2) * stream
    assert moved(layer.backward, "norms backward") == (6 * 4 + 6 * 2 + 6) * stream
    weights = layer_weights(LLAMA, MIXED)
    assert moved(layer.forward, "cast of weights") == moved(layer.backward, "cast of gradients") == 6 * weights


def test_products_and_attention_stay_and_passes_shrink():
    for shape in (LLAMA, GPT2, QWEN3, GEMMA):
        eager, fused = layer_operations(shape, MIXED), compiled.layer(shape, MIXED)
        assert sum(op.flops for op in eager.forward) == pytest.approx(sum(op.flops for op in fused.forward))
        assert fused.flops == pytest.approx(eager.flops)
        passed = [op for op in (*fused.forward, *fused.backward) if op.family not in ("matmul", "attention")]
        assert all(op.plain for op in passed)
        assert sum(op.kernels for op in (*fused.forward, *fused.backward)) < sum(
            op.kernels for op in (*eager.forward, *eager.backward)
        )


def test_sums_of_adapters_are_in_the_kernels_that_read_them():
    """Rank 16 at one product of k and n: forward k + 3 n values, backward 3 k + 2 n."""
    part = replace(PURE, lora_rank=16, trained=False, adapted=frozenset({"query"}))
    layer = compiled.layer(LLAMA, part)
    assert moved(layer.forward, "query adapter") == 4096 * 2 * (2048 + 3 * 2048)
    assert moved(layer.backward, "query adapter backward") == 4096 * 2 * (3 * 2048 + 2 * 2048)
    assert not moved(layer.forward, "key adapter")


def test_a_mask_has_attention_compute_what_it_hides():
    plain, masked = (layer_operations(LLAMA, replace(PURE, masked=value)) for value in (False, True))
    flops = [sum(op.flops for op in each.forward if op.family == "attention") for each in (plain, masked)]
    assert flops[1] == pytest.approx(2.6 * flops[0])
    both_ways = replace(LLAMA, causal=False)
    assert layer_operations(both_ways, replace(PURE, masked=True)) == layer_operations(both_ways, PURE)


def step(shape=LLAMA, **plan):
    model = ModelRef(name="llama-3.2-1b", kind="config", config=find_model("llama-3.2-1b").config())
    job = Job(model=model, seq_len=plan.pop("seq_len", 2048), micro_batch=2, packing=plan.pop("packing", None))
    return time_step(shape, Work.of(job, Plan(**plan), ONE), ONE, EAGER)


def test_compiled_layers_are_faster_and_a_network_as_a_whole_pays_for_its_mask():
    eager, layers, model = (step(compile=value).step_seconds for value in ("none", "layers", "model"))
    assert layers < model < eager
    assert step(compile="layers", checkpointing="full").recompute_seconds > 0


def test_the_host_calls_each_compiled_layer():
    """16 tokens take the card no time: two calls a layer, three where it runs again, one each way for the whole."""
    call = EAGER.compiled_call_seconds
    assert step(compile="layers", seq_len=16).host_seconds > 16 * 2 * call * 0.5
    more = step(compile="layers", seq_len=16, checkpointing="full").step_seconds
    assert more - step(compile="layers", seq_len=16).step_seconds > 16 * call
    assert step(compile="model", seq_len=16).step_seconds < step(compile="layers", seq_len=16).step_seconds


def test_packed_documents_are_masked():
    assert step(packing=4).step_seconds > step().step_seconds
    assert step(packing=4, attention="flex").step_seconds <= step(attention="flex").step_seconds
