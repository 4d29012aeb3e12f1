"""The hardware that a step runs on: a GPU as the driver describes it, and how many of them in how many machines."""

from dataclasses import dataclass, field, replace
from typing import Final

from tonnage.errors import UsageError
from tonnage.units import MIB, format_gib

CUDNN_FIRST: Final = ((9, 0), (10, 0), (10, 3))
"""Compute capabilities on which torch prefers cuDNN's attention to its own (since torch 2.10)."""

GPUS_PER_NODE: Final = 8
"""GPUs of one machine when only a total is given: the largest common server."""

CPU: Final = "cpu"
"""The value of `--gpu` that stands for this machine's processor instead of a card."""

AMPERE: Final = (8, 0)
"""The first compute capability that multiplies in bf16 and runs FlashAttention."""

HERE: Final = "here"
"""The value of `--gpu` that stands for this machine's GPUs (`tonnage.catalog.local_gpus`)."""

GENERIC: Final = "gpu-"
"""Prefix of the id of a card of which only the memory is known."""


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Dense operations per second by dtype; None where the card has no such path or no figure is published."""

    fp32: float | None = None
    """fp32 outside tensor cores."""
    tf32: float | None = None
    """fp32 matrices on tensor cores with tf32 precision."""
    fp16: float | None = None
    """fp16 matrices, fp32 accumulation."""
    bf16: float | None = None
    """bf16 matrices, fp32 accumulation."""
    fp8: float | None = None
    """fp8 matrices."""
    int8: float | None = None
    """int8 matrices."""
    fp4: float | None = None
    """fp4 matrices."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Device:
    """One GPU: what the driver reports of it, and how fast its maker says it is."""

    id: str
    """The catalog's name, e.g. `h100-80gb`."""
    aliases: tuple[str, ...] = ()
    """Other exact names, lower case with dashes."""
    name: str
    """Marketing name as the driver reports it, e.g. `NVIDIA H100 80GB HBM3`."""
    capability: tuple[int, int]
    """Compute capability, e.g. (9, 0)."""
    capacity_bytes: int
    """Memory that a process can see (torch's total_memory); less than the memory on the board."""
    nvml_total_bytes: int | None = None
    """Total memory as nvidia-smi shows it, including the driver's own part; None: the next whole GiB."""
    context_low_bytes: int
    """Lowest observed or derived memory of the CUDA context and lazily loaded modules."""
    context_bytes: int
    """Typical memory of the CUDA context and lazily loaded modules."""
    context_high_bytes: int
    """Highest observed or derived memory of the CUDA context and lazily loaded modules."""
    context_source: str
    """Origin of the three figures above."""
    sms: int
    """Streaming multiprocessors."""
    threads_per_sm: int
    """Maximum of resident threads of one multiprocessor."""
    shared_per_sm_bytes: int
    """Shared memory of one multiprocessor."""
    shared_per_block_bytes: int
    """Maximum of shared memory of one block, when it opts in."""
    registers_per_sm: int
    """32-bit registers of one multiprocessor."""
    l2_bytes: int | None = None
    """Size of the L2 cache."""
    bus_bits: int | None = None
    """Width of the memory bus."""
    memory_khz: int | None = None
    """Memory clock as the driver reports it."""
    clock_khz: int | None = None
    """Highest multiprocessor clock as the driver reports it."""
    bandwidth_bytes_per_second: float | None = None
    """Peak memory bandwidth according to the datasheet."""
    peak_flops: Peaks = field(default_factory=Peaks)
    """Peak operations per second by dtype."""
    watts: float | None = None
    """Board power; None: not known, or not the limit of the card's tensor cores."""
    pcie_generation: int | None = None
    """PCI Express generation of the 16-lane connection."""
    pcie_bytes_per_second: float | None = None
    """PCI Express bandwidth in one direction."""
    nvlink_bytes_per_second: float | None = None
    """NVLink bandwidth in one direction, summed over all links of the GPU; None: no NVLink."""
    nvlink_bridged: bool = False
    """True if NVLink is a bridge to one other card, which is sold separately."""
    host_link_bytes_per_second: float | None = None
    """Bandwidth in one direction to a host that is not connected by PCI Express (NVLink-C2C)."""
    network_bytes_per_second: float | None = None
    """One GPU's share of the bandwidth between machines, in one direction, in the machines that usually have it."""
    host_bytes: int | None = None
    """One GPU's share of the host memory in the machines that usually have the card; None: not known."""
    host_source: str = ""
    """Origin of `host_bytes`: how many machines, and which."""
    source: tuple[str, ...] = ()
    """Sources of the figures."""
    date: str = ""
    """Date on which they were looked up, YYYY-MM-DD."""

    def __hash__(self) -> int:
        """Return the hash of the id alone: cards are keys of caches that are read thousands of times."""
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<Device: {self.id}, {format_gib(self.capacity_bytes)}>"

    @property
    def without_bf16(self) -> str:
        """Return a sentence that says that the card cannot compute in bf16; empty for a card that can.

        Without it torch converts to fp32 and back, which is far slower than fp16.
        """
        if self.id == CPU or self.capability >= AMPERE:
            return ""
        (major, minor), (first, second) = self.capability, AMPERE
        return (
            f"{self.id} does not compute in bf16: its compute capability is {major}.{minor}, and bf16 needs "
            f"{first}.{second} or higher"
        )

    @property
    def assumed(self) -> tuple[str, ...]:
        """Return the assumptions about a card that is not in the catalog; empty for one that is."""
        if not self.id.startswith(GENERIC):
            return ()
        major, minor = self.capability
        return (
            f"the card is not in the catalog: assumed are capability {major}.{minor}, the {self.sms} multiprocessors "
            "of an A100 (the size of some temporaries depends on them) and its CUDA context",
        )

    def with_capacity(self, capacity_bytes: int) -> "Device":
        """Return the same card with another amount of visible memory."""
        origin = (
            f"capacity {format_gib(capacity_bytes)}: given by the user instead of {format_gib(self.capacity_bytes)}"
        )
        return replace(self, capacity_bytes=capacity_bytes, nvml_total_bytes=None, source=(origin, *self.source))

    def ghost_settings(self) -> dict[str, str]:
        """Return the environment variables that make a ghost report this card; unknown figures are left out."""
        values = {
            "TOTAL_BYTES": self.capacity_bytes,
            "RESERVED_BYTES": self.nvml_total_bytes and self.nvml_total_bytes - self.capacity_bytes,
            "CONTEXT_BYTES": self.context_bytes,
            "NAME": self.name,
            "CAPABILITY": f"{self.capability[0]}.{self.capability[1]}",
            "SMS": self.sms,
            "THREADS_PER_SM": self.threads_per_sm,
            "L2_BYTES": self.l2_bytes,
            "SHARED_PER_BLOCK_BYTES": self.shared_per_block_bytes,
            "SHARED_PER_SM_BYTES": self.shared_per_sm_bytes,
            "REGISTERS_PER_SM": self.registers_per_sm,
            "BUS_BITS": self.bus_bits,
            "MEMORY_KHZ": self.memory_khz,
            "CLOCK_KHZ": self.clock_khz,
        }
        return {f"GHOST_{key}": str(value) for key, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Identical machines with identical GPUs."""

    device: Device
    """GPU model."""
    gpus_per_node: int = 1
    """GPUs of one machine."""
    nodes: int = 1
    """Number of machines."""
    network_bytes_per_second: float | None = None
    """One GPU's share of the bandwidth between machines, in one direction; None: the device's usual share."""
    host_memory_bytes: int | None = None
    """Host memory of one machine; None: not stated, see `host_limit_bytes`."""

    def __post_init__(self) -> None:
        for name in ("gpus_per_node", "nodes"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.host_memory_bytes is not None and self.host_memory_bytes < MIB:
            size = f"The host's memory is {self.host_memory_bytes} bytes, less than 1 MiB"
            raise UsageError(f"{size}; give its unit too, such as 256GiB.")

    @property
    def host_limit_bytes(self) -> int | None:
        """Return the host memory of one machine: as stated, or as machines with so many of the card usually have.

        None if neither is known.
        """
        if self.host_memory_bytes is not None:
            return self.host_memory_bytes
        return None if self.device.host_bytes is None else self.device.host_bytes * self.gpus_per_node

    @property
    def gpus(self) -> int:
        """Return the total number of GPUs, which is the number of ranks."""
        return self.nodes * self.gpus_per_node

    def __str__(self) -> str:
        counts = [self.nodes] if self.nodes > 1 else []
        counts += [self.gpus_per_node] if self.gpus > 1 else []
        return "x".join([*map(str, counts), self.device.id])
