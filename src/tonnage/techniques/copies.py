"""Copies between GPU and host on a separate stream; without streams they run at once."""

from typing import Any

import torch


class Copies:
    """The copy stream of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, to: torch.Tensor, source: torch.Tensor) -> Any:
        """Start a copy after what is queued; return the event of its end, None if it is done already."""
        if self.stream is None:
            to.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            to.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def wait(self, done: Any) -> None:
        """Make everything that is queued from now on wait for the copy with this event."""
        if done is not None:
            torch.cuda.current_stream(self.device).wait_event(done)
