"""Pools of engines: tokens, blocks and concurrency as their start-up logs print them (benchmarks/serving.toml)."""

import pytest

from tonnage.catalog.models import find_model
from tonnage.errors import CannotEstimate, UsageError
from tonnage.serving.cache_layers import read_layers
from tonnage.serving.facts import vllm_facts
from tonnage.serving.kv_cache import LayerCache, Request, heads_on_rank, lay_out, split_stages
from tonnage.units import GIB


def layers_of(name, **options):
    return read_layers(find_model(name).config(), **{"element_bytes": 2, **options})


def token_bytes(layers):
    return sum(layer.token_bytes for layer in layers)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("llama-2-7b", {}, 524_288),
        ("llama-3-8b", {}, 131_072),
        ("qwen3-30b-a3b", {}, 98_304),
        ("qwen2.5-72b", {"tp": 4}, 81_920),
        ("deepseek-v2-lite", {}, 31_104),
        ("deepseek-v2-lite", {"tp": 4}, 31_104),  # every rank keeps the whole latent vector
        ("llama-3-8b", {"element_bytes": 1}, 65_536),
        ("qwen2.5-7b", {"tp": 8}, 28 * 2 * 128 * 2),  # four heads for eight ranks: copies
        ("gpt2", {}, 12 * 2 * 768 * 2),
    ],
)
def test_bytes_of_a_token(name, options, expected):
    assert token_bytes(layers_of(name, **options)) == expected


def test_encoders_keep_nothing():
    assert layers_of("bert-base") == ()
    pool = lay_out(()).fill(GIB)
    assert (pool.blocks, pool.tokens(Request(length=512, batched_tokens=512))) == (0, 0)


def test_a_sequence_to_sequence_network_is_refused():
    with pytest.raises(CannotEstimate, match="an encoder with a decoder"):
        layers_of("t5-base")


def test_a_degree_that_divides_no_heads_is_refused():
    with pytest.raises(UsageError, match="--tp 3: 8 key and value heads cannot be divided among 3 ranks"):
        layers_of("llama-3-8b", tp=3)
    assert [heads_on_rank(4, tp) for tp in (1, 2, 4, 8)] == [4, 2, 1, 1]


@pytest.mark.parametrize(
    ("name", "pool_gib", "tokens", "concurrency"),
    [
        ("gemma-2-9b", 54.12, 168_880, 20.60),  # 21 layers with a window, 21 without
        ("gemma-2-27b", 20.59, 58_672, 7.16),
        ("gemma-2-2b", 66.47, 670_160, 81.73),
        ("gemma-3-27b", 19.53, 36_560, 4.46),  # 52 and 10: seven groups of ten layers, one of them padded
        ("gpt-oss-20b", 58.47, 1_277_184, 155.75),
        ("llama-3.1-8b", 58.11, 476_016, 58.11),
        ("deepseek-v2-lite", 43.61, 1_505_552, 183.78),
    ],
)
def test_pools_of_vllm_0_19_logs(name, pool_gib, tokens, concurrency):
    """The logs round the pool to 0.01 GiB."""
    request = Request(length=8192, batched_tokens=8192)
    pool = lay_out(layers_of(name)).fill(int(pool_gib * GIB))
    assert pool.tokens(request) == pytest.approx(tokens, abs=16 + tokens * 0.005 / pool_gib)
    assert pool.concurrency(request) == pytest.approx(concurrency, abs=0.005 + concurrency * 0.005 / pool_gib)


def test_the_longest_request_of_a_log_that_did_not_start():
    """vllm-project/recipes#12: Qwen3-Coder-480B needs 62.00 GiB for 262,144 tokens, has 48.66, and could 205,728."""
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 62, "num_attention_heads": 96, "head_dim": 128}
    layout = lay_out(read_layers({**config, "num_key_value_heads": 8}, element_bytes=2))
    needed = layout.request_bytes(Request(length=262_144, batched_tokens=8192))
    assert needed == 62 * GIB
    request = Request(length=262_144, batched_tokens=8192)
    assert layout.longest(int(48.66 * GIB), request) == 205_728


def test_the_longest_request_fits_and_one_token_more_does_not():
    layout = lay_out(layers_of("gemma-3-27b"))
    longest = layout.longest(10 * GIB, Request(length=131_072, batched_tokens=2048))
    assert 0 < longest < 131_072
    assert layout.request_bytes(Request(length=longest, batched_tokens=2048)) <= 10 * GIB
    assert layout.request_bytes(Request(length=longest + 1, batched_tokens=2048)) > 10 * GIB
    assert layout.longest(1000, Request(length=4096, batched_tokens=2048)) == 0


QWEN3_NEXT = {
    **{"model_type": "qwen3_next", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 16},
    **{"num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4, "linear_num_value_heads": 32},
    **{"linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "linear_conv_kernel_dim": 4,
}


def test_blocks_are_raised_until_a_page_holds_a_state():
    """Qwen3-Next: vLLM sets blocks of 544 tokens, so that 544 x 2,048 bytes hold a state of 1,097,728."""
    layers = read_layers(QWEN3_NEXT, element_bytes=2)
    assert [layer.kind for layer in layers[:4]] == ["state"] * 3 + ["full"]
    assert layers[0].state_bytes == 1_097_728
    layout = lay_out(layers)
    assert layout.block_tokens == 544
    assert [group.layers for group in layout.groups] == [12, 12, 12, 12]
    request = Request(length=544 * 10, batched_tokens=2048)
    assert layout.request_blocks(request) == 10 + 3  # the states take one block each, however long the request


def test_states_in_fp32_and_an_fp8_cache():
    """A start-up log of Qwen3.6-27B: blocks of 1,568 tokens, pages 0.13 % larger than the state."""
    wide = {**QWEN3_NEXT, "linear_num_value_heads": 48, "mamba_ssm_dtype": "float32", "num_key_value_heads": 4}
    layers = read_layers(wide, element_bytes=1)
    layout = lay_out(layers)
    assert layout.block_tokens == 1568
    assert layout.page_bytes / layers[0].state_bytes == pytest.approx(1.0013, abs=5e-5)


@pytest.mark.parametrize(
    ("fields", "tp", "pool_gib", "block_tokens", "tokens", "concurrency"),
    [
        # Qwen3.8-27B, fp8 KV cache, 2 ranks: github.com/mitchross/talos-argocd-proxmox/pull/1995
        (
            {"num_hidden_layers": 64, "linear_num_value_heads": 48, "num_key_value_heads": 4},
            *(2, 4.99, 1568, 302_921, 2.31),
        ),
        # Qwen3.6-35B-A3B, vLLM 0.24, fp8 KV cache: github.com/noonghunna/club-3090/issues/612
        ({"num_hidden_layers": 40}, 1, 5.98, 2096, 567_978, 4.33),
    ],
)
def test_tokens_that_logs_print_for_networks_with_states(fields, tp, pool_gib, block_tokens, tokens, concurrency):
    """Each state takes two blocks there, because prefixes are cached."""
    config = {**QWEN3_NEXT, "mamba_ssm_dtype": "float32", **fields}
    layout = lay_out(read_layers(config, element_bytes=1, tp=tp))
    request = Request(length=131_072, batched_tokens=16_384, state_blocks=2)
    pool = layout.fill(int(pool_gib * GIB))
    assert layout.block_tokens == block_tokens
    assert pool.tokens(request, by_concurrency=True) == pytest.approx(tokens, abs=1)
    assert pool.concurrency(request) == pytest.approx(concurrency, abs=0.005)


@pytest.mark.parametrize(
    ("fields", "pool_gib", "block_tokens", "concurrency"),
    [
        (
            {
                **{"model_type": "falcon_h1", "num_hidden_layers": 24, "hidden_size": 2048, "num_attention_heads": 8},
                **{"num_key_value_heads": 2, "head_dim": 128, "mamba_n_heads": 48, "mamba_d_head": 64},
                **{"mamba_d_state": 256, "mamba_n_groups": 1, "mamba_d_conv": 4},
            },
            *(37.27, 1568, 115.33),
        ),
        (
            {
                **{"model_type": "granitemoehybrid", "hidden_size": 1536, "num_attention_heads": 12},
                **{"num_key_value_heads": 4, "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128},
                **{"mamba_n_groups": 1, "mamba_d_conv": 4},
                "layer_types": ["attention" if index in (5, 15, 25, 35) else "mamba" for index in range(40)],
            },
            *(26.94, 400, 183.88),
        ),
        ({**QWEN3_NEXT, "num_hidden_layers": 8}, 45.42, 576, 861.29),
    ],
    ids=["falcon-h1", "granite-4.0-h", "qwen3-next"],
)
def test_a_state_that_is_copied_inside_a_prompt_takes_a_further_block(fields, pool_gib, block_tokens, concurrency):
    """vLLM 0.33.0 on a ghost H100, requests of 8,192 tokens."""
    facts = vllm_facts((0, 33, 0))
    copied = facts.copies_on((9, 0))
    request = Request(length=8192, batched_tokens=16_384, state_blocks=facts.state_blocks, copied_states=copied)
    layout = lay_out(read_layers(fields, element_bytes=2), copied_states=copied)
    assert layout.block_tokens == block_tokens
    assert layout.fill(int(pool_gib * GIB)).concurrency(request) == pytest.approx(concurrency, rel=5e-4)
    assert vllm_facts((0, 32, 0)).copies_on((9, 0)) == ()


def test_delta_nets_are_copied_from_hopper_on():
    """FlashInfer's kernels, which write the copies, are not chosen on an A100 or an L40S."""
    assert [vllm_facts((0, 33, 0)).copies_on(card) for card in ((8, 0), (8, 9))] == [("mamba2",)] * 2
    assert lay_out(read_layers(QWEN3_NEXT, element_bytes=2), copied_states=("mamba2",)).block_tokens == 544


LLAMA_4 = {
    **{"model_type": "llama4_text", "num_hidden_layers": 4, "hidden_size": 5120, "num_attention_heads": 40},
    **{"num_key_value_heads": 8, "head_dim": 128, "attention_chunk_size": 8192},
}


def test_layers_that_attend_within_chunks_keep_the_last_one():
    """0.33.0 on the ghost, four layers of Llama 4 Scout: 750,922 blocks hold 58.67 requests of 131,072 tokens."""
    layers = read_layers(LLAMA_4, element_bytes=2, frees_chunks=True)
    assert [layer.kind for layer in layers] == ["chunk"] * 3 + ["full"]
    pool = lay_out(layers).fill(750_922 * 16 * 4096)
    request = Request(length=131_072, batched_tokens=2 * 8192)
    assert pool.concurrency(request) == pytest.approx(58.67, abs=0.005)
    listed = {**LLAMA_4, "no_rope_layers": [1, 1, 1, 0]}
    assert read_layers(listed, element_bytes=2, frees_chunks=True) == layers
    assert {layer.kind for layer in read_layers(LLAMA_4, element_bytes=2)} == {"full"}  # vLLM before 0.13


def test_states_of_nemotron_h_are_fp32():
    """0.33.0 on the ghost: blocks of 1,040 tokens."""
    nemotron = {
        **{"model_type": "nemotron_h", "hybrid_override_pattern": "M-M-M-M*-M-M", "hidden_size": 4096},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128},
        **{"mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4},
    }
    assert lay_out(read_layers(nemotron, element_bytes=2)).block_tokens == 1040
    stated = {**nemotron, "mamba_ssm_cache_dtype": "bfloat16"}
    assert lay_out(read_layers(stated, element_bytes=2)).block_tokens == 528


def test_a_state_of_a_delta_net_takes_a_further_block_where_flashinfer_computes_it():
    """0.33.0 on the ghost: blocks of 576 tokens, and 958.68 requests with two drafted tokens in 23,967 blocks."""
    copied = vllm_facts((0, 33, 0)).copies_on((9, 0))
    layers = read_layers({**QWEN3_NEXT, "num_hidden_layers": 4}, element_bytes=2, drafted=2)
    layout = lay_out([*layers, layers[-1]], copied_states=copied)
    assert layout.block_tokens == 576
    request = Request(length=8192, batched_tokens=16_384, state_blocks=4, copied_states=copied)
    assert layout.request_blocks(request) == pytest.approx(23_967 / 958.68, abs=1e-3)


def test_drafted_tokens_lengthen_the_window_of_a_convolution():
    plain, drafting = (read_layers(QWEN3_NEXT, element_bytes=2, drafted=count)[0] for count in (0, 2))
    assert drafting.state_bytes - plain.state_bytes == 2 * 2 * 8192


def test_a_network_of_states_alone_holds_requests_of_any_length():
    mamba = {"model_type": "mamba", "num_hidden_layers": 64, "hidden_size": 2560, "state_size": 16, "expand": 2}
    layers = read_layers(mamba, element_bytes=2)
    assert layers[0].state_bytes == 2 * 5120 * 3 + 2 * 5120 * 16
    pool = lay_out(layers).fill(GIB)
    short, long = Request(length=100, batched_tokens=100), Request(length=10**6, batched_tokens=100)
    assert pool.concurrency(short) == pool.concurrency(long) == GIB // (64 * layers[0].state_bytes)
    assert pool.tokens(long) == pool.blocks * 10**6


def test_uneven_groups_are_padded_to_the_commonest_where_that_wastes_less():
    """gpt-oss with a draft layer: 12 layers with a window and 13 without make two groups of 13."""
    full = [LayerCache(kind="full", token_bytes=2048)] * 13
    windowed = [LayerCache(kind="window", token_bytes=2048, window=128)] * 12
    layout = lay_out([*full, *windowed])
    assert layout.block_bytes == 13 * 16 * 2048
    assert [group.layers for group in layout.groups] == [13, 12]


def test_pipeline_stages_hold_all_layers_once():
    assert [len(stage) for stage in split_stages(62, 8)] == [7, 8, 8, 8, 8, 8, 8, 7]
    assert split_stages(4, 1) == (range(4),)
    with pytest.raises(ValueError, match="8 pipeline stages for 4 layers"):
        split_stages(4, 8)
