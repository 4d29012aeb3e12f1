"""`tonnage models`: the model configurations of the catalog."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from tonnage.cli.options import Json

if TYPE_CHECKING:
    from tonnage.catalog.models import Model


def models(
    search: Annotated[str | None, typer.Argument(help="Only names that contain this.")] = None,
    json: Json = False,
    config: Annotated[
        bool, typer.Option("--config", help="Print the config.json of the model with exactly this name.")
    ] = False,
) -> int:
    """List the models that `estimate` knows by name, each with the Hub repository of its configuration.

    Example: tonnage models llama
    """
    from dataclasses import asdict

    from tonnage.catalog.models import find_model, model_names
    from tonnage.cli.answer import emit, print_json

    if config:
        print_json(_find_exact(search).published_config())
        return 0
    known = [model for model in map(find_model, model_names()) if model is not None]
    chosen = [model for model in known if search is None or _contains(model, search)]
    if json:
        print_json([asdict(model) for model in chosen])
    elif chosen:
        emit(_table(chosen))
    else:
        return _report_no_match(search or "", len(known))
    return 0 if chosen else 1


def _find_exact(name: str | None) -> "Model":
    """Return the model of this name.  Raises UsageError."""
    from tonnage.catalog.models import find_model
    from tonnage.errors import UsageError

    model = find_model(name) if name else None
    if model is None:
        raise UsageError(f"--config needs the exact name of a model, not {name or ''!r}; see: tonnage models.")
    return model


def _contains(model: "Model", search: str) -> bool:
    return any(search.lower() in name.lower() for name in (model.id, model.hub, *model.aliases))


def _table(chosen: "list[Model]") -> str:
    from tonnage.cli.table import table
    from tonnage.units import count

    rows = [(model.id, count(model.parameters), model.hub, model.note) for model in chosen]
    return table(("MODEL", "parameters", "Hub repository", "note"), rows, numbers=(1,))


def _report_no_match(search: str, known: int) -> int:
    print(
        f"None of the names of {known} models contains {search!r}; a Hub id or a config.json also works.",
        file=sys.stderr,
    )
    return 1
