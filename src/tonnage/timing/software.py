"""Costs of the code that runs a step, beside those of the card: launches, latencies, overlap.

The tables are in catalog/times.toml; `python -m benchmarks.time --calibrate` fits them.
"""

from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any, Final

from tonnage.errors import CannotEstimate
from tonnage.timing.rates import tables

OF_ENGINE: Final = {"megatron": "megatron"}
"""Software by the engine of a Plan; the others run transformers' eager code."""

CHOOSING: Final = 0.8
"""Seconds of op-level checkpointing, which decides for each operation in Python, / those of launching the operation:
an assumption, with no source."""


@dataclass(frozen=True, kw_only=True)
class Software:
    """Family of training codes, calibrated together.

    The fields are flat because each is one number of its table, and one coordinate of the calibration.
    """

    name: str
    """Name of the table."""
    fused: bool = False
    """Norms, rotations, activations and dropout are one kernel each."""
    stops_early: bool = False
    """A layer that runs again stops at the last tensor that its backward asks for, as torch's non-reentrant
    checkpointing does; False: it runs to its end."""
    balanced: bool = False
    """Pipeline stages get layers by their cost; False: equally many."""

    # the host
    kernel_seconds: float = 6e-6
    """Seconds of the host for each kernel that it launches."""
    compiled_kernel_seconds: float = 1e-5
    """Seconds of the host for each kernel of compiled code, without modules or autograd between: assumed as for an
    optimizer's."""
    compiled_call_seconds: float = 0.0
    """Seconds of the host for each pass through compiled code: its guards, and autograd's function around it."""
    looped_kernel_seconds: float = 0.0
    """Seconds of the host for each kernel that a loop over experts launches, where the loop is not Python's; 0: as
    for any other."""
    again_seconds: float = 0.0
    """Seconds of the host for each layer that runs again, besides its kernels."""

    # the card
    matmul_factor: float = 1.0
    """Factor of the card's seconds for arithmetic."""
    attention_factor: float = 1.0
    """Factor of the card's seconds for attention that keeps no scores."""
    memory_factor: float = 1.0
    """Factor of the card's seconds for passes over memory."""
    expert_factor: float = 1.0
    """Factor of the card's seconds for the products of experts: each has few rows, and all wait for the fullest."""
    fused_expert_factor: float = 1.0
    """Factor of the same where products, their activation and casts are one kernel."""
    expert_overlap: float = 0.8
    """Part of handing tokens to experts that another micro-batch's computation can hide, where the two overlap."""

    # tensor parallelism
    call_seconds: float = 20e-6
    """Seconds of each collective among tensor-parallel ranks, before the first byte."""
    hop_seconds: float = 2e-6
    """Seconds of each hop of such a collective within a machine."""
    far_hop_seconds: float = 10e-6
    """Seconds of each hop of such a collective that spans machines."""
    piped_rank_seconds: float = 0.0
    """Seconds that the host waits in such a collective for each of its ranks, in place of the above, where a pipeline
    spans machines; 0: as elsewhere."""
    piped_far_rank_seconds: float = 0.0
    """The same where the collective spans machines too."""
    tensor_exposed: float = 1.0
    """Part of tensor parallelism's traffic that computation does not hide."""

    # data parallelism
    near_part: float = 1.0
    """Part of the links' bandwidth within a machine that it reaches, relative to what the card's table says."""
    far_part: float = 0.8
    """Part of the network's bandwidth that it reaches."""
    data_hop_seconds: float = 5e-6
    """Seconds of each hop within a machine of a ring of data-parallel ranks."""
    data_far_hop_seconds: float = 5e-5
    """Seconds of each such hop between machines."""
    data_overlap: float = 0.5
    """Part of the backward pass behind which averaging gradients hides."""
    bucket_bytes: float = 25e6
    """Bytes of one exchange of gradients."""
    bucket_seconds: float = 0.0
    """Latency of one such exchange for each doubling of the machines."""
    update_seconds: float = 0.0
    """Seconds of each layer for each doubling of the machines, where zero1 gathers updated weights one by one."""

    # pipelines, and exchanges of many ranks
    sends_exposed: float = 1.0
    """Part of a pipeline's sends that computation does not hide."""
    crowded_ranks: int = 0
    """Ranks from which on exchanges between machines were seen to stall; 0: never."""
    crowded_tensor_ranks: int = 0
    """Tensor-parallel ranks from which on the hand-overs of a pipeline were seen to stall; 0: never."""
    handing_seconds: float = 0.0
    """Seconds of a stall in each hand-over between the stages of a pipeline."""
    crowded_seconds: float = 0.0
    """Seconds of a stall in averaging gradients, for each time they go around, without a pipeline."""
    micro_batch_seconds: float = 0.0
    """Further seconds of each micro-batch."""

    # the interval, and what the calibration used
    low_factor: float = 0.7
    """Measured / predicted at the 10th percentile of the rows that calibration left out."""
    high_factor: float = 1.5
    """The same at the 90th."""
    capabilities: tuple[str, ...] = ()
    """Compute capabilities of the cards whose steps calibrated it."""
    most_gpus: int = 1
    """GPUs of the largest cluster among these."""
    rows: str = ""
    """Description of the rows that calibrated it."""

    @cached_property
    def _hash(self) -> int:
        """Hash of all fields, computed once: a calibration makes thousands of one name."""
        return hash(tuple(getattr(self, item.name) for item in fields(self)))

    def __hash__(self) -> int:
        return self._hash


@cache
def softwares() -> dict[str, Software]:
    """Return all calibrated codes, by name."""
    names = {item.name for item in fields(Software)}
    entries: list[dict[str, Any]] = tables()["software"]
    return {entry["name"]: Software(**{k: _freeze(v) for k, v in entry.items() if k in names}) for entry in entries}


def _freeze(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def software(name: str) -> Software:
    """Return the code of this name.  Raise CannotEstimate, with the names there are, for another."""
    code = softwares().get(name)
    if code is None:
        raise CannotEstimate(f"The time of {name!r} was never calibrated; calibrated: {', '.join(softwares())}.")
    return code


def software_of(engine: str) -> Software:
    """Return the code that runs a Plan of this engine."""
    return software(OF_ENGINE.get(engine, "eager"))
