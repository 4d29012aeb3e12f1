"""The answer about an inference engine: does it start, and how much KV cache does it hold.

`estimate --task serve` computes it in closed form; a dry-run of an engine fills it with what the engine itself said.
"""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Memory that an engine holds on each GPU at its start, for the worst rank.

    Sizes are bytes of one GPU.  A value of None is unknown, as where an engine ended before it measured it.
    """

    engine: str
    """The engine with its version, such as `vllm 0.19.0`, or `closed form`."""
    starts: bool
    """True if the engine gets ready to serve requests."""
    error: str | None = None
    """Why it does not start, in the engine's own words where it was run; None if it starts."""
    weights_bytes: int | None = None
    """Weights as they are loaded."""
    activation_bytes: int | None = None
    """Peak of the engine's profile run above the weights."""
    graphs_bytes: int | None = None
    """Captured CUDA graphs."""
    outside_torch_bytes: int | None = None
    """Memory outside torch's allocator: CUDA context, loaded kernels, communication buffers."""
    kv_cache_bytes: int | None = None
    """Pool of the KV cache."""
    kv_cache_tokens: int | None = None
    """Tokens that the pool holds."""
    block_tokens: int | None = None
    """Tokens of one block of the pool."""
    blocks: int | None = None
    """Blocks of the pool."""
    concurrency: float | None = None
    """Requests of the maximal length that the pool holds at once."""
    max_len: int | None = None
    """Maximal tokens of one request, prompt and answer together."""
    low_tokens: int | None = None
    """Lower end of the interval of `kv_cache_tokens`."""
    high_tokens: int | None = None
    """Upper end of the interval of `kv_cache_tokens`."""
    compile_cache: str | None = None
    """`cold`: this start compiles the network; `warm`: it finds it compiled; None: nothing is compiled, or unsaid."""
    compile_seconds: float | None = None
    """Seconds that compiling took on the machine that ran it."""
    compile_peak_bytes: int | None = None
    """Peak above the weights while the network is compiled, which a first start profiles too."""
    compiled_here: bool | None = None
    """True if the engine's own cache on this machine has the network compiled; None where it was not looked into."""

    def to_json(self) -> dict[str, Any]:
        """Return the `serving` object of the contract; absent values are None."""
        return asdict(self)
