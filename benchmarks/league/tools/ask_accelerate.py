"""What `accelerate estimate-memory` computes: four times the weights for training with Adam."""

from typing import Any

from accelerate.utils import calculate_maximum_sizes
from answering import answer, meta_model, weights


def ask(row: dict[str, Any]) -> tuple[float, str]:
    total, _largest = calculate_maximum_sizes(meta_model(row["model"], weights(row)))
    return 4 * total, "4 x weights; no activations"


answer(ask)
