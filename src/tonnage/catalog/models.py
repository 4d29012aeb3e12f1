"""The model configurations of the catalog, by their names."""

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from tonnage.catalog.spelling import normalise


@dataclass(frozen=True, kw_only=True)
class Model:
    """A published network: where its configuration is, and how many weights it must have."""

    id: str
    """The catalog's name, e.g. `llama-3.1-8b`."""
    hub: str
    """The Hub repository whose config.json it is."""
    aliases: tuple[str, ...] = ()
    """Other exact names, among them Hub repositories with the same network."""
    parameters: int
    """Weights of the class that is trained, ties counted once."""
    parameters_source: str
    """Where that number was published."""
    config_url: str
    """Where the configuration was published."""
    note: str = ""
    """What the network is with or without."""
    date: str
    """When it was looked up, YYYY-MM-DD."""

    def config(self) -> dict[str, Any]:
        """A fresh copy of the configuration, as config.json has it."""
        text = (files("tonnage") / "catalog" / "configs" / f"{self.id}.json").read_text(encoding="utf-8")
        config: dict[str, Any] = json.loads(text)
        return config


def model_names() -> list[str]:
    """The ids of all models in the catalog, in its order (by family)."""
    return list(_models())


def find_model(name: str) -> Model | None:
    """The model with this id, alias or Hub repository, compared exactly after lower-casing; None if there is none."""
    return _model_names().get(normalise(name))


def known_model_names() -> Iterable[str]:
    """Every name that `find_model` knows, lower case."""
    return _model_names().keys()


@cache
def _models() -> Mapping[str, Model]:
    """The catalog's models, read once."""
    tables = tomllib.loads((files("tonnage") / "catalog" / "models.toml").read_text(encoding="utf-8"))
    return {
        name: Model(id=name, **{**entry, "aliases": tuple(entry.get("aliases", ()))})
        for name, entry in tables.items()
    }


@cache
def _model_names() -> Mapping[str, Model]:
    """Every id, alias and Hub repository, normalised; the first model that names a repository has it."""
    named: dict[str, Model] = {}
    for model in _models().values():
        for name in (model.id, *model.aliases, model.hub):
            named.setdefault(normalise(name), model)
    return named
