"""How it is done: the chosen techniques, as plain values that save to JSON."""

import re
from dataclasses import dataclass
from typing import Final

from tonnage.errors import UsageError
from tonnage.techniques import choices
from tonnage.techniques.technique import listed

PRECISIONS: Final = choices("precision")
OPTIMIZERS: Final = choices("optimizer")
CHECKPOINTINGS: Final = ("none", *choices("checkpointing"))
SHARDS: Final = ("none", *choices("shard"))
OFFLOADS: Final = ("none", *choices("param_offload"))
ATTENTIONS: Final = ("auto", *choices("attention"))
LOSSES: Final = ("plain", *choices("loss"))
ALLOCATORS: Final = ("default", *choices("allocator"))
DTYPES: Final = ("fp32", "bf16", "fp16")

_EVERY = re.compile(r"every-([1-9][0-9]*)")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One value of every technique family; the defaults are what a plain PyTorch loop does under autocast."""

    precision: str = "bf16-mixed"
    """`bf16-mixed`: fp32 weights, bf16 autocast; `bf16-true`: all bf16; `fp16-mixed`: autocast, GradScaler."""
    base_dtype: str | None = None
    """Dtype of LoRA's frozen weights; None: the compute dtype of `precision`."""
    optimizer: str = "adamw"
    """`adamw` is torch's default choice (foreach on CUDA); the suffixed ones force an implementation."""
    checkpointing: str = "none"
    """Which layers recompute their activations in backward."""
    shard: str = "none"
    """What is divided among the data-parallel ranks."""
    param_offload: str = "none"
    """Where sharded parameters, gradients and optimizer states rest between uses."""
    attention: str = "auto"
    """The attention backend; `auto` lets torch choose as it does for the card."""
    loss: str = "plain"
    """`plain`: the model's own loss on all logits; `chunked`: the head and loss in slices of tokens."""
    allocator: str = "default"
    """`expandable`: PYTORCH_ALLOC_CONF=expandable_segments:True."""

    def __post_init__(self) -> None:
        _one_of("precision", self.precision, PRECISIONS)
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        _one_of("shard", self.shard, SHARDS)
        _one_of("param-offload", self.param_offload, OFFLOADS)
        _one_of("attention", self.attention, ATTENTIONS)
        _one_of("loss", self.loss, LOSSES)
        _one_of("allocator", self.allocator, ALLOCATORS)
        if self.base_dtype is not None:
            _one_of("base-dtype", self.base_dtype, DTYPES)
        _one_of("checkpointing", self.checkpointing, CHECKPOINTINGS)

    @property
    def checkpoint_interval(self) -> int | None:
        """N of `every-N`: each N-th layer is checkpointed; None for the other choices."""
        match = _EVERY.fullmatch(self.checkpointing)
        return int(match[1]) if match else None

    @property
    def compute_dtype(self) -> str:
        """The dtype in which matrix products run: `bf16`, `fp16` or `fp32`."""
        return self.precision.split("-")[0]


def _one_of(option: str, value: str, possible: tuple[str, ...]) -> None:
    if not listed(value, possible):
        raise UsageError(f"Unknown {option} {value!r}; possible: {', '.join(possible)}.")
