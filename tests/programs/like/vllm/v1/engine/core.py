"""The core: its constructor starts the engine, and says so in its log."""

import logging
from typing import Any

from vllm.v1.worker.gpu_worker import BLOCK_BYTES, Worker

log = logging.getLogger(__name__)


class EngineCore:
    def __init__(self, vllm_config: Any, share: float) -> None:
        self.vllm_config = vllm_config
        worker = Worker(vllm_config, share)
        worker.load_model()
        blocks = worker.determine_available_memory() // BLOCK_BYTES
        length = vllm_config.model_config.max_model_len
        if blocks * 16 < length:
            longest = 16 * max(blocks, 0)
            raise ValueError(f"{length} tokens do not fit; the estimated maximum model length is {longest}.")
        worker.initialize_from_config(blocks)
        vllm_config.cache_config.num_gpu_blocks = blocks
        log.info("GPU KV cache size: %s tokens", f"{blocks * 16:,}")
        log.info("Maximum concurrency for %s tokens per request: %.2fx", f"{length:,}", blocks * 16 / length)
