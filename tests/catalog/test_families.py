"""Traits of model types: every type exists, and every trait is one that the code reads."""

import re
import tomllib
from pathlib import Path

import pytest

import tonnage
from tonnage.catalog.families import learned_positions, types_with
from tonnage.model import ModelRef

FOLDER = Path(tonnage.__file__).parent
TABLES = tomllib.loads((FOLDER / "catalog" / "families.toml").read_text(encoding="utf-8"))
PREFIXES = ("layer_period", "multiplied_logits")
"""Traits whose names are beginnings of model types."""


@pytest.mark.parametrize("trait", TABLES)
def test_transformers_knows_every_type(trait: str) -> None:
    from transformers import CONFIG_MAPPING

    known = {name.replace("-", "_") for name in CONFIG_MAPPING}
    for name in types_with(trait):
        plain = name.replace("-", "_")
        assert plain in known or (trait in PREFIXES and any(each.startswith(plain) for each in known)), name


def test_every_trait_is_read_and_every_read_trait_exists() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in FOLDER.rglob("*.py"))
    assert set(re.findall(r'(?<!`)types_with\("(\w+)"\)', sources)) == set(TABLES)


def test_an_unknown_trait_is_an_error() -> None:
    with pytest.raises(KeyError, match="no_such_trait"):
        types_with("no_such_trait")


@pytest.mark.parametrize(
    ("kind", "positions", "expected"),
    [("gpt2", 1024, 1024), ("roberta", 514, 512), ("roberta", 2, None), ("gpt2", None, None), ("llama", 2048, None)],
)
def test_learned_positions_leave_out_the_padding(kind: str, positions: int | None, expected: int | None) -> None:
    config = {"model_type": kind, "max_position_embeddings": positions}
    assert learned_positions(ModelRef(name="a", kind="config", config=config)) == expected
