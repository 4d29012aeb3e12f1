"""Single operations forward and backward: the peak of torch's counter over ten calls, weights and inputs included.

What Liger-Kernel's benchmark measures (linkedin/Liger-Kernel, benchmark/scripts): its own kernels beside torch's and
transformers'.  Gradients add up from call to call, so the median call counts.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from importlib import metadata
from statistics import median
from types import SimpleNamespace
from typing import Any, Final

import torch
from benchmarks.accuracy.scripts import compilers
from torch import nn
from torch.nn import functional

IMPORTS = (
    "transformers.models.llama.modeling_llama",
    "liger_kernel.transformers",
    "triton.experimental.gluon.nvidia.hopper",
    *compilers.IMPORTS,
)
CALLS: Final = 10
Setting = dict[str, Any]
Operation = Callable[[], Any]


def measure(
    kernel: str,
    provider: str,
    size: int,
    setting: Setting,
    mode: str = "full",
    workspaces: bool = False,
    version: str | None = None,
) -> dict[str, int]:
    """Bytes at the peak of the median call.

    `workspaces`: whether products of matrices ran in the process before, whose cuBLAS workspaces stay; `version`: of
    Liger-Kernel, without which the operation is another one.
    """
    if version and _installed() != version:
        raise RuntimeError(f"measured with Liger-Kernel {version}, whose operation is another one")
    values = {**setting, "dtype": getattr(torch, setting.get("dtype", "torch.float32").removeprefix("torch."))}
    if workspaces:
        _use_cublas()
    with torch.device("cuda"):
        forward, backward = OPERATIONS[kernel](provider, size, values)
    if mode == "forward":
        operation: Operation = forward
    elif mode == "backward":
        result = forward()

        def operation() -> None:
            backward(result)
    else:

        def operation() -> None:
            backward(forward())

    return {"allocated_bytes": _median_peak_bytes(operation)}


def rehearse() -> None:
    """What Triton would read in each job."""
    compilers.read()


def _installed() -> str | None:
    """The version of Liger-Kernel."""
    try:
        return metadata.version("liger-kernel")
    except metadata.PackageNotFoundError:
        return None


def _median_peak_bytes(operation: Operation) -> int:
    peaks = []
    for _ in range(CALLS):
        torch.cuda.reset_peak_memory_stats()
        operation()
        peaks.append(torch.cuda.max_memory_allocated())
    return int(median(peaks))


def _use_cublas() -> None:
    """One product forward and one backward: a workspace for this thread and one for autograd's."""
    tensor = torch.ones(8, 8, device="cuda", requires_grad=True)
    (tensor @ tensor).sum().backward()
    del tensor
    gc.collect()


Made = tuple[Callable[[], Any], Callable[[Any], None]]


def _with_gradient(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], None]:
    """Backward with a gradient made anew each time."""

    def backward(result: torch.Tensor) -> None:
        result.backward(make(result), retain_graph=True)

    return backward


def _given(gradient: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """Backward with the same gradient each time."""

    def backward(result: torch.Tensor) -> None:
        result.backward(gradient, retain_graph=True)

    return backward


def _scalar(retain: bool) -> Callable[[torch.Tensor], None]:
    def backward(loss: torch.Tensor) -> None:
        loss.backward(retain_graph=retain)

    return backward


def cross_entropy(provider: str, size: int, setting: Setting) -> Made:
    rows = setting["B"] * setting["T"]
    logits = torch.randn(rows, size, requires_grad=True)
    target = torch.randint(size, (rows,))
    loss: Any = nn.CrossEntropyLoss()
    if provider == "liger":
        from liger_kernel.transformers import LigerCrossEntropyLoss

        loss = LigerCrossEntropyLoss()
    return lambda: loss(logits, target), _scalar(retain=False)


class _LinearThenLoss(nn.Module):
    def __init__(self, hidden: int, vocabulary: int, dtype: torch.dtype, fused: bool) -> None:
        super().__init__()
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        self.lin = nn.Linear(hidden, vocabulary, bias=False, dtype=dtype)
        self.loss = LigerFusedLinearCrossEntropyLoss() if fused else nn.CrossEntropyLoss()
        self.fused = fused

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> Any:
        if self.fused:
            return self.loss(self.lin.weight, hidden, target)
        logits = self.lin(hidden)
        return self.loss(logits, target)


def fused_linear_cross_entropy(provider: str, size: int, setting: Setting) -> Made:
    hidden, vocabulary, dtype = setting["H"], setting["V"], setting["dtype"]
    heads = {name: _LinearThenLoss(hidden, vocabulary, dtype, name == "liger") for name in ("huggingface", "liger")}
    states = torch.randn(size, hidden, requires_grad=True, dtype=dtype)
    target = torch.randint(vocabulary, (size,))
    return lambda: heads[provider](states, target), _scalar(retain=False)


def mlp(provider: str, size: int, setting: Setting) -> Made:
    from liger_kernel.transformers import LigerGEGLUMLP, LigerSwiGLUMLP, LigerTiledGEGLUMLP, LigerTiledSwiGLUMLP
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    config = LlamaConfig(
        hidden_size=setting["hidden_size"],
        intermediate_size=setting["intermediate_size"],
        hidden_act=setting["hidden_act"],
    )
    gelu = setting["hidden_act"] != "silu"
    x = torch.randn(
        setting.get("bsz") or setting["B"],
        size,
        setting["hidden_size"],
        dtype=setting["dtype"],
        requires_grad=True,
    )
    if provider == "liger":
        layer: Any = (LigerGEGLUMLP if gelu else LigerSwiGLUMLP)(config=config)
    elif provider == "liger_tiled":
        layer = (LigerTiledGEGLUMLP if gelu else LigerTiledSwiGLUMLP)(config=config, num_shards=setting["num_shards"])
    elif provider == "deepspeed_tiled":
        layer = _Tiled(LlamaMLP(config=config), setting["num_shards"])
    else:
        layer = LlamaMLP(config=config)
    layer = layer.to(setting["dtype"])
    return lambda: layer(x), _with_gradient(torch.randn_like)


class _Tiled(nn.Module):
    """DeepSpeed's TiledMLP: each tile of the sequence alone, computed again in backward."""

    def __init__(self, inner: Any, shards: int) -> None:
        super().__init__()
        self.inner = inner
        self.shards = shards

    def forward(self, x: torch.Tensor) -> Any:
        return _TiledFunction.apply(self.inner, x, self.shards)


class _TiledFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: Any, x: torch.Tensor, shards: int) -> torch.Tensor:
        ctx.inner, ctx.shards = inner, shards
        ctx.save_for_backward(x)
        tiles = list(torch.chunk(x, chunks=shards, dim=-2))
        with torch.no_grad():
            results = [inner(tile) for tile in tiles]
        return torch.cat(results, dim=-2)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        shape = x.shape
        x = x.detach().requires_grad_(True).view(-1, shape[-1])
        incoming = gradients[0].view(-1, shape[-1])
        x_gradient = torch.zeros_like(x)
        tiles = list(torch.chunk(x, chunks=ctx.shards, dim=0))
        for index, tile in enumerate(tiles):
            tile.requires_grad_(True)
            first = index * tiles[0].shape[0]
            tile.grad = x_gradient.narrow(0, first, tile.shape[0]).view_as(tile)
            share = incoming.narrow(0, first, tile.shape[0]).view_as(tile)
            with torch.enable_grad():
                result = ctx.inner(tile)
            torch.autograd.backward(result, share)
        return None, x_gradient.view(shape), None


def norm(provider: str, size: int, setting: Setting, kind: str) -> Made:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    eps = setting["eps"]
    shape: tuple[int, ...] = (setting["M"], size)
    if kind == "layer":  # each from a module of its own: the oldest Liger-Kernel has not all of them
        from liger_kernel.transformers.layer_norm import LigerLayerNorm

        made = {"liger": LigerLayerNorm(hidden_size=size), "huggingface": nn.LayerNorm(size, eps=eps)}
    elif kind == "rms":
        from liger_kernel.transformers.rms_norm import LigerRMSNorm

        made = {"liger": LigerRMSNorm(hidden_size=size, eps=eps), "huggingface": LlamaRMSNorm(size, eps=eps)}
    else:
        from liger_kernel.transformers.group_norm import LigerGroupNorm

        groups = size // setting["channels_per_group"]
        shape = (setting["M"], size, setting["H"])
        made = {
            "liger": LigerGroupNorm(num_channels=size, num_groups=groups, eps=eps),
            "huggingface": nn.GroupNorm(num_groups=groups, num_channels=size, eps=eps),
        }
    x = torch.randn(shape, dtype=setting["dtype"])
    gradient = torch.randn_like(x)
    x.requires_grad_(True)
    return lambda: made[provider](x), _given(gradient)


class _AddThenNorm(nn.Module):
    """Residual addition and RMS norm in fp32, by torch or with Liger's norm."""

    def __init__(self, hidden: int, eps: float, liger: bool) -> None:
        super().__init__()
        from liger_kernel.transformers import LigerRMSNorm

        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps
        self.norm = LigerRMSNorm(hidden, eps, in_place=False) if liger else None

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor) -> Any:
        dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        residual = residual.to(torch.float32)
        hidden_states = hidden_states + residual
        residual = hidden_states
        if self.norm is None:
            variance = hidden_states.pow(2).mean(-1, keepdim=True)
            hidden_states = hidden_states * torch.rsqrt(variance + self.eps)
        else:
            hidden_states = self.norm(hidden_states)
        return self.weight * hidden_states.to(dtype), residual.to(dtype)


def fused_add_rms_norm(provider: str, size: int, setting: Setting) -> Made:
    from liger_kernel.transformers import LigerFusedAddRMSNorm

    made: dict[str, Any] = {
        "liger_fused_add_rms_norm": LigerFusedAddRMSNorm(hidden_size=size, eps=setting["eps"]),
        "huggingface": _AddThenNorm(size, setting["eps"], liger=False),
        "liger_rms_norm": _AddThenNorm(size, setting["eps"], liger=True),
    }
    x, residual = (torch.randn(setting["M"], size, dtype=setting["dtype"]) for _ in range(2))
    gradients = torch.randn_like(x), torch.randn_like(residual)
    x.requires_grad_(True)
    residual.requires_grad_(True)
    return lambda: made[provider](x, residual), lambda results: torch.autograd.backward(results, gradients)


def elementwise(provider: str, size: int, setting: Setting, kind: str) -> Made:
    from liger_kernel.transformers import LigerReLUSquared, LigerSoftmax

    x = torch.randn(size, dtype=setting["dtype"], requires_grad=True)  # a vector: the benchmark's rows go unused
    if kind == "softmax":
        made: dict[str, Any] = {"liger": LigerSoftmax(), "torch": nn.Softmax(dim=-1)}
    else:
        made = {"liger": LigerReLUSquared(), "torch": lambda x: torch.square(functional.relu(x))}
    return lambda: made[provider](x), _with_gradient(torch.ones_like)


def divergence(provider: str, size: int, setting: Setting, kind: str) -> Made:
    from liger_kernel.transformers import LigerJSD, LigerKLDIVLoss, LigerTVDLoss

    rows = setting["B"] * setting["T"]
    logits, wanted = torch.randn(rows, size, requires_grad=True), torch.randn(rows, size)
    made: dict[str, Any]
    if kind == "kl":
        scores, target = logits.log_softmax(dim=-1), wanted.softmax(dim=-1)
        made = {"liger": LigerKLDIVLoss(reduction="batchmean"), "torch": nn.KLDivLoss(reduction="batchmean")}
    elif kind == "jsd":
        scores, target = logits.log_softmax(dim=-1), wanted.log_softmax(dim=-1)
        made = {"liger": LigerJSD(), "torch": _jensen_shannon}
    else:
        scores, target = logits.softmax(dim=-1), wanted.softmax(dim=-1)
        made = {"liger": LigerTVDLoss(reduction="batchmean"), "torch": _total_variation}
    del logits, wanted
    return lambda: made[provider](scores, target), _scalar(retain=True)


def _total_variation(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    distance = torch.abs(p - q) / 2.0
    return torch.sum(distance) / p.size(0)


def _jensen_shannon(log_q: torch.Tensor, log_p: torch.Tensor, beta: float = 0.5) -> torch.Tensor:
    kl = nn.KLDivLoss(reduction="none", log_target=True)
    dtype = log_q.dtype
    log_p, log_q = log_p.to(torch.float), log_q.to(torch.float)
    middle = torch.lerp(torch.exp(log_q), torch.exp(log_p), beta)
    loss = beta * kl(torch.log(middle), log_p).sum(dim=-1) + (1 - beta) * kl(torch.log(middle), log_q).sum(dim=-1)
    return (loss / log_q.shape[0]).sum().to(dtype)


def fused_linear_jsd(provider: str, size: int, setting: Setting) -> Made:
    from liger_kernel.transformers import LigerFusedLinearJSD

    hidden, vocabulary, dtype = setting["H"], setting["V"], setting["dtype"]
    student = nn.Parameter(torch.rand(vocabulary, hidden, dtype=dtype))
    teacher = nn.Parameter(torch.rand(vocabulary, hidden, dtype=dtype))
    states = torch.rand(size, hidden, requires_grad=True, dtype=dtype)
    wanted = torch.rand(size, hidden, dtype=dtype)
    fused = LigerFusedLinearJSD(jsd_beta=0.5)

    def plain() -> torch.Tensor:
        logits = functional.linear(states, student)
        target = functional.linear(wanted, teacher)
        scores = torch.log_softmax(logits / 1.0, dim=-1)
        target_scores = torch.log_softmax(target / 1.0, dim=-1)
        return _jensen_shannon(scores, target_scores)

    def forward() -> Any:
        return fused(states, student, wanted, teacher) if provider == "liger" else plain()

    return forward, _scalar(retain=False)


def sparsemax(provider: str, size: int, setting: Setting) -> Made:
    from liger_kernel.transformers import LigerSparsemax

    x = torch.randn(setting["B"] * setting["T"], size, dtype=setting["dtype"])
    gradient = torch.randn_like(x)
    x.requires_grad_(True)
    module = LigerSparsemax(dim=setting["dim"])
    return lambda: module(x), _given(gradient)


def rope(provider: str, size: int, setting: Setting) -> Made:
    from liger_kernel.transformers import liger_rotary_pos_emb
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    hidden, length = setting.get("hidden_size", size), setting.get("seq_len", size)
    heads, dtype = setting["num_q_heads"], setting["dtype"]
    width = hidden // heads
    q, k = (
        torch.randn((1, length, count, width), requires_grad=True, dtype=dtype).transpose(1, 2)
        for count in (heads, setting["num_kv_heads"])
    )
    gradients = torch.randn_like(q, dtype=dtype), torch.randn_like(k)
    # Angles by a product of matrices, as transformers made them when this was measured: cuBLAS's workspace stays.
    angles = (torch.ones(1, width // 2, 8) @ torch.ones(1, 8, length)).transpose(1, 2)
    both = torch.cat((angles, angles), dim=-1)
    cos, sin = both.cos().to(dtype), both.sin().to(dtype)
    del angles, both
    apply = liger_rotary_pos_emb if provider == "liger" else apply_rotary_pos_emb

    def backward(results: Any) -> None:
        torch.autograd.grad(results, (q, k), gradients, allow_unused=True, retain_graph=True)

    return lambda: apply(q, k, cos, sin), backward


class _Neighborhood(nn.Module):
    """Attention of each position to its neighbours, with all scores; which ones they are changes no size."""

    def __init__(self, hidden: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(hidden, hidden, bias=bias) for _ in range(4)
        )

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = states.shape
        q, k, v = (
            projection(states).view(batch, length, self.heads, -1).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = torch.matmul(q, k.transpose(-2, -1)) * (1.0 / math.sqrt(hidden // self.heads))
        mask = torch.zeros(length, length, dtype=torch.bool, device="cuda")
        scores = scores.masked_fill(~mask, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        result = torch.matmul(weights, v)
        result = result.transpose(1, 2).contiguous().view(batch, length, hidden)
        return self.out_proj(result)  # type: ignore[no-any-return]


def fused_neighborhood_attention(provider: str, size: int, setting: Setting) -> Made:
    from liger_kernel.transformers.fused_neighborhood_attention import LigerFusedNeighborhoodAttention

    liger = LigerFusedNeighborhoodAttention(
        hidden_size=setting["hidden_size"],
        num_heads=setting["num_heads"],
        kernel_size=setting["kernel_size"],
        dilation=setting["dilation"],
        bias=setting["bias"],
        dropout=0.0,
    ).to(setting["dtype"])
    plain = _Neighborhood(setting["hidden_size"], setting["num_heads"], setting["bias"]).to(setting["dtype"])
    made = {"liger": liger, "torch": plain}
    x = torch.randn((setting["batch_size"], size, setting["hidden_size"]), dtype=setting["dtype"])
    gradient = torch.randn_like(x)
    x.requires_grad_(True)
    return lambda: made[provider](x), _given(gradient)


def megatron(provider: str, size: int, setting: Setting, kind: str) -> Made:
    """Liger's counterparts of Megatron's modules, and torch's; bf16, a loss that is a sum."""
    rows = setting["S"], setting["B"]
    width = 2 * size if kind == "swiglu" else size
    x = torch.randn(*rows, width, dtype=torch.bfloat16, requires_grad=True)
    if kind == "rms":
        layer = _megatron_rms(provider, size).to(torch.bfloat16)
        return lambda: layer(x), lambda result: result.sum().backward()
    from liger_kernel.megatron import LigerMegatronSwiGLU

    module = LigerMegatronSwiGLU(in_place=True) if provider == "liger_in_place" else None

    def forward() -> Any:
        x.grad = None
        if module is not None:
            return module(x, None, False, False)
        gate, up = torch.chunk(x, 2, -1)
        return functional.silu(gate) * up

    return forward, lambda result: result.sum().backward()


def _megatron_rms(provider: str, size: int) -> Any:
    if provider != "liger":
        return nn.RMSNorm(normalized_shape=size, eps=1e-6)
    from liger_kernel.megatron import LigerMegatronRMSNorm

    config = SimpleNamespace(normalization="RMSNorm", sequence_parallel=False, layernorm_zero_centered_gamma=False)
    return LigerMegatronRMSNorm(config=config, hidden_size=size, eps=1e-6)


def _kind(make: Callable[..., Made], kind: str) -> Callable[[str, int, Setting], Made]:
    return lambda provider, size, setting: make(provider, size, setting, kind)


OPERATIONS: Final[dict[str, Callable[[str, int, Setting], Made]]] = {
    "cross_entropy": cross_entropy,
    "fused_add_rms_norm": fused_add_rms_norm,
    "fused_linear_cross_entropy": fused_linear_cross_entropy,
    "fused_linear_jsd": fused_linear_jsd,
    "fused_neighborhood_attention": fused_neighborhood_attention,
    "geglu": mlp,
    "group_norm": _kind(norm, "group"),
    "jsd": _kind(divergence, "jsd"),
    "kl_div": _kind(divergence, "kl"),
    "layer_norm": _kind(norm, "layer"),
    "megatron_rms_norm": _kind(megatron, "rms"),
    "megatron_swiglu": _kind(megatron, "swiglu"),
    "relu_squared": _kind(elementwise, "relu_squared"),
    "rms_norm": _kind(norm, "rms"),
    "rope": rope,
    "softmax": _kind(elementwise, "softmax"),
    "sparsemax": sparsemax,
    "swiglu": mlp,
    "tiled_geglu": mlp,
    "tiled_swiglu": mlp,
    "tvd": _kind(divergence, "tvd"),
}
