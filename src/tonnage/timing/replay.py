"""How long a step takes of which every operation was seen: the log of a ghost, played with seconds.

The host asks for kernels one after the other; each stream does what it is asked for in order, and waits for what it
is told to wait for.  For networks whose dimensions are not known (`kinds`), and for programs of somebody's own.
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
from tonnage.trace.operations import LAUNCHED, Operation, Record, Worked

_TO_CARD, _FROM_CARD, _ON_CARD, _FILL, _COLLECTIVE = 2, 3, 4, 5, 12
_EVENT, _WAIT, _SYNCHRONISE = 14, 15, 16
"""Kinds of records (docs/explanation/ghost.md)."""

_DTYPES: Final = {
    **{"float32": "fp32", "tf32": "tf32", "bfloat16": "bf16", "float16": "fp16"},
    **{"float8_e4m3fn": "fp8", "float8_e5m2": "fp8"},
}

_BACKENDS: Final = ("cudnn", "flash", "efficient")

_SENT: Final = ("Send", "Recv")
"""Exchanges of two ranks, of which one waits for what the other does before."""

_GATHERED: Final = "all_gather_copy_in"
"""FSDP2's operation that puts a layer's tensors into one buffer, each by Python of its own."""

_READS_LITTLE: Final = ("nll_loss_forward",)
"""Operations that read next to nothing of what they are given."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What eager code takes of a card's and a host's seconds (catalog/times.toml, `pace`)."""

    kernel_seconds: float
    """Of the host for each kernel of the passes, with the Python and the autograd around it."""
    updating_kernel_seconds: float
    """The same of an optimizer's."""
    again_seconds: float
    """Of the host for each part that is about to run again, besides its kernels."""
    passed_on_seconds: float
    """Of the host for each tensor of a class of its own (DTensor) that is given to an operation."""
    product: float
    """Times the card's seconds: of products,"""
    attention: float
    """of attention,"""
    expert: float
    """of products of experts,"""
    passing: float
    """of passes over memory,"""
    updating: float
    """and of those of an optimizer."""
    low_factor: float
    """Measured / played at the 10th percentile of recorded steps."""
    high_factor: float
    """The same at the 90th."""
    rows: str
    """Which those were."""

    @staticmethod
    def usual() -> "Pace":
        """Of the catalog."""
        return Pace(**rates.tables()["pace"])


@dataclass(frozen=True, slots=True)
class Played:
    """A step's seconds."""

    step_seconds: float
    """From the begin of one to the begin of the next."""
    low_seconds: float
    high_seconds: float
    """The interval."""
    mfu: float
    """Operations of products and attention, without what runs again and without an allowance for masks / seconds /
    dense peak of the dtype that most of them have."""
    bound_by: str
    """`compute`, `memory`, `communication` or `host`: which of them takes most of the step."""
    operations: int
    """How many were seen."""
    rows: str
    """What the rates rest on."""
    assumed: tuple[str, ...]
    """What could not be known, in sentences."""


def priced(worked: Worked, cluster: Cluster, software: Software, pace: Pace | None = None) -> Played:
    """The step of one rank.  Raises CannotEstimate where a rate or a link is not known, or ranks wait for others."""
    device, pace = cluster.device, pace or Pace.usual()
    reached, records = rates.card(device), worked.records()
    fabric = data_fabric(cluster, reached, software) if cluster.gpus > 1 else None
    each = [_seconds(one, device, reached, pace) for one in worked.operations]
    lasting = {place: _alone(record, device, reached) for place, record in enumerate(records)}
    card, updating, flops = Seconds(), 0.0, Counter[str]()
    for number, first, last in worked.places():
        operation, taken = worked.operations[number], each[number]
        _spread(taken.total, records, lasting, first, last)
        if operation.phase == "optimizer":
            updating += taken.total
            continue
        card += taken
        if operation.family != "pass" and operation.phase != "recompute":
            flops[_DTYPES.get(operation.dtype, "bf16")] += operation.flops
    exchanged, slowing = _exchanges(records, fabric, cluster)
    copied = {place: _copy_seconds(records[place], device, reached) for place in _crossing(records)}
    asking = _asking(worked, records, pace)
    step = _step(records, lasting | exchanged | copied, asking)
    without = {
        "communication": _step(records, lasting | dict.fromkeys((*exchanged, *copied), 0.0), asking),
        "host": _step(records, lasting | exchanged | copied, {}),
    }
    moving = sum(exchanged.values()) + sum(copied.values())
    if moving:  # what is computed beside an exchange is slowed down
        step += slowing * max(0.0, 1 - (step - without["communication"]) / moving)
    bounds = {
        "compute": card.computing,
        "memory": card.passing + updating,
        **{name: step - less for name, less in without.items()},
    }
    dtype = max(flops, key=lambda name: flops[name], default="bf16")
    low, high, assumed = _interval(cluster, reached, software, pace, bounds["host"] / step)
    return Played(
        step_seconds=step,
        low_seconds=low * step,
        high_seconds=high * step,
        mfu=sum(flops.values()) / step / rates.peak_flops(device, dtype),
        bound_by=max(bounds, key=lambda name: bounds[name]),
        operations=len(worked.numbers) // 3,
        rows=pace.rows,
        assumed=(*assumed, *_unseen(worked, records, cluster)),
    )


def _interval(
    cluster: Cluster, reached: Card, software: Software, pace: Pace, waiting: float
) -> tuple[float, float, tuple[str, ...]]:
    """Factors of the interval's ends, and what is assumed; `waiting`: part of the step in which the card does."""
    low, high = pace.low_factor, pace.high_factor
    assumed: list[str] = []
    if waiting > WAITING:
        low, high = min(low, HOSTS[0]), max(high, HOSTS[1])
        assumed.append(host_assumption(waiting))
    low, high, said = widen_elsewhere(low, high, cluster, reached, software)
    return low, high, (*assumed, *said)


_UNSEEN: Final = 0.02
"""Part of a step's launches from which on it is said that they were not seen: copies of batches are fewer."""


def _unseen(worked: Worked, records: Sequence[Record], cluster: Cluster) -> tuple[str, ...]:
    """What is said of launches that no operation of torch's made, and of who is in a machine with whom."""
    inside = {place for _, first, last in worked.places() for place in range(first, last)}
    launched = [place for place, record in enumerate(records) if record.kind in LAUNCHED]
    outside = [place for place in launched if place not in inside]
    said = []
    if len(outside) > _UNSEEN * len(launched):
        said.append(
            f"time: {len(outside):,} of {len(launched):,} kernels and copies were launched past torch's operations "
            "(Triton's, a library's); each counts as the shortest kernel, or by the bytes that it copies"
        )
    if cluster.nodes > 1:
        said.append("time: ranks that exchange are taken to fill a machine before the next")
    return tuple(said)


def _asking(worked: Worked, records: Sequence[Record], pace: Pace) -> dict[int, float]:
    """Of the host, before each launch: Python, autograd, and what FSDP2 and DTensor do for each tensor."""
    found: dict[int, float] = {}
    launches = Counter[str]()
    before = ""
    for place, record in enumerate(records):
        if record.kind in LAUNCHED or record.kind == _COLLECTIVE:
            phase = worked.phases.get(record.mark, "")
            found[place] = pace.updating_kernel_seconds if phase == "optimizer" else pace.kernel_seconds
            found[place] += pace.again_seconds if phase == "recompute" != before else 0.0
            launches[phase] += 1
            before = phase
    each = {
        phase: count * pace.passed_on_seconds / max(launches[phase], 1) for phase, count in worked.passed_on.items()
    }
    for place in found:
        found[place] += each.get(worked.phases.get(records[place].mark, ""), 0.0)
    for number, first, last in worked.places():
        operation = worked.operations[number]
        if operation.name == _GATHERED:
            launched = next(place for place in range(first, last) if place in found)
            found[launched] += operation.tensors * GATHERED_TENSOR_SECONDS
    return found


def _spread(seconds: float, records: Sequence[Record], lasting: dict[int, float], first: int, last: int) -> None:
    """An operation's seconds are its first launch's; what else it launched is in them."""
    launched = [place for place in range(first, last) if records[place].kind in LAUNCHED]
    for place in launched:
        lasting[place] = 0.0
    lasting[launched[0]] = seconds


def _crossing(records: Sequence[Record]) -> list[int]:
    """Copies between host and card."""
    return [place for place, record in enumerate(records) if record.kind in (_TO_CARD, _FROM_CARD)]


def _copy_seconds(record: Record, device: Device, reached: Card) -> float:
    link = device.pcie_bytes_per_second or rates.bandwidth(device)
    return reached.pass_seconds + record.bytes / link


def _exchanges(records: Sequence[Record], fabric: Fabric | None, cluster: Cluster) -> tuple[dict[int, float], float]:
    """Seconds of each collective; and by how much they all slow down what is computed beside them."""
    found: dict[int, float] = {}
    slowing = 0.0
    for place, record in enumerate(records):
        if record.kind == _COLLECTIVE and fabric is not None:
            if record.name in _SENT:
                raise CannotEstimate("How long ranks wait for what others send them was not seen.")
            group, moved = _group(record, cluster.gpus_per_node), _whole_bytes(record)
            times = 2 if record.name == "AllReduce" else 1
            found[place] = times * fabric.gather(group, moved)
            slowing += times * fabric.slowing(group, moved)
    return found, slowing


def _seconds(operation: Operation, device: Device, reached: Card, pace: Pace) -> Seconds:
    """Of the card, for one operation."""
    backend, plain = _plain(operation)
    tokens = max(operation.tokens, 1)
    found = rates.seconds((plain,), device, reached, backend=backend, seq_len=tokens)
    if operation.phase == "optimizer":
        return found.scaled(pace.product, pace.attention, pace.updating, pace.expert)
    return found.scaled(pace.product, pace.attention, pace.passing, pace.expert)


def _plain(operation: Operation) -> tuple[str, operations.Operation]:
    """As the model of steps knows operations, and the attention that it is."""
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
        behind = "backward" in name
        flops = operation.flops / 2 if operation.causal else float(operation.flops)
        if name.endswith(" masked") and backend in MASKED:
            flops *= MASKED[backend][behind] / 2
        called = "attention backward" if behind else "attention"
        return backend, operations.Operation(called, "attention", dtype, flops, operation.bytes, operation.kernels)
    moved = 0.0 if name in _READS_LITTLE else float(operation.bytes)
    return "", operations.Operation(name, "pointwise", dtype, 0, moved, operation.kernels)


def _alone(record: Record, device: Device, reached: Card) -> float:
    """Of what no operation asked for: copies on the card, fills, kernels of which only their number is known."""
    if record.kind in (_ON_CARD, _FILL):
        moved = record.bytes * (2 if record.kind == _ON_CARD else 1)
        return reached.pass_seconds + moved / (rates.bandwidth(device) * reached.memory)
    return reached.pass_seconds


def _group(record: Record, per_node: int) -> Group:
    """Its ranks, those of a machine first."""
    return Group(record.grid[0], max(1, min(record.grid[0], per_node)))


def _whole_bytes(record: Record) -> int:
    """Of a collective's tensor; a record has what this rank gives of it, of a reduce-scatter what it gets."""
    return record.bytes * (record.grid[0] if record.name in ("AllGather", "ReduceScatter") else 1)


def _step(records: Sequence[Record], lasting: Mapping[int, float], asking: Mapping[int, float]) -> float:
    """Seconds of a step behind one like it."""
    clocks = _Clocks()
    clocks.play(records, lasting, asking)
    begin = clocks.latest()
    clocks.play(records, lasting, asking)
    return clocks.latest() - begin


class _Clocks:
    """When the host, and each stream, is done with what it was asked for so far."""

    def __init__(self) -> None:
        self.host = 0.0
        self.streams: dict[int, float] = {}
        self.events: dict[int, float] = {}

    def latest(self) -> float:
        """When all are."""
        return max(self.host, *self.streams.values()) if self.streams else self.host

    def play(self, records: Iterable[Record], lasting: Mapping[int, float], asking: Mapping[int, float]) -> None:
        """Ask for all of it."""
        for place, record in enumerate(records):
            if record.kind in LAUNCHED or record.kind == _COLLECTIVE:
                self.host += asking.get(place, 0.0)
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
