"""The search space: which options `plan` may choose, and which values it may give them.

`FREE` is always chosen, `LOSSES`, `ORDER` and `AXES` are searched, `CHANGES` and `BUDGET` are searched only where the
user allows it (`--allow optimizer`, `--allow budget`).  The degrees of AXES, which depend on the network and the
cluster, and the combinations of all these values are listed by `candidates.list_candidates`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

FREE: Final[Mapping[str, str]] = {"allocator": "expandable", "optimizer": "adamw-fused"}
"""Values that need less memory, give the same result and take no time; chosen unless something forbids them, and
taken back in the end where a plan fits without them (`prune.py`)."""

FREE_OPTIONS: Final = (*FREE, "attention")
"""`FREE` and the attention, whose best value depends on the network and the card (`candidates.free_choices`)."""

KERNELS: Final = ("flash", "cudnn", "efficient", "flex")
"""Attention that keeps no scores; looked at where a trainer does not leave the choice to torch."""

LOSSES: Final = ("plain", "fused", "chunked", "liger", "torch")
"""Ways to run the head and the loss.  Which needs least depends on the tokens at once: a slice is 1,024 tokens, or
for liger and torch a part of the micro-batch, and leaves holes between the allocator's blocks."""

WHOLE_HEAD: Final = ("fused", "liger", "torch")
"""Losses that no ranks can share: neither the head (tp) nor the sequence (cp)."""

ORDER: Final[Mapping[str, tuple[Any, ...]]] = {
    "shard": ("none", "ddp", "zero1", "zero2", "hsdp", "zero3"),
    "checkpointing": ("none", "every-4", "every-2", "selective", "full"),
    "accum_sync": (False, True),
    "optimizer_in_backward": (False, True),
    "activation_offload": ("none", "cpu-streamed", "cpu"),
    "optimizer_offload": ("none", "cpu"),
    "param_offload": ("none", "cpu"),
}
"""Values of the options that trade time for memory, from the most memory to the least."""

INTERVALS: Final = ("every-4", "every-2")
"""Checkpointing of every N-th layer.  It keeps all of some layers, and selective checkpointing a part of each: which
needs more depends on the network."""

OFFLOADS: Final = ("activation_offload", "optimizer_offload", "param_offload")
"""Options that use the host's memory; tried only if nothing fits without, because the link to the host is slow."""

FILES: Final = "nvme"
"""The offload value for files on a disk; tried only if the host's memory is known and not enough."""

AXES: Final = ("tp", "pp", "cp", "ep")
"""Degrees of the parallel dimensions."""

CHANGES: Final[Mapping[str, tuple[str, ...]]] = {
    "precision": ("bf16-true", "fp8"),
    "optimizer": ("adamw-8bit", "adamw-4bit", "adafactor", "muon"),
}
"""Values that change the mathematics of training, by the option that `--allow` names."""

BUDGET: Final = "budget"
"""The word of `--allow` for checkpointing under a budget of activations, which only tonnage's own loop can run."""

ALLOWABLE: Final = (*CHANGES, BUDGET)
"""Words of `--allow`."""

FAMILIES: Final = (*FREE_OPTIONS, "loss", *ORDER, *AXES, "pp_schedule", "precision", "micro_batch")
"""Options that `--only` and `--without` may name."""
