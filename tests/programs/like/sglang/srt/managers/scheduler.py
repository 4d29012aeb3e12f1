"""The scheduler: its constructor makes the pool of keys and values, and says how many tokens it holds."""

import logging
import types

import torch

log = logging.getLogger(__name__)


class Scheduler:
    def __init__(self, tokens: int) -> None:
        rows = tokens + 1
        pool = types.SimpleNamespace(size=tokens, page_size=1)
        pool.k_buffer, pool.v_buffer = (
            [torch.zeros(rows, 8, 128, dtype=torch.float16, device="cuda") for _ in range(4)] for _ in range(2)
        )
        self.tp_worker = types.SimpleNamespace(model_runner=types.SimpleNamespace(token_to_kv_pool=pool))
        log.info("max_total_num_tokens=%s, context_len=%s", tokens, 4096)
