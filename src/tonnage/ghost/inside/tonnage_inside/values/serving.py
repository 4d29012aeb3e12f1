"""Inference engines: weights and tokenizers that are not read, and tokens that are sampled.

vLLM's model runner counts the sampled tokens of each request on the card, where they read as zero; the host knows
whether a request's prompt is complete in this step, so that it gets one.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from .integers import without_following

if TYPE_CHECKING:
    from .policy import Policy

_READ: Final = ("auto", "hf", "safetensors", "pt", "npcache", "fastsafetensors", "instanttensor", "runai_streamer")
"""Load formats that only read a checkpoint's tensors."""

_TOKENIZERS: Final = ("tokenizer", "vocab", "merges", "tekken", "spiece", "sentencepiece")
"""Beginnings of the names of a tokenizer's files."""

_CACHE_SCALES: Final = ("q_scale", "k_scale", "v_scale", "prob_scale")
"""Parameters that hold the scales of an attention layer with an 8-bit cache."""

_STEPS: Final = (
    *("load_model", "determine_available_memory", "initialize_from_config", "compile_or_warm_up_model"),
    *("execute_model", "sample_tokens", "execute_dummy_batch"),
)
"""Methods of vLLM's worker that compute on the card."""


def patch_arguments(policy: Policy, module: ModuleType) -> None:
    """Patch `vllm.engine.arg_utils`: weights are not read, and a folder without a tokenizer is served without one.

    TONNAGE_ENGINE, a JSON object, has arguments that are tried instead of the program's own.
    """
    create = module.EngineArgs.create_engine_config

    @functools.wraps(create)
    def create_engine_config(arguments: Any, *args: Any, **kwargs: Any) -> Any:
        _change(arguments)
        _read_nothing(policy, arguments, arguments.tokenizer or arguments.model)
        return create(arguments, *args, **kwargs)

    module.EngineArgs.create_engine_config = create_engine_config


def patch_server_arguments(policy: Policy, module: ModuleType) -> None:
    """Patch `sglang.srt.server_args` likewise, before the arguments are completed."""
    kind = module.ServerArgs
    name = next(name for name in ("resolve_once", "__post_init__") if hasattr(kind, name))
    complete = getattr(kind, name)

    @functools.wraps(complete)
    def completed(arguments: Any) -> Any:
        if not getattr(arguments, "_resolution_finished", False):
            _change(arguments)
            _read_nothing(policy, arguments, arguments.tokenizer_path or arguments.model_path)
        return complete(arguments)

    setattr(kind, name, completed)


def _change(arguments: Any) -> None:
    """Set the arguments that are tried."""
    for name, value in json.loads(os.environ.get("TONNAGE_ENGINE", "{}")).items():
        setattr(arguments, name, value)


def _read_nothing(policy: Policy, arguments: Any, folder: str) -> None:
    """Have an engine make weights up, and serve a folder without a tokenizer without one."""
    if str(getattr(arguments, "load_format", "")) in _READ:
        arguments.load_format = "dummy"
        policy.use("weights")
    if not arguments.skip_tokenizer_init and os.path.isdir(folder) and not _has_tokenizer(folder):
        arguments.skip_tokenizer_init = True
        policy.use("tokenizer")


def _has_tokenizer(folder: str) -> bool:
    return any(name.startswith(_TOKENIZERS) for name in os.listdir(folder))


def patch_sampler(policy: Policy, module: ModuleType) -> None:
    """Patch `vllm.v1.worker.gpu.model_runner`: each request with its whole prompt gets one token, which ends none."""
    sample = module.GPUModelRunner.sample

    @functools.wraps(sample)
    def sampled(runner: Any, hidden_states: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = sample(runner, hidden_states, batch, *args, **kwargs)
        output, counts, rejected = result
        torch = policy.torch
        complete = torch.from_numpy(batch.num_computed_tokens_np + batch.num_scheduled_tokens >= batch.prefill_len_np)
        logits = torch.from_numpy(batch.cu_num_logits_np[1:] - batch.cu_num_logits_np[:-1])
        count = len(complete)
        policy.use("sampled")
        policy.write(counts[:count], complete.to(counts.dtype))
        if rejected is not None:
            policy.write(rejected[:count], torch.where(complete, logits[:count] - 1, 0).to(rejected.dtype))
        word = _harmless_word(getattr(getattr(runner, "model_config", None), "hf_config", None))
        policy.write(output.sampled_token_ids, torch.full(output.sampled_token_ids.shape, word))
        return result

    module.GPUModelRunner.sample = sampled


def patch_lengths(policy: Policy, module: ModuleType) -> None:
    """Patch `vllm.v1.worker.gpu.model_runner` further: the lengths of a step's requests, which a kernel computes and
    FlashInfer reads where tokens are drafted, are those that the host knows."""
    prepare = getattr(module.GPUModelRunner, "prepare_inputs", None)
    if prepare is None:
        return

    @functools.wraps(prepare)
    def prepared(*args: Any, **kwargs: Any) -> Any:
        batch = prepare(*args, **kwargs)
        known = getattr(batch, "seq_lens_cpu_upper_bound", None)
        if known is not None:
            policy.write(batch.seq_lens[: len(known)], known.to(batch.seq_lens.dtype))
        return batch

    module.GPUModelRunner.prepare_inputs = prepared


def patch_cache_scales(policy: Policy, module: ModuleType) -> None:
    """Patch `vllm.model_executor.layers.quantization.kv_cache`: the scales of an 8-bit cache are 1, as they are not
    read, and vLLM chooses by their sign."""
    process = module.BaseKVCacheMethod.process_weights_after_loading

    @functools.wraps(process)
    def processed(method: Any, layer: Any) -> Any:
        torch = policy.torch
        for name in _CACHE_SCALES:
            if hasattr(layer, name):
                setattr(layer, name, torch.nn.Parameter(torch.ones((), device="cpu"), requires_grad=False))
        return process(method, layer)

    module.BaseKVCacheMethod.process_weights_after_loading = processed


def patch_worker(policy: Policy, module: ModuleType) -> None:
    """Patch `vllm.v1.worker.gpu_worker`: nothing follows the numbers of an engine's own steps.

    What the engine reads of them is the sampled tokens (`patch_sampler`), and it saves what Dynamo compiles.
    """

    def apart(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            with without_following(policy.torch):
                return original(*args, **kwargs)

        return run

    for name in _STEPS:
        if hasattr(module.Worker, name):
            setattr(module.Worker, name, apart(getattr(module.Worker, name)))


def patch_runtime(policy: Policy, module: ModuleType) -> None:
    """Patch `vllm.distributed.device_communicators.cuda_wrapper`: it takes the ghost's CUDA runtime.

    torchvision's wheel brings NVIDIA's own, which works with NVIDIA's driver alone, and may be loaded first.
    """
    find = module.find_loaded_library

    @functools.wraps(find)
    def find_loaded_library(name: str) -> str | None:
        preloaded = os.environ.get("LD_PRELOAD", "").split(os.pathsep)
        ours = (path for path in preloaded if os.path.basename(path).startswith(f"{name}."))
        found: str | None = next(ours, None) or find(name)
        return found

    vars(module)["find_loaded_library"] = find_loaded_library


def _harmless_word(config: Any) -> int:
    """Return a token that ends no text."""
    ends = getattr(config, "eos_token_id", None)
    known = set(ends) if isinstance(ends, list) else {ends}
    return next(word for word in range(len(known) + 1) if word not in known)
