"""Traits of model types that a configuration does not state, such as positions that are learned.

`types_with("learned_positions")` returns `{"gpt2": 0, "roberta": 2, ...}`; `families.toml` has the reason of each.
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from tonnage.model import ModelRef


def types_with(trait: str) -> Mapping[str, Any]:
    """Return the model types with a trait and what is known of each.  Raises KeyError for an unknown trait."""
    return _traits()[trait]


@cache
def _traits() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads((files("tonnage") / "catalog" / "families.toml").read_text(encoding="utf-8"))


def learned_positions(model: ModelRef) -> int | None:
    """Return the tokens that a table of learned positions has room for; None without one or where it is not known."""
    padding_rows: int | None = types_with("learned_positions").get(str(model.config.get("model_type")))
    if padding_rows is None or model.positions is None or model.positions <= padding_rows:
        return None
    return model.positions - padding_rows
