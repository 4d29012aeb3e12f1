"""How long a step lasts at least on a card, which a ghost's does not."""

import time

WATCHDOG_SECONDS = 0.15
"""A little more than the 100 ms at which ProcessGroupNCCL's watchdog looks for finished work."""


def end_step() -> None:
    """Give the watchdog the time that a card gives it: until it looks it holds DDP's buckets of the first step."""
    time.sleep(WATCHDOG_SECONDS)
