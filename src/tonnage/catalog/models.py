"""The model configurations of the catalog, by name."""

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Final

from tonnage.catalog.spelling import normalise, squeeze


@dataclass(frozen=True, kw_only=True)
class Model:
    """A published network: the origin of its configuration, and the number of weights that it must have."""

    id: str
    """The catalog's name, e.g. `llama-3.1-8b`."""
    hub: str
    """Hub repository whose config.json it is."""
    aliases: tuple[str, ...] = ()
    """Other exact names, among them Hub repositories with the same network."""
    parameters: int
    """Number of weights of the class that is trained; tied weights count once."""
    parameters_source: str
    """Publication of that number."""
    config_url: str
    """URL of the published configuration."""
    note: str = ""
    """Parts that the network has or lacks."""
    quantization: Mapping[str, Any] = field(default_factory=dict)
    """The published `quantization_config`, which inference engines load by and training does not apply."""
    date: str
    """Date on which it was looked up, YYYY-MM-DD."""

    def config(self) -> dict[str, Any]:
        """Return a new copy of the configuration, as in config.json, of unquantized weights."""
        text = (files("tonnage") / "catalog" / "configs" / f"{self.id}.json").read_text(encoding="utf-8")
        config: dict[str, Any] = json.loads(text)
        return config

    def published_config(self) -> dict[str, Any]:
        """Return the configuration with the format of the published weights."""
        quantization = {"quantization_config": dict(self.quantization)} if self.quantization else {}
        return {**self.config(), "torch_dtype": published_dtype(self), **quantization}


def model_names() -> list[str]:
    """Return the ids of all models in the catalog, in its order (by family)."""
    return list(_models())


def find_model(name: str) -> Model | None:
    """Return the model with this id, alias or Hub repository, compared exactly after lower-casing, or None.

    A name without a Hub organisation may also differ in its dashes and dots: `llama3-8b` is `llama-3-8b`.
    """
    exact = _models_by_name().get(normalise(name))
    return exact if exact is not None or "/" in name else _models_by_letters().get(squeeze(name))


def known_model_names() -> Iterable[str]:
    """Return all names that `find_model` knows, in lower case."""
    return _models_by_name().keys()


@cache
def _models() -> Mapping[str, Model]:
    """Return the models of the catalog by id."""
    tables = tomllib.loads((files("tonnage") / "catalog" / "models.toml").read_text(encoding="utf-8"))
    return {
        name: Model(id=name, **{**entry, "aliases": tuple(entry.get("aliases", ()))})
        for name, entry in tables.items()
    }


@cache
def _models_by_name() -> Mapping[str, Model]:
    """Return the models by normalised id, alias and Hub repository; the first model of a repository counts."""
    by_name: dict[str, Model] = {}
    for model in _models().values():
        for name in (model.id, *model.aliases, model.hub):
            by_name.setdefault(normalise(name), model)
    return by_name


@cache
def _models_by_letters() -> Mapping[str, Model]:
    """Return the models by the letters and digits of their names, without those that several models share."""
    named: dict[str, set[str]] = {}
    for model in _models().values():
        for name in (model.id, *model.aliases, model.hub):
            named.setdefault(squeeze(name.rpartition("/")[2]), set()).add(model.id)
    return {letters: _models()[ids.pop()] for letters, ids in named.items() if len(ids) == 1}


_PUBLISHED_DTYPES: Mapping[str, str] = {
    **dict.fromkeys(("llama-2-", "pythia-", "opt-", "phi-2", "llava-1.5-", "whisper-large"), "float16"),
    **dict.fromkeys(("gpt2", "bert-", "t5-", "vit-", "gemma-2-", "olmo-2-", "whisper-small"), "float32"),
}
"""The `torch_dtype` of the Hub's config.json by the beginning of a model's id; all others have bfloat16.

Older files have none and weights in float32."""


def published_dtype(model: Model) -> str:
    """Return the dtype in which the weights of a model are published, by torch's name."""
    return next((dtype for name, dtype in _PUBLISHED_DTYPES.items() if model.id.startswith(name)), "bfloat16")


_ONCE_UNOWNED: Final = ("openai-community", "google-bert", "google-t5")
"""Owners of the Hub's oldest repositories, which their names without an owner still lead to (`gpt2`)."""


def hub_repositories() -> dict[str, dict[str, Any]]:
    """Return for each Hub repository, in lower case, the file of its configuration and the format of its weights."""
    folder = files("tonnage") / "catalog" / "configs"
    repositories = {
        name: {
            "config": str(folder / f"{model.id}.json"),
            "dtype": published_dtype(model),
            "quantization": dict(model.quantization),
        }
        for name, model in _models_by_name().items()
        if "/" in name
    }
    old = {name.partition("/")[2]: known for name, known in repositories.items() if name.startswith(_ONCE_UNOWNED)}
    return {**repositories, **old}
