"""What the code that runs a step adds to what the card must do: launches, latencies, how much it overlaps."""

from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any, Final

from tonnage.errors import CannotEstimate
from tonnage.timing.rates import tables

OF_ENGINE: Final = {"megatron": "megatron"}
"""Which software an engine of a Plan is; the others run transformers' eager code."""


CHOOSING: Final = 0.8
"""What op-level checkpointing, which looks at each operation in Python, costs the host relative to launching it: an
assumption, with no source."""


@dataclass(frozen=True, kw_only=True)
class Software:
    """A family of training codes, calibrated together."""

    name: str
    """What it is called here."""
    fused: bool = False
    """Whether norms, rotations, activations and dropout are one kernel each."""
    stops_early: bool = False
    """Whether a layer that runs again stops at the last tensor that its backward asks for, as torch's checkpointing
    does that does not re-enter; False: it runs to its end."""
    balanced: bool = False
    """Whether pipeline stages get layers by their cost; False: equally many."""
    kernel_seconds: float = 6e-6
    """Of the host for each kernel that it launches."""
    compiled_kernel_seconds: float = 1e-5
    """Of the host for each that compiled code launches, without modules or autograd between: taken for as long as one
    of an optimizer's."""
    compiled_call_seconds: float = 0.0
    """Of the host for each pass through compiled code: its guards, and autograd's function around it."""
    looped_kernel_seconds: float = 0.0
    """Of the host for each of those that a loop over experts launches, where it is not Python's; 0: the same."""
    matmul_factor: float = 1.0
    """Times the card's time for arithmetic."""
    attention_factor: float = 1.0
    """Times the card's time for attention that keeps no scores."""
    memory_factor: float = 1.0
    """Times the card's time for passes over memory."""
    expert_factor: float = 1.0
    """Times the card's time for the products of experts: each has few rows, and the fullest is waited for."""
    fused_expert_factor: float = 1.0
    """The same where they, their activation and casts are one kernel."""
    expert_overlap: float = 0.8
    """Part of a layer's computation behind which handing tokens to experts hides where it is overlapped with another
    micro-batch's."""
    again_seconds: float = 0.0
    """Of the host for each layer that runs again, besides its kernels."""
    call_seconds: float = 20e-6
    """Of each collective among tensor-parallel ranks, before the first byte."""
    hop_seconds: float = 2e-6
    """Of each hop of such a collective within a machine."""
    far_hop_seconds: float = 10e-6
    """Of each hop of such a collective that spans machines."""
    piped_rank_seconds: float = 0.0
    """In place of these where a pipeline spans machines too: what the host waits in such a collective for each of its
    ranks; 0: as elsewhere."""
    piped_far_rank_seconds: float = 0.0
    """The same where the collective spans machines."""
    tensor_exposed: float = 1.0
    """Part of tensor parallelism's traffic that computation does not hide."""
    near_part: float = 1.0
    """Part of the links' bandwidth within a machine that it reaches, relative to what the card's table says."""
    far_part: float = 0.8
    """Part of the network's bandwidth that it reaches."""
    data_hop_seconds: float = 5e-6
    """Of each hop within a machine of a ring of data-parallel ranks."""
    data_far_hop_seconds: float = 5e-5
    """Of each such hop between machines."""
    data_overlap: float = 0.5
    """Part of the backward pass behind which averaging gradients hides."""
    bucket_bytes: float = 25e6
    """Of one exchange of gradients."""
    bucket_seconds: float = 0.0
    """Latency of one such exchange for each doubling of the machines."""
    update_seconds: float = 0.0
    """Of each layer for each doubling of the machines, where updated weights are gathered one by one (zero1)."""
    sends_exposed: float = 1.0
    """Part of a pipeline's sends that computation does not hide."""
    crowded_ranks: int = 0
    """Ranks from which on exchanges between machines were seen to stall; 0: never."""
    crowded_tensor_ranks: int = 0
    """Tensor-parallel ranks from which on the hand-overs of a pipeline were; 0: never."""
    handing_seconds: float = 0.0
    """Of a stall in each hand-over between the stages of a pipeline."""
    crowded_seconds: float = 0.0
    """Of a stall in averaging gradients, for each time they go around, without a pipeline."""
    micro_batch_seconds: float = 0.0
    """Of each micro-batch besides."""
    low_factor: float = 0.7
    """Measured / predicted at the 10th percentile of the rows left out."""
    high_factor: float = 1.5
    """The same at the 90th."""
    capabilities: tuple[str, ...] = ()
    """Compute capabilities of the cards whose steps calibrated it."""
    most_gpus: int = 1
    """GPUs of the largest cluster among these."""
    rows: str = ""
    """What calibrated it."""

    @cached_property
    def _hash(self) -> int:
        """Of all that it is: a calibration makes thousands of one name."""
        return hash(tuple(getattr(self, item.name) for item in fields(self)))

    def __hash__(self) -> int:
        return self._hash


@cache
def softwares() -> dict[str, Software]:
    """All that were calibrated, by name."""
    known = {item.name for item in fields(Software)}
    entries: list[dict[str, Any]] = tables()["software"]
    return {entry["name"]: Software(**{k: _frozen(v) for k, v in entry.items() if k in known}) for entry in entries}


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def software(name: str) -> Software:
    """The one of this name.  Raises CannotEstimate with what exists."""
    found = softwares().get(name)
    if found is None:
        raise CannotEstimate(f"The time of {name!r} was never calibrated; calibrated: {', '.join(softwares())}.")
    return found


def software_of(engine: str) -> Software:
    """What runs a Plan of this engine."""
    return software(OF_ENGINE.get(engine, "eager"))
