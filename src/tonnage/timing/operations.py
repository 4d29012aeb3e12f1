"""Values that describe what one rank computes for one micro-batch: operations, and its slice of a layer.

An `Operation` has its floating-point operations, the bytes it must move, and the kernels that a host launches for it
(of eager code as the ghost's log counts them).  What a pass over a tensor moves follows from what the code does:
eager code reads and writes a tensor for each line of Python, a fused kernel once for all of them.  For example, the
query projection of Llama 3.1 8B for 4,096 tokens:

    Product("query", 4096, 4096, 4096).operation("bf16").flops  # 2 x 4096 x 4096 x 4096

`layer`, `attention`, `pointwise`, `casts`, `adapters` and `head` list the operations of each part of a network;
`compiled` lists those of a layer under torch.compile.  Letters: timing/shape.py; e bytes of an element of the
computation, r bytes of an element of the residual stream (4 under autocast, where it stays fp32).
"""

from dataclasses import dataclass
from typing import Final

ELEMENT_BYTES: Final[dict[str, float]] = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp4": 0.5}
"""Bytes of an element of each dtype."""


def kept_dtype(dtype: str) -> str:
    """Return the dtype of activations beside matrix products of `dtype`: only operands are narrower than 16 bits."""
    return "bf16" if dtype in ("fp8", "fp4") else dtype


FAMILIES: Final = ("matmul", "attention", "softmax", "pointwise", "norm", "loss", "embedding", "optimizer", "copy")
"""Kinds of operations that differ in what bounds their rate."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation, or several alike, of one rank."""

    name: str
    """Role in the network, e.g. `query` or `softmax backward`."""
    family: str
    """One of FAMILIES, which decides the rate."""
    dtype: str
    """Dtype of the operands."""
    flops: float
    """Multiplications and additions."""
    bytes: float
    """Bytes that it must read and write."""
    kernels: float = 1
    """Kernels that the host launches for it."""
    aligned: bool = True
    """For matmul: rows begin at multiples of 16 bytes; otherwise tensor cores are fed far more slowly."""
    batched: bool = False
    """For matmul: one product for each head, whose matrices begin where a head does."""
    products: int = 1
    """For matmul and attention: products one after the other, each of which fills and drains the card."""
    grouped: bool = False
    """For matmul: belongs to experts, as several products side by side or as one of tokens that were handed over."""
    plain: bool = False
    """For passes over memory: each covers whole rows of one dtype, which any code does at the memory's speed."""


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Part of a layer's work that one rank does for one micro-batch, and the code that does it."""

    tokens: int
    """Tokens T of the micro-batch on this rank, after context parallelism."""
    seq_len: int
    """Tokens that may attend to each other."""
    tp: int = 1
    """Ranks that share each matrix."""
    ep: int = 1
    """Ranks that share the experts."""
    sequence_parallel: bool = False
    """Norms and residuals see T/t tokens."""
    dtype: str = "bf16"
    """Dtype of matrix products."""
    residual_bytes: int = 2
    """Bytes of an element of the residual stream."""
    fused: bool = False
    """Norms, rotations, activations and dropout are one kernel each."""
    liger: bool = False
    """Eager code whose norms, rotations and activations are Liger's kernels, one each."""
    backend: str = "flash"
    """Attention backend: `flash`, `cudnn`, `efficient`, `math`, or `eager`."""
    trained: bool = True
    """The layer's weights get gradients."""
    casts: bool = False
    """Weights are cast to the dtype of the products in each forward pass (autocast)."""
    lora_rank: int = 0
    """Rank of LoRA adapters; 0: none."""
    adapted: frozenset[str] | None = None
    """Products that have adapters; None: all."""
    wide_adapters: bool = False
    """Adapters are fp32 and no autocast makes them narrower: inputs are cast to fp32 and multiplied in it."""
    quantized: bool = False
    """Frozen weights are dequantized (4 bits) each time they are used."""
    wide_between: bool = False
    """Everything between a layer's products, and the head, is fp32: products cast their inputs and outputs."""
    experts: bool = False
    """This layer has experts, where the network has."""
    captured: str = "none"
    """Launches that a CUDA graph replays: `none`, `part` (all but those of its experts' products) or `all`."""
    experts_fused: bool = False
    """Products of experts, their activation and casts are one kernel."""
    experts_whole: bool = False
    """Tensor-parallel ranks have experts of their own, rather than parts of each."""
    compiled: bool = False
    """Inductor made kernels of the layer (timing/compiled.py)."""
    masked: bool = False
    """Attention is given a mask, and so computes what the mask hides."""

    @property
    def one_kernel(self) -> bool:
        """Return True where norms, rotations and activations are one kernel each."""
        return self.fused or self.liger

    @property
    def between(self) -> str:
        """Dtype of attention, of the head, and of the tensors that layers pass over memory."""
        return "fp32" if self.wide_between else kept_dtype(self.dtype)


@dataclass(frozen=True, slots=True)
class Passes:
    """Operations of a part of the network, one after the other."""

    forward: tuple[Operation, ...]
    """Operations of the forward pass."""
    backward: tuple[Operation, ...]
    """Operations of the backward pass."""

    @property
    def flops(self) -> float:
        """Floating-point operations of both passes."""
        return sum(op.flops for op in (*self.forward, *self.backward))


@dataclass(frozen=True, slots=True)
class Product:
    """Linear module: m rows times a matrix of k by n, or this rank's part of it."""

    name: str
    m: float
    k: float
    n: float
    matrices: float = 1
    """Matrices of k by n among which the rows are divided: those of experts."""
    of_experts: bool = False
    """Belongs to experts, even if only one expert is on this rank."""

    def operation(self, dtype: str, suffix: str = "", count: int = 1) -> Operation:
        """Return the product as an operation; both products of the backward pass have the same cost."""
        e = ELEMENT_BYTES[dtype]
        moved = e * (self.m * self.k + self.m * self.n + self.matrices * self.k * self.n)
        flops = 2.0 * self.m * self.k * self.n
        aligned = self.n * e % 16 == 0 and self.k * e % 16 == 0
        return Operation(
            self.name + suffix,
            "matmul",
            dtype,
            count * flops,
            count * moved,
            count,
            aligned,
            products=count,
            grouped=self.of_experts,
        )
