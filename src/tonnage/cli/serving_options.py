"""Options of `--task serve`, and how the command line reads them."""

from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer

from tonnage.cli.options import count
from tonnage.errors import UsageError
from tonnage.options import spell_option, unknown_word
from tonnage.units import parse_length

TASKS: Final = ("train", "serve")
SHARED: Final = ("tp", "pp", "ep", "engine", "lengths")
"""Options of training plans that an engine has too."""

_SETTINGS: Final = ("tp", "pp", "ep", "engine")
"""Those of them that are settings of the engine."""

_IN_TRAINING: Final = {
    "max_len": "--seq-len",
    "max_batched_tokens": "--global-batch-tokens",
    "max_seqs": "--micro-batch",
    "gpu_memory_utilization": "--headroom (percent of each GPU to leave free; in tonnage plan)",
    "quantization": "--quant, with --method qlora",
    "dp": "--shard ddp",
}
"""Options of training that are the nearest to those of an engine."""

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


def check_task(task: str, serving: Mapping[str, Any], training: Mapping[str, Any]) -> None:
    """Raise UsageError for an unknown task, or an option that the other task has.

    `serving` and `training` are the options that were given, by the names of the parameters.
    """
    if task not in TASKS:
        raise unknown_word("task", task, TASKS)
    if task == "train":
        wrong = next((name for name, value in serving.items() if value not in (None, False)), None)
        if wrong is not None:
            meant = _IN_TRAINING.get(wrong)
            instead = "leave it out" if meant is None else f"for training give {meant}"
            raise UsageError(f"--{spell_option(wrong)} is for an inference engine; add --task serve, or {instead}.")
        return
    wrong = next(
        (name for name, value in training.items() if value not in (None, False) and name not in SHARED), None
    )
    if wrong is not None:
        raise UsageError(f"--{spell_option(wrong)} is for training; with --task serve leave it out.")


def read_settings(serving: Mapping[str, Any], shared: Mapping[str, Any]) -> Any:
    """Return the settings of an engine from the options that were given."""
    from tonnage.serving.settings import ServeSettings

    given = {name: value for name, value in serving.items() if value not in (None, False)}
    return ServeSettings(**given, **{name: value for name, value in shared.items() if name in _SETTINGS})
