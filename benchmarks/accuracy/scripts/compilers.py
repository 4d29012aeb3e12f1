"""What Dynamo, Inductor and Triton would find out in each job, once for all jobs, and what none needs of them."""

import functools
import platform
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

IMPORTS = (
    "sympy.combinatorics.perm_groups",
    "sympy.physics.units",
    "sympy.tensor.tensor",
    "torch._dynamo.backends.inductor",
    "torch._dynamo.dce_extra_outputs",
    "torch._functorch._activation_checkpointing.remat_using_tags_for_fwd_loss_bwd_graph_pass",
    "torch._functorch._aot_autograd.subclass_codegen",
    "torch._higher_order_ops.passes.inline_invoke_subgraph",
    "torch._inductor.choices",
    "torch._inductor.codegen.memory_planning",
    "torch._inductor.codegen.segmented_tree",
    "torch._inductor.compile_fx",
    "torch._inductor.extern_node_serializer",
    "torch._inductor.fx_passes.apply_gumbel_max_trick",
    "torch._inductor.fx_passes.efficient_conv_bn_eval",
    "torch._inductor.fx_passes.freezing_patterns",
    "torch._inductor.fx_passes.quantization",
    "torch._inductor.hooks",
    "torch._inductor.kernel_template_choice",
    "torch._inductor.tiling_utils",
    "torch._subclasses.schema_check_mode",
    "torch.export._trace",
    "torch.fx.experimental.validator",
    "torch.profiler._cupti_monitor",
    "triton.tools.tensor_descriptor",
)


def read() -> None:
    """They name what they keep by all files of their own and of torch's, and tell logs what nobody reads here."""
    from torch._dynamo import guards, symbolic_convert, trace_rules
    from torch._dynamo import utils as dynamo
    from torch._dynamo.backends.registry import list_backends
    from torch._inductor.codecache import FxGraphCachePickler, torch_key
    from torch._inductor.codegen.common import init_backend_registration

    guards.profile_guard_manager = lambda *of_frame: 0.0  # behind a flush of the processor's caches
    symbolic_convert.get_funcname = lambda *place: None  # for which it splits whole files into words
    FxGraphCachePickler.debug_lines = lambda *of_key: []  # a key for each part of what has one
    dynamo.record_compilation_metrics = lambda *of_compilation: None  # with all settings of all compilers
    trace_rules.get_torch_obj_rule_map()
    trace_rules.clear_lru_cache = lambda: None  # of rules that lacked something; what there is has been imported
    torch.overrides.get_testing_overrides()
    torch.overrides.get_overridable_functions()
    list_backends()
    init_backend_registration()
    torch_key()
    platform.architecture = functools.cache(platform.architecture)
    if find_spec("triton") is not None:
        _read_of_triton()


def _read_of_triton() -> None:
    """What it and who uses it ask of files and of programs beside it: their contents, their versions."""
    from torch.utils import _triton
    from triton import knobs
    from triton.runtime.cache import triton_key

    triton_key()
    knobs.nvidia.ptxas  # noqa: B018 - its version is kept
    if hasattr(_triton, "_extern_libs_key"):  # since torch 2.12
        _triton._extern_libs_key = functools.cache(_triton._extern_libs_key)


def rehearse() -> None:
    """Compile a few functions as programs fuse them, on the host and no further than to C++.

    What Dynamo, Inductor and SymPy find out for the first time is then known to all jobs.  What Inductor decides by
    the card stays open.
    """
    import torch._inductor.utils
    import torch.utils._triton
    from torch._inductor import config, cpu_vec_isa
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.fx_passes import joint_graph
    from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

    def compiled(graph: Any, inputs: Any) -> Any:
        compile_fx(graph, inputs)
        return graph.forward

    x, bias = torch.empty(64, 8, 512), torch.empty(512)
    with (
        patch.object(torch.cuda, "is_available", lambda: False),
        patch.object(tqdm, "monitor_interval", 0),  # else its bars have a thread, and this process will fork
        patch.object(AsyncCompile, "cpp_pybinding", lambda *of_kernel: None),
        patch.object(cpu_vec_isa, "valid_vec_isa_list", list),  # which it compiles programs for
        patch.object(joint_graph, "lazy_init", lambda *of_card: None),
        config.patch({"fx_graph_cache": False}),
    ):
        for function in (_gelu, _silu, _added):
            torch.compile(function, backend=compiled)(x.bfloat16(), bias.bfloat16())
    torch._dynamo.reset()
    for module in (torch._inductor.utils, torch.utils._triton):  # they keep what they were told of a card
        for function in vars(module).values():
            getattr(function, "cache_clear", lambda: None)()


def _gelu(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """With bias, by tanh (arXiv 1606.08415, section 2), and its slope."""
    x = x + bias
    inner = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
    slope = 0.5 * x * ((1 - inner * inner) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + inner)
    return x * 0.5 * (1.0 + inner), (slope * x).sum((0, 1))


def _silu(x: Tensor, bias: Tensor) -> Tensor:
    """Gated, in fp32."""
    gate, value = torch.chunk((x + bias).float(), 2, -1)
    return (functional.silu(gate) * value).to(x.dtype)


def _added(x: Tensor, bias: Tensor) -> Tensor:
    """After dropout."""
    return x + functional.dropout(x + bias, 0.1)


def leave_kernels_out() -> None:
    """From now on Triton compiles none of Inductor's kernels and none is timed or launched; what surrounds them runs.

    It timed kernels of several forms with copies and a buffer as large as the second-level cache; a kernel itself
    computes nothing here and asks for no memory.
    """
    from torch._inductor.async_compile import AsyncCompile

    nothing = SimpleNamespace(run=lambda *arguments, **options: None)
    AsyncCompile.triton = lambda *arguments, **options: nothing  # type: ignore[method-assign]
