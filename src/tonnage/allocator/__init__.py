"""A replica of PyTorch's caching allocator, in plain Python: the same addresses, segments and statistics."""

from tonnage.allocator.caching import CachingAllocator, OutOfMemory, Shortage
from tonnage.allocator.driver import Driver
from tonnage.allocator.replay import Replay, replay
from tonnage.allocator.segments import Segment, SegmentBlock
from tonnage.allocator.settings import AllocatorSettings

__all__ = [
    "AllocatorSettings",
    "CachingAllocator",
    "Driver",
    "OutOfMemory",
    "Replay",
    "Segment",
    "SegmentBlock",
    "Shortage",
    "replay",
]
