"""Lifetime of the network's outputs in the training loop, logits among them.

`freed`: not while backward runs, as in Hugging Face's Trainer and torchtitan.  `step`: until the optimizer has
stepped, as if a function takes one step.  `loop`: until the next forward has returned, as in the plain loop

    for batch in loader:
        outputs = model(**batch)
        outputs.loss.backward()
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tonnage.techniques.technique import Refusal, Technique

if TYPE_CHECKING:
    from tonnage.case import Case
    from tonnage.step.step import Step


def accepts(case: Case) -> Refusal | None:
    """Refuse pipelines, whose schedule holds the outputs instead of the loop."""
    if case.plan.pp > 1:
        return Refusal(
            technique=f"outputs={case.plan.outputs}",
            reason="the pipeline's schedule decides what is kept of each micro-batch",
            instead="leave outputs out, or choose pp 1",
        )
    return None


def apply(step: Step) -> Step:
    """Keep what the forward returned."""
    return replace(step, keeps_outputs=step.plan.outputs)


OUTPUTS: Final = Technique(option="outputs", values=("step", "loop"), accepts=accepts, apply=apply)
