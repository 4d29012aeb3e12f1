"""Settings that trainers have and tonnage does not run: they exist, and messages name them."""

from collections.abc import Iterator
from typing import Any

import pytest

from networks import tiny_job
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.job import Job
from tonnage.options import is_accepted, options
from tonnage.plans import Plan
from tonnage.trainers import ENGINES, engine_of, packages, targets
from tonnage.trainers.not_run import NOT_RUN, Setting, find_not_run

TRAINERS: dict[str, Any] = {target.name: target for target in targets.TARGETS}
TRAINERS |= {engine.name: engine for engine in ENGINES if engine.name not in TRAINERS}

SETTINGS = [(name, option, setting) for name, known in NOT_RUN.items() for option, setting in known.items()]


def installed(package: str, file: str, owner: str) -> bool:
    return bool(packages.fields(package, file, owner))


def test_the_installed_versions_have_the_settings() -> None:
    fields = [item for *_, item in SETTINGS if isinstance(item, Setting)]
    read = [item for item in fields if installed(item.package, item.file, item.owner)]
    assert [str(item) for item in read if item.is_absent()] == []
    assert {item.package for item in read} >= {"transformers", "accelerate", "deepspeed"}


@pytest.mark.parametrize(("name", "option", "setting"), SETTINGS, ids=lambda value: str(value))
def test_it_is_an_option_that_the_trainer_does_not_express(name: str, option: str, setting: Any) -> None:
    option, _, value = option.partition("=")
    [(item, known)] = [each for kind in (Job, Plan) for each in options(kind) if each[0].name == option]
    possible = [word for word in known.possible if word.partition("=")[0] == value] if value else known.possible
    tried: Iterator[Any] = (f"{value}=0.5" if "=FRACTION" in word else word for word in possible or ("2",))
    assert any(not TRAINERS[name].has_setting(option, word, item.default) for word in tried)


def test_a_setting_of_another_version_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_not_run("hf-trainer", "shard", "zero1") == "TrainingArguments.deepspeed"
    assert find_not_run("deepspeed", "optimizer_offload", "cpu=0.5") == "DeepSpeedZeroOffloadOptimizerConfig.ratio"
    assert find_not_run("hf-trainer", "shard", "zero2") is None
    monkeypatch.setattr(packages, "fields", lambda *where: frozenset(("bf16",)))
    assert find_not_run("hf-trainer", "shard", "zero1") is None


@pytest.mark.parametrize(
    ("engine", "plan", "said"),
    [
        ("hf-trainer", {"optimizer_offload": "cpu"}, "tonnage does not run that (TrainingArguments.deepspeed)"),
        ("accelerate", {"tp": 2}, "tonnage does not run that (ParallelismConfig.tp_size)"),
        ("hf-trainer", {"pp": 2}, "the engine hf-trainer has no setting for it"),
    ],
)
def test_an_engine_does_not_say_that_a_trainer_lacks_what_it_has(
    engine: str, plan: dict[str, Any], said: str
) -> None:
    asked = Plan(engine=engine, shard="zero3", **plan)
    case = Case(tiny_job(), asked, parse_cluster("8xa100-80gb"))
    assert said in " ".join(map(str, engine_of(asked).refusals(case)))


def test_every_optimizer_written_is_one_of_the_installed_trainers() -> None:
    from transformers.training_args import OptimizerNames

    from tonnage.trainers.hf_trainer.run import OPTIMIZERS

    names = {member.value for member in OptimizerNames}
    assert {words["optim"] for words in OPTIMIZERS.values() if "optim" in words} <= names
    assert not is_accepted("galore_adamw", tuple(OPTIMIZERS))
