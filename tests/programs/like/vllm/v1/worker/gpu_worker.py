"""A worker that loads a layer, profiles it, and gives the rest of its share of the card to the KV cache."""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch

BLOCK_BYTES = 16 << 20


@contextlib.contextmanager
def memory_profiling(before: Any, weights_memory: int) -> Iterator[Any]:
    result = types.SimpleNamespace(torch_peak_increase=0, before_create=before)
    torch.cuda.reset_peak_memory_stats()
    yield result
    torch.cuda.empty_cache()
    result.torch_peak_increase = torch.cuda.max_memory_allocated() - weights_memory


class Worker:
    def __init__(self, config: Any, share: float) -> None:
        self.config, self.share, self.rank = config, share, 0
        self.parallel_config = types.SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
        self.model_runner = types.SimpleNamespace(model_memory_usage=0, kv_caches=[])

    def load_model(self) -> None:
        free, total = torch.cuda.mem_get_info()
        self.before = types.SimpleNamespace(non_torch_memory=total - free - torch.cuda.memory_reserved())
        self.layer = torch.nn.Linear(4096, 4096, bias=False, device="cuda", dtype=torch.bfloat16)
        self.model_runner.model_memory_usage = torch.cuda.memory_allocated()

    def determine_available_memory(self) -> int:
        assert not torch.overrides._get_current_function_mode_stack()  # they would be saved with what is compiled
        weights = self.model_runner.model_memory_usage
        with memory_profiling(self.before, weights) as result, torch.inference_mode():
            self.layer(torch.zeros(2048, 4096, device="cuda", dtype=torch.bfloat16))
        free, total = torch.cuda.mem_get_info()
        return int(total * self.share) - (total - free) - result.torch_peak_increase

    def initialize_from_config(self, blocks: int) -> None:
        self.model_runner.kv_caches = [torch.zeros(blocks, BLOCK_BYTES, dtype=torch.int8, device="cuda")]

    def compile_or_warm_up_model(self) -> None:
        words = torch.zeros(16, 4096, device="cuda", dtype=torch.bfloat16)
        self.graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(self.graph):
            self.layer(words)
