"""The optimizers: what each one keeps, which class makes it, and what every trainer calls it.

    >>> find_optimizer("adamw-8bit").class_name, find_optimizer("adamw-8bit").axolotl
    ('AdamW8bit', 'adamw_bnb_8bit')

Techniques make the class, trainers and exports write the trainer's word, readers look the word up.
`plans.OPTIMIZERS` lists the same names; a test keeps the two equal.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """One value of the option `optimizer`; a trainer's field is None where the trainer has no word for it."""

    name: str
    """The value of the option."""
    family: str
    """The update rule: `adamw`, `sgd`, `adafactor`, `muon` or `lion`."""
    library: str = "torch"
    """The distribution that has the class: `torch`, `bitsandbytes` or `torchao`."""
    class_name: str
    """The class in the library's module `optim`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Its arguments besides parameters and learning rate."""
    learning_rate: float | None = 1e-4
    """The learning rate in tonnage's own loop; None: the default of the class."""
    moments: int
    """State tensors with the shape of the parameter."""
    state_bits: int | None = None
    """Bits of one element of a moment; None: those of the parameter's dtype."""
    block: int | None = None
    """Elements of a compressed moment that share one fp32 scale; None: nothing is compressed."""
    is_paged: bool = False
    """True if moments of 100,000 elements or more are managed memory, which the caching allocator does not count."""
    only_matrices: bool = False
    """True if it takes the matrices of the layers alone; a second optimizer, AdamW, has all other parameters."""

    hf_trainer: Mapping[str, str] | None = None
    """Fields of TrainingArguments, which LLaMA-Factory takes as well; empty: the Trainer's default."""
    axolotl: str | None = None
    """axolotl's `optimizer`."""
    deepspeed: Mapping[str, Any] | None = None
    """Parameters of the AdamW in ds_config.json; empty: FusedAdam on the card, DeepSpeedCPUAdam on the host."""
    torchtitan: str | None = None
    """`OptimizersContainer.Config.implementation`."""
    megatron: str | None = None
    """`OptimizerConfig.optimizer`; without Transformer Engine and Apex it is the class of torch."""

    @property
    def module(self) -> str:
        """The module of the class."""
        return f"{self.library}.optim"

    def state_bytes(self, elements: int, element_bytes: int) -> int:
        """Return the bytes of the moments of a compressible parameter, without tables that parameters share.

        A parameter is compressible if it has at least 4,096 elements and, for torchao, whole blocks.  The states of
        smaller ones are fp32 in bitsandbytes and have the parameter's dtype in torchao.  `element_bytes` are those of
        the parameter's dtype.
        """
        bits = 8 * element_bytes if self.state_bits is None else self.state_bits
        scales = 0 if self.block is None else 4 * elements // self.block
        return self.moments * (elements * bits // 8 + scales)


OPTIMIZERS: Final[tuple[Optimizer, ...]] = (
    Optimizer(
        name="adamw",
        family="adamw",
        class_name="AdamW",
        moments=2,
        hf_trainer={},
        axolotl="adamw_torch_fused",
        deepspeed={},
        torchtitan="fused",
        megatron="adam",
    ),
    Optimizer(
        name="adamw-loop",
        family="adamw",
        class_name="AdamW",
        arguments={"foreach": False, "fused": False},
        moments=2,
        deepspeed={"torch_adam": True, "foreach": False},
        torchtitan="for-loop",
    ),
    Optimizer(
        name="adamw-foreach",
        family="adamw",
        class_name="AdamW",
        arguments={"foreach": True},
        moments=2,
        hf_trainer={"optim": "adamw_torch"},
        axolotl="adamw_torch",
        deepspeed={"torch_adam": True, "foreach": True},
        torchtitan="foreach",
    ),
    Optimizer(
        name="adamw-fused",
        family="adamw",
        class_name="AdamW",
        arguments={"fused": True},
        moments=2,
        hf_trainer={"optim": "adamw_torch_fused"},
        axolotl="adamw_torch_fused",
        torchtitan="fused",
    ),
    Optimizer(
        name="sgd",
        family="sgd",
        class_name="SGD",
        arguments={"momentum": 0.9},
        learning_rate=1e-3,
        moments=1,
        hf_trainer={"optim": "sgd", "optim_args": "momentum=0.9"},
        megatron="sgd",
    ),
    Optimizer(
        name="sgd-plain",
        family="sgd",
        class_name="SGD",
        learning_rate=1e-3,
        moments=0,
        hf_trainer={"optim": "sgd"},
        axolotl="sgd",
    ),
    Optimizer(
        name="adafactor",
        family="adafactor",
        class_name="Adafactor",
        learning_rate=None,
        moments=0,
        hf_trainer={"optim": "adafactor"},
        axolotl="adafactor",
    ),
    Optimizer(
        name="muon",
        family="muon",
        class_name="Muon",
        learning_rate=1e-3,
        moments=1,
        only_matrices=True,
        axolotl="muon",
    ),
    Optimizer(
        name="adamw-8bit",
        family="adamw",
        library="bitsandbytes",
        class_name="AdamW8bit",
        moments=2,
        state_bits=8,
        block=256,
        hf_trainer={"optim": "adamw_bnb_8bit"},
        axolotl="adamw_bnb_8bit",
    ),
    Optimizer(
        name="paged-adamw",
        family="adamw",
        library="bitsandbytes",
        class_name="PagedAdamW",
        moments=2,
        state_bits=32,
        is_paged=True,
        hf_trainer={"optim": "paged_adamw_32bit"},
        axolotl="paged_adamw_32bit",
    ),
    Optimizer(
        name="paged-adamw-8bit",
        family="adamw",
        library="bitsandbytes",
        class_name="PagedAdamW8bit",
        moments=2,
        state_bits=8,
        block=256,
        is_paged=True,
        hf_trainer={"optim": "paged_adamw_8bit"},
        axolotl="paged_adamw_8bit",
    ),
    Optimizer(
        name="lion",
        family="lion",
        library="bitsandbytes",
        class_name="Lion",
        moments=1,
        state_bits=32,
        hf_trainer={"optim": "lion_32bit"},
        axolotl="lion_32bit",
    ),
    Optimizer(
        name="lion-8bit",
        family="lion",
        library="bitsandbytes",
        class_name="Lion8bit",
        moments=1,
        state_bits=8,
        block=256,
        hf_trainer={"optim": "lion_8bit"},
        axolotl="lion_8bit",
    ),
    Optimizer(
        name="adamw-8bit-ao",
        family="adamw",
        library="torchao",
        class_name="AdamW8bit",
        moments=2,
        state_bits=8,
        block=256,
        hf_trainer={"optim": "adamw_torch_8bit"},
        axolotl="ao_adamw_8bit",
    ),
    Optimizer(
        name="adamw-4bit",
        family="adamw",
        library="torchao",
        class_name="AdamW4bit",
        moments=2,
        state_bits=4,
        block=128,
        hf_trainer={"optim": "adamw_torch_4bit"},
        axolotl="ao_adamw_4bit",
    ),
    Optimizer(
        name="adamw-fp8-ao",
        family="adamw",
        library="torchao",
        class_name="AdamWFp8",
        moments=2,
        state_bits=8,
        block=256,
        axolotl="ao_adamw_fp8",
    ),
)
"""All of them, in the order of `plans.OPTIMIZERS`.

Adafactor keeps the means of rows and columns in place of a moment.  bitsandbytes keeps states in fp32 whatever the
parameter's dtype; torch and torchao keep them in that dtype.
"""

WHOLE_MOMENTS: Final = tuple(row.name for row in OPTIMIZERS if row.moments == 2 and row.state_bits in (None, 32))
"""Optimizers with two moments that are not compressed: each is as large as fp32 gradients."""

_BY_NAME: Final = {optimizer.name: optimizer for optimizer in OPTIMIZERS}


def find_optimizer(name: str) -> Optimizer:
    """Return the optimizer of that name."""
    return _BY_NAME[name]


def words(trainer: str) -> dict[str, Any]:
    """Return a trainer's word for each optimizer that it has one for; `trainer` is a field of Optimizer."""
    return {optimizer.name: word for optimizer in OPTIMIZERS if (word := getattr(optimizer, trainer)) is not None}
