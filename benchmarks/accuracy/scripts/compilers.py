"""What Dynamo, Inductor and Triton would read and import in each job, once for all of them."""

from importlib.util import find_spec

import torch

IMPORTS = (
    "torch._dynamo.backends.inductor",
    "torch._dynamo.dce_extra_outputs",
    "torch._functorch._aot_autograd.subclass_codegen",
    "torch._higher_order_ops.passes.inline_invoke_subgraph",
    "torch._inductor.codegen.memory_planning",
    "torch._inductor.compile_fx",
    "torch._inductor.hooks",
    "torch._subclasses.schema_check_mode",
    "torch.export._trace",
    "torch.fx.experimental.validator",
    "torch.profiler._cupti_monitor",
    "triton.tools.tensor_descriptor",
)


def read() -> None:
    """They name what they keep by all files of their own and of torch's, and tell logs what nobody reads here."""
    from torch._dynamo import guards, symbolic_convert, trace_rules
    from torch._dynamo.backends.registry import list_backends
    from torch._inductor.codecache import torch_key
    from torch._inductor.codegen.common import init_backend_registration

    guards.profile_guard_manager = lambda *of_frame: 0.0  # behind a flush of the processor's caches
    symbolic_convert.get_funcname = lambda *place: None  # for which it splits whole files into words
    trace_rules.get_torch_obj_rule_map()
    torch.overrides.get_testing_overrides()
    list_backends()
    init_backend_registration()
    torch_key()
    if find_spec("triton") is not None:
        from triton.runtime.cache import triton_key

        triton_key()
