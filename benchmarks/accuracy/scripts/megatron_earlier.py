"""As `megatron_te`, of programs that were run with an older Transformer Engine than the one that is here.

What they look for in it by names of then and would go without is named so.
"""

from __future__ import annotations

from benchmarks.accuracy.scripts import megatron_te

IMPORTS = megatron_te.IMPORTS

measure = megatron_te.measure
rehearse = megatron_te.rehearse


def prepare() -> None:
    """As `megatron_te.prepare`, with the names of then."""
    if megatron_te.possible():
        _name_as_then()
    megatron_te.prepare()


def _name_as_then() -> None:
    """Rotary embeddings and the splitting of queries, keys and values have moved; products take their workspace."""
    from transformer_engine.pytorch import attention, cpp_extensions, utils
    from transformer_engine.pytorch.attention import rope
    from transformer_engine.pytorch.module import base

    attention.apply_rotary_pos_emb = rope.apply_rotary_pos_emb
    attention._SplitAlongDim = utils.SplitAlongDim
    if not hasattr(base, "get_workspace"):
        base.get_workspace = lambda: None
        multiply = cpp_extensions.general_gemm
        cpp_extensions.general_gemm = lambda *given, workspace=None, **options: multiply(*given, **options)
