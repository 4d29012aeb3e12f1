"""What Inductor and Triton would read in each job, once for all of them."""

from importlib.util import find_spec


def read() -> None:
    """They name what they keep by all files of their own and of torch's."""
    from torch._inductor.codecache import torch_key

    torch_key()
    if find_spec("triton") is not None:
        from triton.runtime.cache import triton_key

        triton_key()
