"""The names that inference engines give to the options of `--task serve`, for those who type an engine's own."""

from __future__ import annotations

from typing import Final

from tonnage.synonyms import Synonym, find_option, normalise

_ROWS: Final[tuple[tuple[str, str, str], ...]] = (
    (
        "max-model-len max-model-length model-max-length context-length context-len max-context-len max-seq-len "
        "max-sequence-length ctx-size ctx ctx-len n-ctx num-ctx max-length",
        "max-len",
        "",
    ),
    ("max-num-seqs max-running-requests max-batch-size max-requests batch-size", "max-seqs", ""),
    ("max-num-batched-tokens chunked-prefill-size max-prefill-tokens max-num-tokens", "max-batched-tokens", ""),
    (
        "mem-fraction-static gpu-memory-fraction max-memory-percent kv-cache-free-gpu-memory-fraction",
        "gpu-memory-utilization",
        "",
    ),
    ("kv-cache-dtype", "kv-dtype", ""),
    ("dtype torch-dtype quantize quantization-method", "quantization", "16 bits where it is left out"),
    ("data-parallel-size dp-size data-parallel num-replicas", "dp", ""),
    ("enable-expert-parallel expert-parallel-size ep-size", "ep", "1 or tp x dp"),
    ("enforce-eager disable-cuda-graph", "eager", ""),
    ("enable-lora max-loras-per-batch", "max-loras", ""),
    (
        "speculative-config speculative-model speculative-algorithm speculative-draft-model-path draft-model",
        "draft",
        "",
    ),
    ("num-speculative-tokens speculative-num-draft-tokens speculative-num-steps", "draft-tokens", ""),
    ("no-enable-prefix-caching disable-radix-cache", "no-prefix-caching", ""),
    ("enable-sleep-mode enable-memory-saver", "sleep-mode", ""),
    ("block-size page-size", "block-tokens", ""),
)
"""Options of vLLM, SGLang and other engines, those of `--task serve`, a note."""


def find_serve_option(name: str) -> Synonym | None:
    """Return what `--task serve` calls an option of an engine; None if none has it."""
    word = normalise(name)
    row = next(((option, note) for names, option, note in _ROWS if word in names.split()), None)
    return find_option(name) if row is None else Synonym(option=row[0], note=row[1])
