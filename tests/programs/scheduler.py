"""Start a small engine with SGLang's names: `scheduler.py TOKENS [TOKENS IN WINDOWS]`."""

import logging
import sys
from pathlib import Path

import torch  # before the engine, as it does itself

sys.path.insert(0, str(Path(__file__).parent / "like"))

from sglang.srt.managers.scheduler import Scheduler

logging.basicConfig(level=logging.INFO)

with torch.inference_mode():
    scheduler = Scheduler(*map(int, sys.argv[1:]))
