"""Adam's foreach step as torch had it up to 2.1: roots and denominators are two temporaries of all parameters' size.

`denom = torch._foreach_add(exp_avg_sq_sqrt, eps)` in torch/optim/adam.py of v2.1.0; later ones add in place.
"""

from __future__ import annotations

from typing import Any

import torch


def install() -> None:
    """From here on, in this process."""
    update = torch._foreach_addcdiv_

    def with_copies(parameters: Any, averages: Any, denominators: Any, *rest: Any) -> None:
        update(parameters, averages, torch._foreach_add(denominators, 0.0), *rest)

    torch._foreach_addcdiv_ = with_copies
