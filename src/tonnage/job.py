"""What is to be done: one optimizer step of one model on batches of one shape."""

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from tonnage.options import check, names, number, word

METHODS: Final = ("full", "lora")


@dataclass(frozen=True, kw_only=True)
class ModelRef:
    """A network that can be built without memory: a configuration, or a factory to be called."""

    name: str
    """What the user called it, or the catalog's name."""
    kind: Literal["config", "factory"]
    """`config`: a Hugging Face configuration; `factory`: `package.module:callable` returning an nn.Module."""
    config: dict[str, Any] = field(default_factory=dict)
    """The Hugging Face configuration as in config.json (with `model_type`); empty for a factory."""
    factory: str | None = None
    """`package.module:callable`; imported only in the process that builds the model."""
    source: str = ""
    """Where the configuration comes from: catalog with URL, a path, or a Hub id."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, what is trained of it, and the shape of its batches."""

    model: ModelRef
    """The network."""
    method: str = word("full", "Which parameters are trained.", METHODS)
    lora_rank: int = number(16, "Rank of LoRA's adapters.")
    lora_targets: tuple[str, ...] = names(("all-linear",), "Modules that get adapters; or all-linear.")
    seq_len: int = number(2048, "Tokens of one sequence (image models: ignored).")
    micro_batch: int = number(1, "Sequences of one forward pass on one rank.")
    grad_accum: int = number(1, "Micro-batches of one optimizer step.")

    def __post_init__(self) -> None:
        check(self)

    @property
    def tokens_per_micro_batch(self) -> int:
        """Tokens of one forward pass on one rank."""
        return self.seq_len * self.micro_batch
