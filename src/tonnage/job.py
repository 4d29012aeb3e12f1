"""What is to be done: one optimizer step of one model on batches of one shape."""

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from tonnage.errors import UsageError

Method = Literal["full", "lora"]
METHODS: Final[tuple[Method, ...]] = ("full", "lora")


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
    method: Method = "full"
    """`full`: every parameter is trained; `lora`: low-rank adapters on frozen weights."""
    lora_rank: int = 16
    """Rank of the adapters (method lora)."""
    lora_targets: tuple[str, ...] = ("all-linear",)
    """Names of the adapted linear modules, or `all-linear` as PEFT understands it (method lora)."""
    seq_len: int = 2048
    """Tokens of one sequence (image models: ignored)."""
    micro_batch: int = 1
    """Sequences of one forward pass on one rank."""
    grad_accum: int = 1
    """Micro-batches of one optimizer step."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UsageError(f"Unknown method {self.method!r}; possible: {', '.join(METHODS)}.")
        for name in ("lora_rank", "seq_len", "micro_batch", "grad_accum"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 1.")

    @property
    def tokens_per_micro_batch(self) -> int:
        """Tokens of one forward pass on one rank."""
        return self.seq_len * self.micro_batch
