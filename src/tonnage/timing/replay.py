"""Seconds of a step from the log of its operations on a ghost: the log is replayed with a duration for each record.

The host launches kernels one after the other; each stream runs its launches in order, and waits for the events it is
told to wait for.  This is for networks whose dimensions are not known (`kinds`), and for users' own programs.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tonnage.cluster import Cluster, Device
from tonnage.errors import CannotEstimate
from tonnage.timing import operations, rates
from tonnage.timing.attention import MASKED
from tonnage.timing.collectives import Fabric, Group
from tonnage.timing.data_parallel import GATHERED_TENSOR_SECONDS
from tonnage.timing.fabrics import data_fabric
from tonnage.timing.interval import HOSTS, WAITING, host_assumption, widen_elsewhere
from tonnage.timing.rates import Card, Seconds
from tonnage.timing.software import Software
from tonnage.trace.operations import LAUNCHED, Operation, Record, StepOperations

_TO_CARD, _FROM_CARD, _ON_CARD, _FILL, _COLLECTIVE = 2, 3, 4, 5, 12
_EVENT, _WAIT, _SYNCHRONISE = 14, 15, 16
"""Kinds of records (docs/explanation/ghost.md)."""

_DTYPES: Final = {
    **{"float32": "fp32", "tf32": "tf32", "bfloat16": "bf16", "float16": "fp16"},
    **{"float8_e4m3fn": "fp8", "float8_e5m2": "fp8"},
}

_BACKENDS: Final = ("cudnn", "flash", "efficient")

_SENT: Final = ("Send", "Recv")
"""Exchanges of two ranks, of which one waits for the other's earlier work."""

_GATHERED: Final = "all_gather_copy_in"
"""FSDP2's operation that copies a layer's tensors into one buffer, with Python code for each tensor."""

_READS_LITTLE: Final = ("nll_loss_forward",)
"""Operations that read next to nothing of their inputs."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds of the host, and factors of the card's seconds, of eager code (catalog/times.toml, `pace`)."""

    kernel_seconds: float
    """Seconds of the host for each kernel of the passes, with the Python and the autograd around it."""
    updating_kernel_seconds: float
    """The same for a kernel of an optimizer."""
    again_seconds: float
    """Seconds of the host for each part that is about to run again, besides its kernels."""
    passed_on_seconds: float
    """Seconds of the host for each tensor of a subclass (DTensor) that is passed to an operation."""
    product: float
    """Factor of the card's seconds for products."""
    attention: float
    """Factor for attention."""
    expert: float
    """Factor for products of experts."""
    passing: float
    """Factor for passes over memory."""
    updating: float
    """Factor for passes of an optimizer over memory."""
    low_factor: float
    """Measured / replayed at the 10th percentile of recorded steps."""
    high_factor: float
    """The same at the 90th."""
    rows: str
    """Description of those steps."""

    @staticmethod
    def usual() -> "Pace":
        """Return the pace of the catalog."""
        return Pace(**rates.tables()["pace"])


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """Seconds of a replayed step."""

    step_seconds: float
    """Seconds from the beginning of a step to the beginning of the next."""
    low_seconds: float
    high_seconds: float
    """Ends of the interval."""
    mfu: float
    """Operations of products and attention / seconds / dense peak of the dtype that most of them have; recomputation
    does not count, and masks make no difference."""
    bound_by: str
    """The longest part of the step: `compute`, `memory`, `communication` or `host`."""
    operations: int
    """Operations of the log."""
    rows: str
    """Description of the steps that the rates rest on."""
    assumed: tuple[str, ...]
    """Sentences about what could not be known."""


def replay_step(
    worked: StepOperations, cluster: Cluster, software: Software, pace: Pace | None = None
) -> ReplayedStep:
    """Return the step of one rank.

    Raise CannotEstimate where a rate or a link is not known, or ranks wait for each other.
    """
    device, pace = cluster.device, pace or Pace.usual()
    card, records = rates.card(device), worked.records()
    fabric = data_fabric(cluster, card, software) if cluster.gpus > 1 else None
    of_operation = [_operation_seconds(one, device, card, pace) for one in worked.operations]
    lasting = {place: _record_seconds(record, device, card) for place, record in enumerate(records)}
    passes, updating, flops = Seconds(), 0.0, Counter[str]()
    for number, first, last in worked.places():
        operation, seconds = worked.operations[number], of_operation[number]
        _assign_seconds(seconds.total, records, lasting, first, last)
        if operation.phase == "optimizer":
            updating += seconds.total
            continue
        passes += seconds
        if operation.family != "pass" and operation.phase != "recompute":
            flops[_DTYPES.get(operation.dtype, "bf16")] += operation.flops
    exchanged, slowing = _exchanges(records, fabric, cluster)
    copied = {place: _copy_seconds(records[place], device, card) for place in _find_host_copies(records)}
    launching = _launch_seconds(worked, records, pace)
    step = _step_seconds(records, lasting | exchanged | copied, launching)
    without = {
        "communication": _step_seconds(records, lasting | dict.fromkeys((*exchanged, *copied), 0.0), launching),
        "host": _step_seconds(records, lasting | exchanged | copied, {}),
    }
    moving = sum(exchanged.values()) + sum(copied.values())
    if moving:  # exchanges slow down the computation beside them
        step += slowing * max(0.0, 1 - (step - without["communication"]) / moving)
    bounds = {
        "compute": passes.computing,
        "memory": passes.passing + updating,
        **{name: step - shorter for name, shorter in without.items()},
    }
    dtype = max(flops, key=lambda name: flops[name], default="bf16")
    low, high, assumed = _interval(cluster, card, software, pace, bounds["host"] / step)
    return ReplayedStep(
        step_seconds=step,
        low_seconds=low * step,
        high_seconds=high * step,
        mfu=sum(flops.values()) / step / rates.peak_flops(device, dtype),
        bound_by=max(bounds, key=lambda name: bounds[name]),
        operations=len(worked.numbers) // 3,
        rows=pace.rows,
        assumed=(*assumed, *_describe_unseen(worked, records, cluster)),
    )


def _interval(
    cluster: Cluster, card: Card, software: Software, pace: Pace, waiting: float
) -> tuple[float, float, tuple[str, ...]]:
    """Return the factors of the interval's ends, and what is assumed; `waiting`: part of it that the card waits."""
    low, high = pace.low_factor, pace.high_factor
    assumed: list[str] = []
    if waiting > WAITING:
        low, high = min(low, HOSTS[0]), max(high, HOSTS[1])
        assumed.append(host_assumption(waiting))
    low, high, sentences = widen_elsewhere(low, high, cluster, card, software)
    return low, high, (*assumed, *sentences)


_UNSEEN: Final = 0.02
"""Part of a step's launches past torch from which on they are reported: copies of batches are fewer."""


def _describe_unseen(worked: StepOperations, records: Sequence[Record], cluster: Cluster) -> tuple[str, ...]:
    """Return the sentences about launches that no operation of torch made, and about which ranks share a machine."""
    inside = {place for _, first, last in worked.places() for place in range(first, last)}
    launched = [place for place, record in enumerate(records) if record.kind in LAUNCHED]
    outside = [place for place in launched if place not in inside]
    sentences = []
    if len(outside) > _UNSEEN * len(launched):
        sentences.append(
            f"time: {len(outside):,} of {len(launched):,} kernels and copies were launched past torch's operations "
            "(Triton's, a library's); each counts as the shortest kernel, or by the bytes that it copies"
        )
    if cluster.nodes > 1:
        sentences.append("time: ranks that exchange are assumed to fill a machine before the next")
    return tuple(sentences)


def _launch_seconds(worked: StepOperations, records: Sequence[Record], pace: Pace) -> dict[int, float]:
    """Return the seconds of the host before each launch.

    They are those of Python and autograd, and of FSDP2 and DTensor for each tensor.
    """
    seconds: dict[int, float] = {}
    launches = Counter[str]()
    before = ""
    for place, record in enumerate(records):
        if record.kind in LAUNCHED or record.kind == _COLLECTIVE:
            phase = worked.phases.get(record.mark, "")
            seconds[place] = pace.updating_kernel_seconds if phase == "optimizer" else pace.kernel_seconds
            seconds[place] += pace.again_seconds if phase == "recompute" != before else 0.0
            launches[phase] += 1
            before = phase
    each = {
        phase: count * pace.passed_on_seconds / max(launches[phase], 1) for phase, count in worked.passed_on.items()
    }
    for place in seconds:
        seconds[place] += each.get(worked.phases.get(records[place].mark, ""), 0.0)
    for number, first, last in worked.places():
        operation = worked.operations[number]
        if operation.name == _GATHERED:
            launched = next(place for place in range(first, last) if place in seconds)
            seconds[launched] += operation.tensors * GATHERED_TENSOR_SECONDS
    return seconds


def _assign_seconds(
    seconds: float, records: Sequence[Record], lasting: dict[int, float], first: int, last: int
) -> None:
    """Assign an operation's seconds to its first launch, and none to its other launches."""
    launched = [place for place in range(first, last) if records[place].kind in LAUNCHED]
    for place in launched:
        lasting[place] = 0.0
    lasting[launched[0]] = seconds


def _find_host_copies(records: Sequence[Record]) -> list[int]:
    """Return the places of copies between host and card."""
    return [place for place, record in enumerate(records) if record.kind in (_TO_CARD, _FROM_CARD)]


def _copy_seconds(record: Record, device: Device, card: Card) -> float:
    """Return the seconds of a copy between host and card."""
    link = device.pcie_bytes_per_second or rates.bandwidth(device)
    return card.pass_seconds + record.bytes / link


def _exchanges(records: Sequence[Record], fabric: Fabric | None, cluster: Cluster) -> tuple[dict[int, float], float]:
    """Return the seconds of each collective, and by how many all of them slow down the computation beside them."""
    seconds: dict[int, float] = {}
    slowing = 0.0
    for place, record in enumerate(records):
        if record.kind == _COLLECTIVE and fabric is not None:
            if record.name in _SENT:
                raise CannotEstimate("How long ranks wait for what others send them was not seen.")
            group, moved = _group(record, cluster.gpus_per_node), _whole_bytes(record)
            times = 2 if record.name == "AllReduce" else 1
            seconds[place] = times * fabric.gather(group, moved)
            slowing += times * fabric.slowing(group, moved)
    return seconds, slowing


def _operation_seconds(operation: Operation, device: Device, card: Card, pace: Pace) -> Seconds:
    """Return the seconds of the card for one operation."""
    backend, modelled = _to_model(operation)
    tokens = max(operation.tokens, 1)
    seconds = rates.seconds((modelled,), device, card, backend=backend, seq_len=tokens)
    if operation.phase == "optimizer":
        return seconds.scaled(pace.product, pace.attention, pace.updating, pace.expert)
    return seconds.scaled(pace.product, pace.attention, pace.passing, pace.expert)


def _to_model(operation: Operation) -> tuple[str, operations.Operation]:
    """Return the attention backend of a logged operation, and the operation in the terms of the time model."""
    name, dtype = operation.name, _DTYPES.get(operation.dtype, "bf16")
    if operation.family == "product":
        grouped, batched = "grouped" in name, name in ("bmm", "baddbmm")
        return "", operations.Operation(
            name,
            "matmul",
            dtype,
            operation.flops,
            operation.bytes,
            operation.kernels,
            aligned=operation.aligned,
            batched=batched,
            grouped=grouped,
        )
    if operation.family == "attention":
        backend = next((one for one in _BACKENDS if one in name), "efficient")
        is_backward = "backward" in name
        flops = operation.flops / 2 if operation.causal else float(operation.flops)
        if name.endswith(" masked") and backend in MASKED:
            flops *= MASKED[backend][is_backward] / 2
        role = "attention backward" if is_backward else "attention"
        return backend, operations.Operation(role, "attention", dtype, flops, operation.bytes, operation.kernels)
    moved = 0.0 if name in _READS_LITTLE else float(operation.bytes)
    return "", operations.Operation(name, "pointwise", dtype, 0, moved, operation.kernels)


def _record_seconds(record: Record, device: Device, card: Card) -> float:
    """Return the seconds of a record without an operation: a copy on the card, a fill, or an unknown kernel."""
    if record.kind in (_ON_CARD, _FILL):
        moved = record.bytes * (2 if record.kind == _ON_CARD else 1)
        return card.pass_seconds + moved / (rates.bandwidth(device) * card.memory)
    return card.pass_seconds


def _group(record: Record, per_node: int) -> Group:
    """Return the ranks of a collective; they fill a machine before the next."""
    return Group(record.grid[0], max(1, min(record.grid[0], per_node)))


def _whole_bytes(record: Record) -> int:
    """Return the bytes of a collective's whole tensor.

    A record has the part that this rank gives, of a reduce-scatter the part that it gets.
    """
    return record.bytes * (record.grid[0] if record.name in ("AllGather", "ReduceScatter") else 1)


def _step_seconds(records: Sequence[Record], lasting: Mapping[int, float], launching: Mapping[int, float]) -> float:
    """Return the seconds of a step that follows another like it."""
    clocks = _Clocks()
    clocks.play(records, lasting, launching)
    begin = clocks.latest()
    clocks.play(records, lasting, launching)
    return clocks.latest() - begin


class _Clocks:
    """Times at which the host, and each stream, has done everything that was launched so far."""

    def __init__(self) -> None:
        self.host = 0.0
        self.streams: dict[int, float] = {}
        self.events: dict[int, float] = {}

    def latest(self) -> float:
        """Return the time at which all of them have."""
        return max(self.host, *self.streams.values()) if self.streams else self.host

    def play(self, records: Iterable[Record], lasting: Mapping[int, float], launching: Mapping[int, float]) -> None:
        """Play the records; `lasting`: seconds of each on its stream, `launching`: of the host before each."""
        for place, record in enumerate(records):
            if record.kind in LAUNCHED or record.kind == _COLLECTIVE:
                self.host += launching.get(place, 0.0)
                begin = max(self.host, self.streams.get(record.stream, 0.0))
                self.streams[record.stream] = begin + lasting.get(place, 0.0)
            elif record.kind == _EVENT:
                self.events[record.address] = self.streams.get(record.stream, 0.0)
            elif record.kind == _WAIT:
                ready = max(self.events.get(record.address, 0.0), self.streams.get(record.stream, 0.0))
                self.streams[record.stream] = ready
            elif record.kind == _SYNCHRONISE:
                awaited = self.events.get(record.address, 0.0) if record.flags == 2 else self.latest()
                if not record.flags:
                    awaited = self.streams.get(record.stream, 0.0)
                self.host = max(self.host, awaited)
