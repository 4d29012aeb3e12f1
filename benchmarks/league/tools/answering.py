"""How a tool's script says its answer."""

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

GIB = 2**30


def answer(ask: Callable[[dict[str, Any]], tuple[float, str]]) -> None:
    """Call `ask` with the row on the command line; it returns bytes and what they mean."""
    row = json.loads(sys.argv[1])
    began = time.perf_counter()
    found, means = ask(row)
    seconds = time.perf_counter() - began
    used = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    own_bytes = max(used) * 1024
    print(json.dumps({"gib": found / GIB, "seconds": seconds, "own_gib": own_bytes / GIB, "means": means}))


def weights(row: dict[str, Any]) -> str:
    """Torch's name of the dtype of what is trained, or frozen below adapters."""
    if row["precision"] == "bf16-mixed" and row["method"] == "full":
        return "float32"
    return "float16" if row["precision"] == "fp16" else "bfloat16"


def meta_model(name: str, dtype: str = "bfloat16", attention: str = "sdpa") -> Any:
    """The network without memory."""
    import torch

    from tonnage.catalog.configurations import resolve
    from tonnage.step import model as models

    ref = resolve(name, offline=True)
    return models.build(ref, dtype=getattr(torch, dtype), attention=attention, device=torch.device("meta"))
