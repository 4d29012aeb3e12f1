"""Copies between card and host on a stream of their own; where there are no streams, at once."""

from typing import Any

import torch


class Copies:
    """The copying stream of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, to: torch.Tensor, source: torch.Tensor) -> Any:
        """Begin a copy after what is queued; the event of its end, None where it is over already."""
        if self.stream is None:
            to.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            to.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def wait(self, done: Any) -> None:
        """What is queued from here on comes after the copy with this event."""
        if done is not None:
            torch.cuda.current_stream(self.device).wait_event(done)
