"""Single operations whose allocations are compared one by one: what each asks of the allocator besides its results.

Each maker prepares its inputs and returns the call to be observed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody knows)
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Call = Callable[[], Any]
Maker = Callable[[], Call]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def operations() -> dict[str, Maker]:
    """All of them by name, in the order in which they are observed."""
    named: dict[str, Maker] = {}
    for group in (
        _products,
        _attention,
        _reductions,
        _norms,
        _losses,
        _indexing,
        _sorting,
        _pointwise,
        _optimizers,
        _convolutions,
        _recurrent,
        _linear_algebra,
        _random,
    ):
        for name, maker in group():
            named[name] = maker
    return named


def _rand(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=FP32).mul_(0.02).to(dtype).requires_grad_(grad)


def _ids(count: int, below: int) -> Tensor:
    return torch.randint(0, below, (count,), device="cuda")


def _backward(forward: Callable[[], Tensor], inputs: list[Tensor]) -> Call:
    """The backward of what `forward` returned, with a gradient of its shape."""
    result = forward()
    gradient = torch.randn_like(result)
    return lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True)


def _products() -> Iterator[tuple[str, Maker]]:
    def product(m: int, n: int, k: int, dtype: torch.dtype) -> Call:
        a, b = _rand(m, k, dtype=dtype), _rand(k, n, dtype=dtype)
        return lambda: a @ b

    shapes = [(4096, 4096, 4096), (4096, 14336, 4096), (4096, 4096, 14336), (4096, 1024, 4096), (2048, 128256, 2048)]
    shapes += [(128, 128, 32768), (16, 4096, 4096), (1, 4096, 4096), (1000, 1000, 1000), (8192, 16, 4096)]
    for m, n, k in shapes:
        yield f"mm bf16 {m}x{n}x{k}", lambda m=m, n=n, k=k: product(m, n, k, BF16)
    for dtype in ("fp16", "fp32"):
        yield f"mm {dtype} 4096x4096x4096", lambda d=dtype: product(4096, 4096, 4096, DTYPES[d])
        yield f"mm {dtype} 128x128x32768", lambda d=dtype: product(128, 128, 32768, DTYPES[d])

    def linear(dtype: torch.dtype, *, bias: bool, backward: bool) -> Call:
        x, w = _rand(4, 1024, 2048, dtype=dtype, grad=True), _rand(4096, 2048, dtype=dtype, grad=True)
        b = _rand(4096, dtype=dtype, grad=True) if bias else None
        if backward:
            return _backward(lambda: F.linear(x, w, b), [t for t in (x, w, b) if t is not None])
        return lambda: F.linear(x, w, b)

    for dtype in ("bf16", "fp32"):
        for bias in (False, True):
            for way in ("forward", "backward"):
                named = f"linear {dtype}{' bias' if bias else ''} {way} 4x1024x2048->4096"
                yield named, lambda d=dtype, b=bias, w=way: linear(DTYPES[d], bias=b, backward=w == "backward")

    def batched(dtype: torch.dtype) -> Call:
        a, b = _rand(64, 512, 128, dtype=dtype), _rand(64, 128, 512, dtype=dtype)
        return lambda: torch.bmm(a, b)

    yield "bmm bf16 64x512x512x128", lambda: batched(BF16)
    yield "bmm fp32 64x512x512x128", lambda: batched(FP32)

    def with_gelu() -> Call:
        x, w, b = _rand(4096, 1024), _rand(1024, 4096), _rand(4096)
        return lambda: torch._addmm_activation(b, x, w, use_gelu=True)

    yield "addmm gelu epilogue bf16", with_gelu

    def grouped() -> Call:
        x, w = _rand(4096, 1024), _rand(8, 1024, 2048)
        ends = torch.arange(512, 4097, 512, device="cuda", dtype=torch.int32)
        return lambda: torch._grouped_mm(x, w, offs=ends)

    yield "grouped_mm bf16 8 groups", grouped

    def scaled() -> Call:
        fp8 = torch.float8_e4m3fn
        a, b = _rand(4096, 4096).to(fp8), _rand(4096, 4096).to(fp8).t()
        one = torch.ones((), device="cuda")
        return lambda: torch._scaled_mm(a, b, one, one, out_dtype=BF16)

    yield "scaled_mm fp8 4096", scaled


def _attention() -> Iterator[tuple[str, Maker]]:
    shapes = [
        ("bf16", 1, 32, 32, 4096, 128, True),
        ("bf16", 1, 32, 8, 4096, 128, True),
        ("bf16", 1, 32, 8, 8192, 128, True),
        ("bf16", 2, 32, 8, 2048, 64, True),
        ("bf16", 4, 16, 16, 1024, 64, True),
        ("bf16", 1, 8, 4, 2048, 256, True),
        ("bf16", 16, 16, 16, 512, 64, False),
        ("bf16", 64, 16, 16, 197, 64, False),
        ("bf16", 2, 9, 3, 1000, 64, True),
        ("bf16", 1, 16, 16, 2048, 96, True),
        ("fp16", 1, 32, 8, 4096, 128, True),
        ("fp32", 1, 32, 32, 2048, 64, True),
    ]

    def attention(
        backend: str, dtype: str, b: int, h: int, kv: int, s: int, d: int, causal: bool, masked: bool, way: str
    ) -> Call:
        q = _rand(b, h, s, d, dtype=DTYPES[dtype], grad=True)
        k, v = (_rand(b, kv, s, d, dtype=DTYPES[dtype], grad=True) for _ in range(2))
        mask = torch.ones(b, 1, s, s, dtype=torch.bool, device="cuda").tril() if masked else None

        def forward() -> Tensor:
            with sdpa_kernel(BACKENDS[backend]):
                return F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=causal and mask is None, enable_gqa=h != kv
                )

        return _backward(forward, [q, k, v]) if way == "backward" else forward

    for backend in BACKENDS:
        for shape in shapes:
            dtype, b, h, kv, s, d, causal = shape
            if backend == "math" and s > 4096:
                continue
            for masked in (False, True) if (b, s) in ((2, 2048), (1, 2048)) else (False,):
                for way in ("forward", "backward"):
                    name = f"sdpa {backend} {dtype} b{b} h{h}/{kv} s{s} d{d}"
                    name += f"{' causal' if causal else ''}{' masked' if masked else ''} {way}"
                    yield name, lambda a=(backend, *shape, masked, way): attention(*a)


def _reductions() -> Iterator[tuple[str, Maker]]:
    def columns(rows: int, width: int, dtype: torch.dtype) -> Call:
        x = _rand(rows, width, dtype=dtype)
        return lambda: x.sum(0)

    for rows, width in (
        (4096, 4096),
        (4096, 2048),
        (8192, 1024),
        (16384, 768),
        (1576, 3072),
        (10000, 2048),
        (64, 65536),
    ):
        yield f"sum(0) bf16 {rows}x{width}", lambda r=rows, w=width: columns(r, w, BF16)
    yield "sum(0) fp32 4096x4096", lambda: columns(4096, 4096, FP32)

    def over(reduce: Callable[[Tensor], Any], dtype: torch.dtype) -> Maker:
        def maker() -> Call:
            x = _rand(4096, 4096, dtype=dtype)
            return lambda: reduce(x)

        return maker

    yield "sum() bf16", over(lambda x: x.sum(), BF16)
    yield "sum() fp32", over(lambda x: x.sum(), FP32)
    yield "sum(-1) bf16", over(lambda x: x.sum(-1), BF16)
    yield "mean(-1) fp32", over(lambda x: x.mean(-1), FP32)
    yield "norm() fp32", over(lambda x: x.norm(), FP32)
    yield "amax(-1) bf16", over(lambda x: x.amax(-1), BF16)
    yield "max() fp32", over(lambda x: x.max(), FP32)
    yield "argmax(-1) fp32", over(lambda x: x.argmax(-1), FP32)
    yield "var(0) fp32", over(lambda x: x.var(0), FP32)
    yield "all() bool", over(lambda x: (x == x).all(), FP32)
    yield "isnan any", over(lambda x: x.isnan().any(), FP32)
    yield "cumsum(-1) fp32", over(lambda x: x.cumsum(-1), FP32)
    yield "cumsum flat fp32", over(lambda x: x.view(-1).cumsum(0), FP32)
    yield "logsumexp fp32", over(lambda x: x.logsumexp(-1), FP32)
    yield "softmax bf16", over(lambda x: x.softmax(-1), BF16)
    yield "softmax bf16->fp32", over(lambda x: F.softmax(x, -1, dtype=FP32), BF16)


def _norms() -> Iterator[tuple[str, Maker]]:
    def layer_norm(dtype: torch.dtype, way: str, width: int) -> Call:
        x = _rand(8, 512, width, dtype=dtype, grad=True)
        w, b = _rand(width, dtype=dtype, grad=True), _rand(width, dtype=dtype, grad=True)
        if way == "forward":
            return lambda: F.layer_norm(x, (width,), w, b)
        return _backward(lambda: F.layer_norm(x, (width,), w, b), [x, w, b])

    def rms_norm(dtype: torch.dtype, way: str) -> Call:
        x, w = _rand(2, 2048, 4096, dtype=dtype, grad=True), _rand(4096, dtype=dtype, grad=True)
        if way == "forward":
            return lambda: F.rms_norm(x, (4096,), w, 1e-5)
        return _backward(lambda: F.rms_norm(x, (4096,), w, 1e-5), [x, w])

    for way in ("forward", "backward"):
        for dtype in ("bf16", "fp32"):
            for width in (768, 1024, 4096):
                yield (
                    f"layer_norm {dtype} 8x512x{width} {way}",
                    lambda d=dtype, w=way, n=width: layer_norm(DTYPES[d], w, n),
                )
            yield f"rms_norm {dtype} 2x2048x4096 {way}", lambda d=dtype, w=way: rms_norm(DTYPES[d], w)

    def group_norm(way: str) -> Call:
        x, w, b = (_rand(*s, dtype=FP32, grad=True) for s in ((8, 64, 56, 56), (64,), (64,)))
        if way == "forward":
            return lambda: F.group_norm(x, 8, w, b)
        return _backward(lambda: F.group_norm(x, 8, w, b), [x, w, b])

    for way in ("forward", "backward"):
        yield f"group_norm fp32 {way}", lambda w=way: group_norm(w)


def _losses() -> Iterator[tuple[str, Maker]]:
    def cross_entropy(dtype: torch.dtype, way: str, tokens: int, vocabulary: int) -> Call:
        x, y = _rand(tokens, vocabulary, dtype=dtype, grad=True), _ids(tokens, vocabulary)
        if way == "forward":
            return lambda: F.cross_entropy(x, y)
        return _backward(lambda: F.cross_entropy(x, y), [x])

    for dtype in ("bf16", "fp32"):
        for way in ("forward", "backward"):
            for tokens, vocabulary in ((4096, 32000), (2048, 128256)):
                named = f"cross_entropy {dtype} {tokens}x{vocabulary} {way}"
                yield named, lambda d=dtype, w=way, t=tokens, v=vocabulary: cross_entropy(DTYPES[d], w, t, v)

    def log_softmax() -> Call:
        x = _rand(4096, 32000, dtype=FP32, grad=True)
        return _backward(lambda: F.log_softmax(x, -1), [x])

    yield "log_softmax fp32 backward", log_softmax


def _indexing() -> Iterator[tuple[str, Maker]]:
    def embedding(tokens: int, vocabulary: int, width: int, way: str, dtype: torch.dtype) -> Call:
        table, ids = _rand(vocabulary, width, dtype=dtype, grad=True), _ids(tokens, vocabulary)
        if way == "forward":
            return lambda: F.embedding(ids, table)
        return _backward(lambda: F.embedding(ids, table), [table])

    yield "embedding bf16 4096x32000x2048 forward", lambda: embedding(4096, 32000, 2048, "forward", BF16)
    for tokens, vocabulary, width, dtype in (
        (512, 32000, 512, "bf16"),
        (1024, 32000, 2048, "bf16"),
        (3072, 32000, 512, "bf16"),
        (3073, 32000, 512, "bf16"),
        (4096, 128256, 2048, "bf16"),
        (4096, 128256, 2048, "fp32"),
        (8192, 50257, 1024, "fp32"),
        (16384, 30522, 1024, "bf16"),
    ):
        named = f"embedding {dtype} {tokens}x{vocabulary}x{width} backward"
        yield named, lambda t=tokens, v=vocabulary, w=width, d=dtype: embedding(t, v, w, "backward", DTYPES[d])

    def put(accumulate: bool) -> Call:
        x, ids, values = _rand(8192, 512), _ids(4096, 8192), _rand(4096, 512)
        return lambda: x.index_put_((ids,), values, accumulate=accumulate)

    yield "index_put accumulate", lambda: put(True)
    yield "index_put", lambda: put(False)

    def indexed(call: Callable[[Tensor, Tensor], Any]) -> Maker:
        def maker() -> Call:
            x, ids = _rand(4096, 1024), _ids(4096, 4096)
            return lambda: call(x, ids)

        return maker

    yield "index_select", indexed(lambda x, ids: x.index_select(0, ids))
    yield "index", indexed(lambda x, ids: x[ids])
    yield "index_add", indexed(lambda x, ids: x.index_add_(0, ids, x.clone()))
    yield "gather", indexed(lambda x, ids: x.gather(1, ids[:, None] % 1024))
    yield "scatter_add", indexed(lambda x, ids: x.scatter_add_(1, ids[:, None] % 1024, x[:, :1].clone()))
    yield "nonzero", indexed(lambda x, ids: (ids % 2).nonzero())
    yield "masked_select", indexed(lambda x, ids: ids[ids % 2 == 0])
    yield "bincount", indexed(lambda x, ids: torch.bincount(ids, minlength=4096))
    yield "histc", indexed(lambda x, ids: torch.histc(ids.float(), 8))
    yield "one_hot", indexed(lambda x, ids: F.one_hot(ids % 8, 8))
    yield "item", indexed(lambda x, ids: ids[0].item())


def _sorting() -> Iterator[tuple[str, Maker]]:
    def on(make: Callable[[], Tensor], call: Callable[[Tensor], Any]) -> Maker:
        def maker() -> Call:
            x = make()
            return lambda: call(x)

        return maker

    yield "topk 2 of 8", on(lambda: _rand(4096, 8, dtype=FP32), lambda x: x.topk(2))
    yield "topk 8 of 128", on(lambda: _rand(4096, 128, dtype=FP32), lambda x: x.topk(8))
    yield "topk 50 of 128256", on(lambda: _rand(8, 128256, dtype=FP32), lambda x: x.topk(50))
    yield "sort 4096 int64", on(lambda: _ids(4096, 8), lambda x: x.sort())
    yield "sort 16384 int64", on(lambda: _ids(16384, 8), lambda x: x.sort())
    yield "sort 1048576 fp32", on(lambda: _rand(1 << 20, dtype=FP32), lambda x: x.sort())
    yield "sort 64x1024 fp32", on(lambda: _rand(64, 1024, dtype=FP32), lambda x: x.sort(-1))
    yield "sort 64x8192 fp32", on(lambda: _rand(64, 8192, dtype=FP32), lambda x: x.sort(-1))
    yield "argsort stable", on(lambda: _ids(8192, 8), lambda x: x.argsort(stable=True))
    yield "unique", on(lambda: _ids(4096, 100), lambda x: x.unique())
    yield "kthvalue", on(lambda: _rand(64, 8192, dtype=FP32), lambda x: x.kthvalue(10))
    yield "searchsorted", on(lambda: _ids(4096, 100).sort()[0], lambda x: torch.searchsorted(x, x))


def _pointwise() -> Iterator[tuple[str, Maker]]:
    def on(call: Callable[[Tensor], Any], *, backward: bool = False, dtype: torch.dtype = BF16) -> Maker:
        def maker() -> Call:
            x = _rand(4096, 4096, dtype=dtype, grad=True)
            return _backward(lambda: call(x), [x]) if backward else lambda: call(x)

        return maker

    for name, call in (
        ("gelu", F.gelu),
        ("gelu tanh", lambda x: F.gelu(x, approximate="tanh")),
        ("silu", F.silu),
        ("dropout", lambda x: F.dropout(x, 0.1)),
        ("softmax", lambda x: x.softmax(-1)),
        ("tanh", torch.tanh),
        ("to fp32", lambda x: x.float()),
        ("transposed copy", lambda x: x.t().contiguous()),
        ("rotate half", lambda x: torch.cat((-x[:, 2048:], x[:, :2048]), -1)),
        ("mul", lambda x: x * x),
        ("where", lambda x: torch.where(x > 0, x, 0.0)),
    ):
        yield f"{name} bf16 forward", on(call)
        yield f"{name} bf16 backward", on(call, backward=True)

    def autocast_linear(way: str) -> Call:
        x, w = _rand(4096, 2048, dtype=FP32, grad=True), _rand(4096, 2048, dtype=FP32, grad=True)

        def forward() -> Tensor:
            with torch.autocast("cuda", BF16):
                return F.linear(x, w)

        return _backward(forward, [x, w]) if way == "backward" else forward

    for way in ("forward", "backward"):
        yield f"autocast linear {way}", lambda w=way: autocast_linear(w)


def _optimizers() -> Iterator[tuple[str, Maker]]:
    def stepping(make: Callable[[list[Tensor]], Any], dtype: torch.dtype) -> Call:
        parameters = [nn.Parameter(_rand(1024, 4096 + 512 * i, dtype=dtype)) for i in range(8)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = make(parameters)  # type: ignore[arg-type]
        return lambda: optimizer.step()

    makers: dict[str, Callable[[list[Tensor]], Any]] = {
        "adamw": torch.optim.AdamW,
        "adamw loop": lambda p: torch.optim.AdamW(p, foreach=False),
        "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
        "adamw capturable": lambda p: torch.optim.AdamW(p, capturable=True),
        "sgd": lambda p: torch.optim.SGD(p, 0.1),
        "sgd momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        "adafactor": lambda p: torch.optim.Adafactor(p),
        "muon": lambda p: torch.optim.Muon(p),
        "adagrad": lambda p: torch.optim.Adagrad(p),
        "rmsprop": lambda p: torch.optim.RMSprop(p),
    }
    for name, make in makers.items():
        for dtype in ("bf16", "fp32"):
            yield f"optimizer {name} {dtype}", lambda m=make, d=dtype: stepping(m, DTYPES[d])

    def clipping() -> Call:
        parameters = [nn.Parameter(_rand(1024, 4096, dtype=FP32)) for _ in range(8)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        return lambda: nn.utils.clip_grad_norm_(parameters, 1.0)

    yield "clip_grad_norm_", clipping

    def unscaling() -> Call:
        gradients = [_rand(1024, 4096, dtype=FP32) for _ in range(8)]
        found, scale = torch.zeros((), device="cuda"), torch.ones((), device="cuda")
        return lambda: torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, scale)

    yield "amp unscale", unscaling


def _convolutions() -> Iterator[tuple[str, Maker]]:
    def convolution(
        dtype: torch.dtype, way: str, shape: tuple[int, ...], weight: tuple[int, ...], **how: Any
    ) -> Call:
        x, w = _rand(*shape, dtype=dtype, grad=True), _rand(*weight, dtype=dtype, grad=True)
        b = _rand(weight[0], dtype=dtype, grad=True)
        convolve: Callable[..., Tensor] = F.conv2d if len(shape) == 4 else F.conv1d
        if way == "forward":
            return lambda: convolve(x, w, b, **how)
        return _backward(lambda: convolve(x, w, b, **how), [x, w, b])

    kinds: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
        "patches 16": ((64, 3, 224, 224), (1024, 3, 16, 16), {"stride": 16}),
        "3x3": ((16, 64, 56, 56), (64, 64, 3, 3), {"padding": 1}),
        "1x1": ((16, 256, 28, 28), (512, 256, 1, 1), {}),
        "7x7 stride 2": ((16, 3, 224, 224), (64, 3, 7, 7), {"stride": 2, "padding": 3}),
        "depthwise 1d": ((4, 2048, 1024), (2048, 1, 4), {"groups": 2048, "padding": 3}),
        "whisper 1d": ((8, 80, 3000), (384, 80, 3), {"padding": 1}),
    }
    for name, (shape, weight, how) in kinds.items():
        for dtype in ("bf16", "fp32"):
            for way in ("forward", "backward"):
                named = f"conv {name} {dtype} {way}"
                yield named, lambda d=dtype, y=way, s=shape, w=weight, h=how: convolution(DTYPES[d], y, s, w, **h)

    def batch_norm(dtype: torch.dtype, way: str) -> Call:
        x = _rand(16, 64, 56, 56, dtype=dtype, grad=True)
        w, b = _rand(64, dtype=FP32, grad=True), _rand(64, dtype=FP32, grad=True)
        mean, var = torch.zeros(64, device="cuda"), torch.ones(64, device="cuda")
        if way == "forward":
            return lambda: F.batch_norm(x, mean, var, w, b, True)
        return _backward(lambda: F.batch_norm(x, mean, var, w, b, True), [x, w, b])

    for dtype in ("bf16", "fp32"):
        for way in ("forward", "backward"):
            yield f"batch_norm {dtype} {way}", lambda d=dtype, w=way: batch_norm(DTYPES[d], w)

    def image(call: Callable[[Tensor], Tensor], way: str) -> Call:
        x = _rand(16, 64, 56, 56, grad=True)
        return _backward(lambda: call(x), [x]) if way == "backward" else lambda: call(x)

    for way in ("forward", "backward"):
        yield f"max_pool2d {way}", lambda w=way: image(lambda x: F.max_pool2d(x, 2), w)
        yield f"avg_pool2d {way}", lambda w=way: image(lambda x: F.avg_pool2d(x, 2), w)
        yield f"interpolate {way}", lambda w=way: image(lambda x: F.interpolate(x, scale_factor=2.0), w)
        yield f"adaptive_avg_pool2d {way}", lambda w=way: image(lambda x: F.adaptive_avg_pool2d(x, 1), w)


def _recurrent() -> Iterator[tuple[str, Maker]]:
    def network(
        kind: type[nn.RNNBase], dtype: torch.dtype, way: str, shape: tuple[int, ...] = (16, 128, 512), **more: Any
    ) -> Call:
        options = {"hidden_size": 512, "num_layers": 2, **more}
        module = kind(shape[-1], batch_first=True, **options).to("cuda", dtype)
        x = _rand(*shape, dtype=dtype, grad=True)
        if way == "forward":
            return lambda: module(x)[0]
        return _backward(lambda: module(x)[0], [x, *module.parameters()])

    for kind in (nn.LSTM, nn.GRU):
        for dtype in ("fp32", "bf16"):
            for way in ("forward", "backward"):
                yield f"{kind.__name__} {dtype} {way}", lambda k=kind, d=dtype, w=way: network(k, DTYPES[d], w)
    sizes: dict[str, dict[str, Any]] = {  # no two of which agree in any dimension: the workspace is to be taken apart
        "of one layer": {"shape": (8, 60, 96), "hidden_size": 320, "num_layers": 1},
        "of three layers": {"shape": (20, 100, 160), "hidden_size": 224, "num_layers": 3},
        "both ways": {"shape": (12, 90, 128), "hidden_size": 192, "num_layers": 2, "bidirectional": True},
        "with dropout": {"shape": (24, 70, 256), "hidden_size": 288, "num_layers": 2, "dropout": 0.1},
    }
    for kind in (nn.RNN, nn.LSTM, nn.GRU):
        for name, size in sizes.items():
            yield f"{kind.__name__} {name}", lambda k=kind, s=size: network(k, torch.float32, "backward", **s)


def _linear_algebra() -> Iterator[tuple[str, Maker]]:
    def on(call: Callable[[Tensor], Any]) -> Maker:
        def maker() -> Call:
            x = torch.randn(512, 512, device="cuda")
            spd = x @ x.t() + 512 * torch.eye(512, device="cuda")
            return lambda: call(spd)

        return maker

    for name, call in (
        ("cholesky", torch.linalg.cholesky),
        ("qr", torch.linalg.qr),
        ("svd", torch.linalg.svd),
        ("eigh", torch.linalg.eigh),
        ("inv", torch.linalg.inv),
        ("solve", lambda x: torch.linalg.solve(x, x)),
        ("lu", torch.linalg.lu_factor),
        ("fft", torch.fft.rfft),
        ("fft2", torch.fft.fft2),
    ):
        yield f"{name} 512", on(call)

    def sparse() -> Call:
        matrix = torch.eye(1024, device="cuda").to_sparse_csr()
        dense = torch.randn(1024, 256, device="cuda")
        return lambda: matrix @ dense

    yield "sparse csr mm", sparse


def _random() -> Iterator[tuple[str, Maker]]:
    def on(call: Callable[[Tensor], Any]) -> Maker:
        def maker() -> Call:
            x = torch.empty(4096, 4096, device="cuda")
            return lambda: call(x)

        return maker

    yield "normal_", on(lambda x: x.normal_(0, 0.02))
    yield "uniform_", on(lambda x: x.uniform_())
    yield "trunc_normal_", on(lambda x: nn.init.trunc_normal_(x, 0, 0.02))
    yield "bernoulli", on(lambda x: x.bernoulli_(0.5))
    yield "randperm", on(lambda x: torch.randperm(8192, device="cuda"))
    yield "randint", on(lambda x: torch.randint(0, 100, (4096,), device="cuda"))
    yield "multinomial", on(lambda x: torch.multinomial(torch.ones(8, 1000, device="cuda"), 4))
    yield "multinomial replacement", on(lambda x: torch.multinomial(torch.ones(8, 1000, device="cuda"), 4, True))
    yield "exponential_", on(lambda x: x.exponential_())
