"""Lets the card of one rank run out of memory at one moment: SHORTAGE is a JSON object with `rank` and `moment`.

The request is one that no card can meet, so the error is the real allocator's own.
"""

import json
import os
from typing import Any

from tonnage_recorder.imports import after_import

SHORTAGE = json.loads(os.environ.get("SHORTAGE", "{}"))


def run_out() -> None:
    import torch

    torch.empty(1 << 45, dtype=torch.uint8, device="cuda")


def before(owner: Any, name: str) -> None:
    original = getattr(owner, name)

    def short(*arguments: Any, **options: Any) -> Any:
        run_out()
        return original(*arguments, **options)

    setattr(owner, name, short)


def in_backward(module: Any) -> None:
    """Run out in the middle of the third backward, behind the layers that are nearest to the loss."""
    made = module.assemble

    def assemble(*arguments: Any, **options: Any) -> Any:
        ready = made(*arguments, **options)
        seen = []

        def enter(grad: Any) -> None:
            seen.append(grad)
            if len(seen) == 3:
                run_out()

        def called(_module: Any, _inputs: Any, output: Any) -> None:
            (output[0] if isinstance(output, tuple) else output).register_hook(enter)

        layers = [layer for name, layer in ready.model.named_modules() if name.endswith("layers.0")]
        layers[0].register_forward_hook(called)
        return ready

    module.assemble = assemble


if SHORTAGE and os.environ.get("RANK", "0") == str(SHORTAGE["rank"]):
    moment = SHORTAGE["moment"]
    if moment == "backward":
        after_import("tonnage.step.step", in_backward)
    elif moment == "evaluation":
        after_import("tonnage.step.events", lambda module: before(module, "evaluate"))
    else:
        after_import("tonnage.train.states", lambda module: before(module, "weights"))
