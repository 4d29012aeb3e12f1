"""Options of a script's command line, as its parser says them."""

from importlib import import_module
from typing import Any

import pytest
import typer
from typer.main import get_command

from tonnage.recorder.tonnage_recorder.script import Script


def make_by_click() -> Any:
    click = pytest.importorskip("click")
    options = (click.Option(["--batch-size", "-b"], default=8), click.Option(["--ckpt/--no-ckpt"], default=False))
    return click.Command("train", params=[*options, click.Argument(["data"])])


def make_by_typer() -> Any:
    app = typer.Typer(add_completion=False)

    @app.command()
    def train(data: str, batch_size: int = typer.Option(8, "--batch-size", "-b"), ckpt: bool = False) -> None:
        """Train."""

    return get_command(app)


@pytest.mark.parametrize("make", [make_by_click, make_by_typer])
def test_click_and_typer_say_names_kinds_and_defaults(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Typer has a copy of click, or needs it, by its version."""
    script, command = Script(), make()
    (module,) = {kind.__module__ for kind in type(command).__mro__ if kind.__name__ == "Command"}
    core = import_module(module)
    monkeypatch.setattr(core.Command, "parse_args", core.Command.parse_args)  # it is put back
    script._hear_click(core)
    command.make_context("train", ["-b", "4", "text"])
    stored = {"dest": "batch_size", "action": "store", "nargs": None, "default": 8}
    assert (
        script.facts.pop("options").items()
        >= {
            "--batch-size": stored,
            "-b": stored,
            "--ckpt": {"dest": "ckpt", "action": "storetrue", "nargs": None, "default": False},
        }.items()
    )
    assert script.facts == {}
