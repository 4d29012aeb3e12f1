"""Exchanges between ranks, as NCCL would perform them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch

from tonnage.meta.host_memory import DoesNotFit
from tonnage.step import fake_ranks
from tonnage.step.constants import tensors_in
from tonnage.trace.communicators import Communicators, Layout
from tonnage.trace.trace import Activity

if TYPE_CHECKING:
    from tonnage.meta.recorder import Recorder


_COLLECTIVES: Final = {
    **dict.fromkeys(("allreduce_", "all_reduce", "all_reduce_"), "AllReduce"),
    **dict.fromkeys(("allgather_", "_allgather_base_", "all_gather_into_tensor"), "AllGather"),
    **dict.fromkeys(("_reduce_scatter_base_", "reduce_scatter_tensor"), "ReduceScatter"),
    "broadcast_": "Broadcast",
    "send": "Send",
    "recv_": "Recv",
    **dict.fromkeys(("shard_dim_alltoall", "all_to_all_single"), "AllToAll"),
}
"""NCCL's name for each operation by which ranks exchange data."""


_PAIRS: Final = ("Send", "Recv")


_PAIRED: Final = torch.__version__ < (2, 15)
"""True if NCCL makes a communicator for the two ranks of each pair; since torch 2.15 it uses that of the group."""


NAMESPACES: Final = ("c10d", "_c10d_functional", "_dtensor")
"""Namespaces of the operations by which ranks exchange data."""


class Exchanges:
    """The exchanges of a rank through memory of a Recorder's device."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.activities: list[Activity] = []
        """The exchanges so far, in order."""
        self._groups: dict[tuple[str, str], int] = {}
        self._communicators = Communicators()
        self._are_batched = False
        """True while sends and receives are batched, which is one exchange of the whole group."""

    def note(self, op: Any, args: Any, result: Any) -> None:
        """Note which memory a collective sends from and writes to.  Raises torch.OutOfMemoryError."""
        recorder = self._recorder
        name = _COLLECTIVES.get(op.overloadpacket.__name__)
        in_place = op.namespace == "c10d"  # whose first arguments are written to
        given = args if in_place else result if name == "AllReduce" else (args, result)  # reduced in place
        tensors = [tensor for tensor in tensors_in(given) if tensor.device == recorder.device]
        if name is None or not tensors:
            return
        group = fake_ranks.group_of(args)
        peer = args[2] if name in _PAIRS else 0
        size, own_rank, key = group.size(), group.rank(), (group.group_name, "")
        if name in _PAIRS and not self._are_batched and _PAIRED:
            size, key, own_rank = 2, (key[0], str(peer)), int(own_rank > peer)
        layout = (size, self._groups.setdefault(key, len(self._groups)), own_rank)
        size_bytes = min(tensor.numel() * tensor.element_size() for tensor in tensors)
        first, last = recorder.address(tensors[-1]), recorder.address(tensors[0])
        is_uneven = name == "AllToAll" and op.overloadpacket.__name__ == "all_to_all_single" and args[1]
        calls = [(kind, other) for other in range(size) for kind in _PAIRS] if is_uneven else [(name, peer)]
        for call, other in calls:  # parts of different sizes are sent and received one by one
            self.activities.append(
                Activity("collective", call, recorder.mark(), 0, layout, other, 0, size_bytes, first, last)
            )
            self._connect(layout, call, other)

    def _connect(self, layout: Layout, name: str, peer: int) -> None:
        """Take the memory that NCCL takes at this exchange.  Raises torch.OutOfMemoryError."""
        if not any(self._communicators.use(layout, name, peer)):
            return
        try:
            self._recorder.memory.connect(self._communicators)
        except DoesNotFit as error:
            raise torch.OutOfMemoryError(str(error)) from None

    @contextmanager
    def batched(self) -> Iterator[None]:
        """Treat all sends and receives inside as one exchange."""
        self._are_batched = True
        try:
            yield
        finally:
            self._are_batched = False
