"""The table of optimizers: one row a name, one name a row, and the same facts wherever they are repeated."""

import importlib
import sys
from pathlib import Path

import pytest

from tonnage.catalog.optimizers import OPTIMIZERS, WHOLE_MOMENTS, Optimizer, find_optimizer, words
from tonnage.timing.memory import STATE_BYTES
from tonnage.trainers.hf_trainer import facts
from tonnage.trainers.hf_trainer.read import OPTIMIZERS as BY_OPTIM

SCRIPTS = Path(__file__).parents[2] / "src" / "tonnage" / "trainers" / "scripts"


def test_a_name_finds_its_row() -> None:
    assert [find_optimizer(row.name) for row in OPTIMIZERS] == list(OPTIMIZERS)
    assert len({row.name for row in OPTIMIZERS}) == len(OPTIMIZERS)


@pytest.mark.parametrize("row", OPTIMIZERS, ids=lambda row: row.name)
def test_the_class_is_in_its_library(row: Optimizer) -> None:
    module = pytest.importorskip(row.module)
    assert hasattr(module, row.class_name)


def test_a_trainer_has_words_for_some() -> None:
    assert words("megatron") == {"adamw": "adam", "sgd": "sgd"}
    assert list(words("deepspeed")) == ["adamw", "adamw-loop", "adamw-foreach"]
    assert words("hf_trainer")["adamw"] == {}, "the Trainer's default needs no argument"


def test_exported_scripts_make_the_same_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script knows nothing of tonnage, and so has a table of its own."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    loop = importlib.import_module("loop")
    for name in ("loop", "job"):
        sys.modules.pop(name)
    rows = {
        row.name: (row.module, row.class_name, dict(row.arguments)) for row in OPTIMIZERS if not row.only_matrices
    }
    assert rows == loop.OPTIMIZERS


@pytest.mark.parametrize("row", OPTIMIZERS, ids=lambda row: row.name)
def test_the_time_model_moves_the_states_of_the_table(row: Optimizer) -> None:
    """Bytes of states for each byte of an fp32 weight, without scales; managed memory is not the allocator's."""
    bits = 32 if row.state_bits is None else row.state_bits
    assert STATE_BYTES[row.name] == (0 if row.is_paged else row.moments * bits / 32)


def test_whole_moments_are_those_of_adamw_that_nothing_compresses() -> None:
    assert WHOLE_MOMENTS == ("adamw", "adamw-loop", "adamw-foreach", "adamw-fused", "paged-adamw")


def test_the_trainers_words_are_read_as_they_are_written() -> None:
    """AdamW's default is the fused one, and a script without momentum is told apart by `optim_args`."""
    for name, arguments in words("hf_trainer").items():
        if "optim" in arguments and name not in ("adamw-fused", "sgd"):
            assert BY_OPTIM[arguments["optim"]] == name
    for name, optim in words("axolotl").items():
        if name != "adamw-fused":
            assert BY_OPTIM[optim] == name
    assert facts.OPTIMIZERS["adamw_torch_fused"] == "adamw-fused"
    assert (BY_OPTIM["sgd"], facts.OPTIMIZERS["sgd"]) == ("sgd-plain", "sgd-plain")
