"""The scheduler: its constructor makes the pool of keys and values, and says how many tokens it holds."""

import logging
import types

import torch

log = logging.getLogger(__name__)


class Scheduler:
    def __init__(self, tokens: int, in_windows: int = 0) -> None:
        pool = make_pool(tokens)
        if in_windows:
            pool = types.SimpleNamespace(
                size=tokens, page_size=1, full_kv_pool=pool, swa_kv_pool=make_pool(in_windows)
            )
        self.tp_worker = types.SimpleNamespace(model_runner=types.SimpleNamespace(token_to_kv_pool=pool))
        log.info("Load weight end. elapsed=0.05 s, type=Network, avail mem=12.00 GB, mem usage=2.50 GB.")
        log.info("Capture target prefill CUDA graph end. elapsed=1.00 s, mem usage=1.50 GB, avail mem=9.00 GB.")
        log.info(
            "Capture target decode CUDA graph end. bs=[1, 2], elapsed=1.00 s, mem usage=0.25 GB, avail mem=8.75 GB."
        )
        log.info("max_total_num_tokens=%s, context_len=%s", tokens, 4096)


def make_pool(tokens: int) -> types.SimpleNamespace:
    pool = types.SimpleNamespace(size=tokens, page_size=1)
    pool.k_buffer, pool.v_buffer = (
        [torch.zeros(tokens + 1, 8, 128, dtype=torch.float16, device="cuda") for _ in range(4)] for _ in range(2)
    )
    return pool
