"""Run vLLM's own scheduler over requests, without a GPU: prints steps, peak and preemptions of each case as JSON.

    python vllm_scheduler.py FOLDER CASES.json

FOLDER has a config.json of a small network.  A case has prompts, outputs, arrivals (steps), blocks (with vLLM's null
block), block_tokens, max_seqs, batched_tokens and max_len; with a prefix, the tokens that all prompts share, prefixes
are cached.  Made with vLLM 0.33.0.
"""

import json
import os
import sys

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager


def make_scheduler(folder, case):
    size = case["block_tokens"]
    config = VllmConfig(
        model_config=ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=case["max_len"]
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=case["max_seqs"],
            max_num_batched_tokens=case["batched_tokens"],
            max_model_len=case["max_len"],
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        cache_config=CacheConfig(block_size=size, enable_prefix_caching="prefix" in case),
        device_config=DeviceConfig("cpu"),
    )
    config.cache_config.num_gpu_blocks = case["blocks"]
    spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=case["blocks"], kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=size,
        hash_block_size=size,
        log_stats=False,
    )


def serve(folder, case):
    scheduler = make_scheduler(folder, case)
    waiting = list(zip(case["prompts"], case["outputs"], case["arrivals"], strict=True))
    prefix, hasher = case.get("prefix", 0), None
    if "prefix" in case:
        init_none_hash(sha256)
        hasher = get_request_block_hasher(case["block_tokens"], sha256)
    result = {"steps": 0, "peak_running": 0, "preemptions": 0}
    step = following = 0
    while following < len(waiting) or scheduler.has_requests():
        if not scheduler.has_requests() and waiting[following][2] > step:
            step = waiting[following][2]
        while following < len(waiting) and waiting[following][2] <= step:
            prompt, output, _ = waiting[following]
            scheduler.add_request(
                Request(
                    request_id=f"{following}",
                    prompt_token_ids=[1] * prefix + [following + 2] * (prompt - prefix),
                    sampling_params=SamplingParams(max_tokens=output, ignore_eos=True),
                    pooling_params=None,
                    block_hasher=hasher,
                )
            )
            following += 1
        scheduled = scheduler.schedule()
        names = list(scheduled.num_scheduled_tokens)
        if names:  # the last call only learns which requests ended
            result["steps"] += 1
        result["peak_running"] = max(result["peak_running"], len(scheduler.running))
        result["preemptions"] += len(scheduled.preempted_req_ids or ())
        requests = [scheduler.requests[name] for name in names]
        sampled = [[1] if item.num_computed_tokens >= item.num_tokens else [] for item in requests]
        scheduler.update_from_output(
            scheduled,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
        step += 1
    return result


if __name__ == "__main__":
    folder, cases = sys.argv[1:]
    with open(cases) as file:
        print(json.dumps([serve(folder, case) for case in json.load(file)]))
