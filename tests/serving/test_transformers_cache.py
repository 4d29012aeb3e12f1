"""The closed form beside transformers' own memory handler."""

import pytest

from tonnage.catalog.models import find_model
from tonnage.errors import CannotEstimate
from tonnage.serving.cache_layers import read_layers
from tonnage.serving.transformers_cache import PAGE_TOKENS, plan_sectors
from tonnage.timing.kinds import read_shape
from tonnage.units import GIB

cache = pytest.importorskip("transformers.generation.continuous_batching.cache")


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-8b", "gemma-2-9b", "gpt-oss-20b", "smollm2-135m"])
def test_sectors_are_those_of_the_memory_handler(name, flash, monkeypatch):
    if not hasattr(cache, "PagedAttentionMemoryHandler") or not hasattr(cache, "group_layers_by_attn_type"):
        pytest.skip("another version of transformers sizes its cache otherwise")
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    fields = find_model(name).config()
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    config._attn_implementation = "flash_attention_2" if flash else "sdpa"
    layers = read_layers(find_model(name).config(), element_bytes=2)
    batching = ContinuousBatchingConfig(
        max_batch_tokens=8192,
        max_requests_per_batch=1024,
        max_memory_percent=0.9,
        max_blocks_per_request=32 if flash and {layer.kind for layer in layers} == {"full"} else 0,
        use_async_batching=flash,
    )
    available = 40 * GIB
    handler = cache.PagedAttentionMemoryHandler
    monkeypatch.setattr(handler, "get_available_memory", lambda self: available)
    groups = cache.group_layers_by_attn_type(config)
    heads = cache.find_num_key_value_heads(config)
    page = cache.FullAttentionCacheAllocator.get_bytes_per_page(
        heads, cache.find_head_dim(config), torch.bfloat16, PAGE_TOKENS
    )
    blocks = [page * len(members) for members in groups.values()]
    import math

    sector = math.lcm(*blocks, 128)
    made = handler(
        config=config,
        cb_config=batching,
        dtype=torch.bfloat16,
        bytes_per_sector=sector,
        tokens_per_sector=max(sector // block * PAGE_TOKENS for block in blocks),
        bytes_per_block=page * config.num_hidden_layers,
        attn_types=list(groups),
        model_supports_logits_to_keep=True,
    )
    _, sectors = made.infer_max_batch_tokens_and_num_sectors()
    ours = plan_sectors(
        read_shape(find_model(name).config()),
        layers,
        available_bytes=available,
        batch_tokens=8192,
        requests=1024,
        flash=flash,
    )
    assert (ours.sectors, ours.sector_bytes) == (sectors, sector)


def test_latent_attention_is_refused():
    layers = read_layers(find_model("deepseek-v2-lite").config(), element_bytes=2)
    shape = read_shape(find_model("deepseek-v2-lite").config())
    with pytest.raises(CannotEstimate, match="plain attention only"):
        plan_sectors(shape, layers, available_bytes=GIB, batch_tokens=8, requests=8, flash=True)
