"""Names that engines have for options lead to those of `--task serve`, on the command line and in Python."""

import pytest
import typer

import tonnage as package
from tonnage.cli import main
from tonnage.errors import UsageError
from tonnage.serving import option_names

COMMANDS = typer.main.get_command(main.app).commands  # type: ignore[attr-defined]
PARAMETERS = [each for name in ("estimate", "plan") for each in COMMANDS[name].params]
OWN = {option.removeprefix("--") for each in PARAMETERS for option in each.opts}


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("max-model-len", "max-len"),
        ("context-length", "max-len"),
        ("max-num-seqs", "max-seqs"),
        ("max-num-batched-tokens", "max-batched-tokens"),
        ("kv-cache-dtype", "kv-dtype"),
        ("mem-fraction-static", "gpu-memory-utilization"),
        ("block-size", "block-tokens"),
        ("num-speculative-tokens", "draft-tokens"),
        ("data-parallel-size", "dp"),
        ("tensor-parallel-size", "tp"),
    ],
)
def test_options_of_engines_lead_to_those_of_serving(name, own, capsys):
    arguments = ["llama-3.1-8b", "--task", "serve", "--gpu", "h100-80gb", f"--{name}", "1"]
    assert main.run(["estimate", *arguments]) == 2
    assert f"No such option: --{name}. Here it is --{own}" in capsys.readouterr().err
    field = own.replace("-", "_")
    with pytest.raises(UsageError, match=f"here it is {field}"):
        package.estimate("llama-3.1-8b", task="serve", gpu="h100-80gb", **{name.replace("-", "_"): 1})


@pytest.mark.parametrize("row", option_names._ROWS, ids=lambda row: row[1])
def test_options_of_serving_exist_under_one_name(row):
    names, own, _ = row
    assert own in OWN
    assert not set(names.split()) & OWN


def test_an_option_of_training_names_that_of_an_engine():
    with pytest.raises(UsageError, match="--seq-len is for training; with --task serve give --max-len"):
        package.estimate("llama-3.1-8b", task="serve", gpu="h100-80gb", seq_len=4096)
