"""The core: its constructor starts the engine, and says so in its log."""

import logging
import types
from typing import Any

from vllm.v1.worker.gpu_worker import BLOCK_BYTES, Worker

log = logging.getLogger(__name__)


class Scheduler:
    """Runs requests in their order, as long as their blocks fit; the last one gives way and begins anew."""

    def __init__(self, blocks: int) -> None:
        self.running: list[Any] = []
        self.waiting: list[Any] = []
        self.blocks = blocks
        self.kv_cache_manager = types.SimpleNamespace(usage=0.0)

    def has_requests(self) -> bool:
        return bool(self.running or self.waiting)

    def step(self) -> None:
        while self.waiting and self.used() + self.waiting[0].blocks() <= self.blocks:
            self.running.append(self.waiting.pop(0))
        for request in self.running:
            request.text.append(0)
        while self.used() > self.blocks:
            late = self.running.pop()
            late.num_preemptions += 1
            late.text.pop()
            self.waiting.insert(0, late)
        self.kv_cache_manager.usage = self.used() / self.blocks
        for request in self.running:
            request.left -= 1
        self.running = [request for request in self.running if request.left]

    def used(self) -> int:
        return sum(request.blocks() for request in self.running)


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
        worker.compile_or_warm_up_model()
        vllm_config.cache_config.num_gpu_blocks = blocks
        log.info("GPU KV cache size: %s tokens", f"{blocks * 16:,}")
        log.info("Maximum concurrency for %s tokens per request: %.2fx", f"{length:,}", blocks * 16 / length)
        self.scheduler = Scheduler(blocks)

    def add_request(self, request: Any) -> None:
        self.scheduler.waiting.append(request)

    def step_fn(self) -> tuple[dict[int, Any], bool]:
        self.scheduler.step()
        return {}, True
