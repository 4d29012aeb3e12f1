"""Options of `--task serve`, and how the command line reads them."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Final

import typer

from tonnage.cli.options import count, with_request
from tonnage.units import parse_length

Task = Annotated[
    str,
    typer.Option(
        "--task",
        help="train: a training step. serve: an inference engine with this model; --engine is then vllm, sglang or "
        "transformers, each also @VERSION, and the options of Serving apply.",
        metavar="WORD",
    ),
]
MaxLen = Annotated[
    int | None,
    count("--max-len", "Longest request, prompt and answer together. Default: what the model allows.", parse_length),
]
MaxSeqs = Annotated[int | None, count("--max-seqs", "Requests that run together at most. Default: the engine's.")]
MaxBatchedTokens = Annotated[
    int | None, count("--max-batched-tokens", "Tokens of one step at most. Default: the engine's.")
]
Utilization = Annotated[
    float | None,
    typer.Option(
        "--gpu-memory-utilization",
        help="Part of each GPU that the engine takes (SGLang: mem-fraction-static). Default: the engine's.",
        metavar="PART",
    ),
]
KvDtype = Annotated[
    str | None, typer.Option("--kv-dtype", help="Dtype of keys and values: auto, bf16, fp16 or fp8.", metavar="WORD")
]
Quantized = Annotated[
    str | None,
    typer.Option(
        "--quantization",
        help="Format of the weights: none, fp8, fp8-channel, fp8-block, int8, nf4, nf4-double, gptq-int4, awq-int4, "
        "mxfp4, nvfp4. Default: as published.",
        metavar="WORD",
    ),
]
DataParallel = Annotated[int | None, count("--dp", "Replicas of the engine.")]
Concurrency = Annotated[
    int | None,
    count("--concurrency", "Requests that are always there, of the --lengths, as p50=800,p95=6000,output=256."),
]
Eager = Annotated[bool, typer.Option("--eager", help="Serve without compiling and CUDA graphs.")]
Warm = Annotated[
    bool, typer.Option("--warm", help="The engine's cache has the compiled network from an earlier start.")
]
BlockTokens = Annotated[int | None, count("--block-tokens", "Tokens of a block of the KV cache. Default: 16.")]
MaxLoras = Annotated[
    int | None, count("--max-loras", "LoRA adapters that run together, each with a slot on the GPU.")
]
MaxLoraRank = Annotated[
    int | None, count("--max-lora-rank", "Largest rank of an adapter: 8, 16 (default), 32, 64, 128, 256, 320 or 512.")
]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft",
        help="Speculative decoding: ngram (repeated tokens), mtp (the network's own further layers), or a MODEL that "
        "drafts.",
        metavar="WORD",
    ),
]
DraftTokens = Annotated[int | None, count("--draft-tokens", "Tokens that are drafted in a step.")]
Acceptance = Annotated[
    float | None,
    typer.Option("--acceptance", help="Part of the drafted tokens that is accepted; for the speed.", metavar="PART"),
]
NoPrefixCaching = Annotated[
    bool, typer.Option("--no-prefix-caching", help="Keep nothing of requests that ended, and share no prefixes.")
]
SleepMode = Annotated[bool, typer.Option("--sleep-mode", help="The engine can be put to sleep; say what that frees.")]
EncoderMode = Annotated[
    str | None,
    typer.Option(
        "--mm-encoder-tp-mode",
        help="What tensor-parallel ranks divide of an image encoder: its weights (vLLM's default), or images (data).",
        metavar="WORD",
    ),
]
EnginePython = Annotated[
    str | None,
    typer.Option(
        "--engine-python",
        help="Python that has vLLM or SGLang: the engine itself is run on the ghost. Default: this one, if it has "
        "it; else the closed form, as with --source meta.",
        metavar="PATH",
    ),
]

_OPTIONS: Final = {
    **{"max_len": MaxLen, "max_seqs": MaxSeqs, "max_batched_tokens": MaxBatchedTokens, "dp": DataParallel},
    **{"gpu_memory_utilization": Utilization, "kv_dtype": KvDtype, "quantization": Quantized},
    **{"eager": Eager, "warm": Warm, "block_tokens": BlockTokens, "max_loras": MaxLoras},
    **{"max_lora_rank": MaxLoraRank, "draft": Draft, "draft_tokens": DraftTokens, "acceptance": Acceptance},
    **{"no_prefix_caching": NoPrefixCaching, "sleep_mode": SleepMode, "concurrency": Concurrency},
    "mm_encoder_tp_mode": EncoderMode,
}
"""Options that a command gets beside those of training, by name."""

_SWITCHES: Final = (Eager, Warm, NoPrefixCaching, SleepMode)


def with_both_tasks(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return the command with every option of Job, Plan and an engine in the place of its `**options`.

    The command gets those that were given (`with_request`); `take_serving` tells an engine's from the others.
    """
    return with_request(
        command,
        (
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=False if annotation in _SWITCHES else None,
                annotation=annotation,
            )
            for name, annotation in _OPTIONS.items()
        ),
    )


def take_serving(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of an engine, taken out of those that were given."""
    return {name: options.pop(name) for name in _OPTIONS if name in options}
