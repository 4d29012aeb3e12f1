"""Made-up requests that vLLM's own scheduler serves, right after the engine has started.

TONNAGE_REQUESTS names a JSON file: `prompts`, `outputs` (tokens of each), `arrivals` (seconds of each), `prefix`
(tokens that all prompts share), `step_seconds` (that a step is taken to last) and `seconds` (in which all is served).
"""

import importlib
import inspect
import json
import os
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any


def read() -> dict[str, Any] | None:
    """Return the requests that are to be served; None if there are none."""
    path = os.environ.get("TONNAGE_REQUESTS")
    if not path:
        return None
    with open(path) as file:
        document: dict[str, Any] = json.load(file)
    return document


class Load:
    """Requests, and what an engine has made of them so far.  `add` is the core's own method, before it is ready."""

    def __init__(self, core: Any, document: dict[str, Any], add: Callable[[Any, Any], None]) -> None:
        self._core, self._document, self._add = core, document, add
        self._requests = [_make(core, document, number) for number in range(len(document["prompts"]))]
        self._steps = self._running_sum = self._running_most = 0
        self._usage = 0.0

    def serve(self) -> None:
        """Serve the requests, each from its arrival on, until all have their answers or the time is over."""
        core, step_seconds = self._core, self._document["step_seconds"]
        waiting = deque(zip(self._document["arrivals"], self._requests, strict=True))
        clock = 0.0
        while time.monotonic() < self._document["until"]:  # all processes of a machine have one such clock
            while waiting and waiting[0][0] <= clock:
                self._add(core, waiting.popleft()[1])
            if core.scheduler.has_requests():
                self._step()
                clock += step_seconds
            elif waiting:
                clock = waiting[0][0]
            else:
                return

    def _step(self) -> None:
        core = self._core
        _, executed = core.step_fn()
        if hasattr(core, "post_step"):
            core.post_step(executed)
        running = len(core.scheduler.running)
        self._steps += 1
        self._running_sum += running
        self._running_most = max(self._running_most, running)
        self._usage = max(self._usage, float(core.scheduler.kv_cache_manager.usage))

    def facts(self) -> dict[str, Any]:
        """Return what was served, in how many steps, who ran together, preemptions, and the part of KV in use."""
        return {
            "requests": len(self._requests),
            "finished": sum(bool(request.is_finished()) for request in self._requests),
            "steps": self._steps,
            "running_most": self._running_most,
            "running_mean": self._running_sum / max(self._steps, 1),
            "preemptions": sum(int(request.num_preemptions) for request in self._requests),
            "kv_cache_usage": self._usage,
        }


def _make(core: Any, document: dict[str, Any], number: int) -> Any:
    """Return a request of the engine, cut to its maximal length; its words are others than those of all others."""
    kind, most = importlib.import_module("vllm.v1.request").Request, core.vllm_config.model_config.max_model_len
    prompt = min(document["prompts"][number], most - 1)
    answer = min(document["outputs"][number], most - prompt)
    words = random.Random(number)
    shared = min(document["prefix"], prompt)
    text = [*range(3, 3 + shared), *(words.randrange(3, 1000) for _ in range(prompt - shared))]
    options = {"max_tokens": answer, "ignore_eos": True, "detokenize": False}
    values = {
        "request_id": f"tonnage-{number}",
        "prompt_token_ids": text,
        "sampling_params": importlib.import_module("vllm.sampling_params").SamplingParams(**options),
        "pooling_params": None,
        "eos_token_id": None,
        "arrival_time": float(number),
        "block_hasher": getattr(core, "request_block_hasher", None),
    }
    known = inspect.signature(kind).parameters
    return kind(**{name: value for name, value in values.items() if name in known})
