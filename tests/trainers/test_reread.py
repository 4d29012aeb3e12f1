"""Targets read back what was written, each with its own code, in one process beside this one."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from networks import tiny, tiny_job
from tonnage.case import Case
from tonnage.catalog.devices import parse_cluster
from tonnage.errors import CannotEstimate
from tonnage.plans import Plan
from tonnage.trainers import packages, reread, targets
from tonnage.trainers.cases import request
from tonnage.trainers.target import Export, File, Target

FULL = {"precision": "bf16-mixed", "optimizer": "adamw-fused", "clip_grad_norm": 2}
PLANS: dict[str, list[tuple[dict[str, Any], dict[str, Any], str]]] = {
    "hf-trainer": [
        ({**FULL, "checkpointing": "every-2", "weights_dtype": "bf16"}, {}, "a100-80gb"),
        ({**FULL, "checkpointing": "full", "shard": "zero3", "param_offload": "cpu"}, {}, "8xa100-80gb"),
        ({"shard": "hsdp", "precision": "bf16-true", "loss": "liger"}, {"micro_batch": 2}, "2x8xa100-80gb"),
        (
            {"optimizer": "sgd", "attention": "flash"},
            {"method": "lora", "lora_targets": ("q_proj", "v_proj"), "lora_dropout": 0.05},
            "t4",
        ),
        ({"optimizer": "sgd-plain"}, {}, "t4"),
        ({**FULL, "shard": "zero3"}, {"model": tiny("llava")}, "8xa100-80gb"),
        ({**FULL, "shard": "zero3", "cp": 2}, {}, "8xa100-80gb"),
    ],
    "trl": [
        ({**FULL, "loss": "chunked", "checkpointing": "full", "shard": "zero3"}, {}, "8xa100-80gb"),
        ({"loss": "chunked", "precision": "bf16-true"}, {"method": "lora"}, "a100-80gb"),
        ({**FULL, "loss": "chunked", "shard": "hsdp", "cp": 4}, {}, "2x8xa100-80gb"),
    ],
    "accelerate": [
        ({**FULL, "shard": "hsdp", "param_offload": "cpu", "checkpointing": "full"}, {}, "2x8xa100-80gb"),
        ({**FULL, "weights_dtype": "bf16"}, {}, "a100-80gb"),
        ({"precision": "fp16-mixed", "shard": "ddp"}, {"method": "lora"}, "8xt4"),
        ({**FULL, "shard": "zero3", "loss": "chunked"}, {"model": tiny("llava"), "method": "lora"}, "8xa100-80gb"),
    ],
    "deepspeed": [
        ({"shard": "zero3", "param_offload": "cpu", "clip_grad_norm": 1}, {"grad_accum": 4}, "8xa100-80gb"),
        ({"shard": "zero2", "optimizer": "adamw-loop", "precision": "fp16-mixed"}, {"method": "lora"}, "8xt4"),
    ],
    "torchtitan": [
        ({**FULL, "shard": "hsdp", "tp": 2, "checkpointing": "selective", "loss": "chunked"}, {}, "2x8xa100-80gb"),
        ({**FULL, "shard": "zero3", "compile": "layers"}, {}, "8xa100-80gb"),
        (
            {"attention": "flash", "precision": "bf16-true", "optimizer": "adamw-loop"},
            {"micro_batch": 2},
            "a100-80gb",
        ),
        ({"shard": "zero3", "ep": 4}, {"model": request("qwen3-30b-a3b")[0].model}, "8xa100-80gb"),
        ({"shard": "zero3", "tp": 2, "ep": 8}, {"model": request("deepseek-v2-lite")[0].model}, "8xa100-80gb"),
    ],
    "axolotl": [
        ({**FULL, "precision": "bf16-true", "shard": "hsdp", "checkpointing": "full"}, {}, "2x8xa100-80gb"),
        ({"attention": "eager", "loss": "liger"}, {"method": "qlora", "lora_targets": ("q_proj",)}, "a100-80gb"),
        ({"compile": "model"}, {"method": "lora"}, "a100-80gb"),
    ],
    "llama-factory": [
        ({**FULL, "shard": "zero3", "checkpointing": "full-reentrant"}, {}, "8xa100-80gb"),
        ({"precision": "bf16-true", "attention": "eager", "compile": "model"}, {"method": "lora"}, "a100-80gb"),
    ],
    "torchrun": [
        ({**FULL, "loss": "chunked", "shard": "hsdp", "checkpointing": "selective"}, {}, "2x8xa100-80gb"),
        ({"precision": "fp16-mixed", "accum_sync": True, "shard": "ddp"}, {"method": "lora"}, "8xt4"),
        ({**FULL, "shard": "zero3", "compile": "layers"}, {}, "8xa100-80gb"),
    ],
}
"""For each target plans, jobs and GPUs that together use most of its settings."""

PROGRAM = """
import json, sys, tempfile
from pathlib import Path
from tonnage.trainers import targets
from tonnage.trainers.cases import request
for name, folder in json.loads(sys.argv[1]):
    found = dict(targets.find_target(name).reread(Path(folder)))
    print("found:" + json.dumps(found, default=str))
"""

CASES = [(name, number) for name, plans in PLANS.items() for number in range(len(plans))]


def made(name: str, number: int) -> tuple[Target, Export]:
    plan, job, gpus = PLANS[name][number]
    if (plan.get("attention"), gpus) == ("flash", "t4"):
        plan = {**plan, "attention": "math"}
    target = targets.find_target(name)
    base = request("llama-3.1-8b", seq_len=32)[0] if name == "torchtitan" else tiny_job()
    wanted = dataclasses.replace(base, **job)
    return target, targets.export_plan(Case(wanted, Plan(**plan), parse_cluster(gpus)), "gpt2", target)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict[str, Any]]:
    """What every installed target's objects hold, asked in one process."""
    asked = []
    for name, number in CASES:
        target, export = made(name, number)
        if packages.missing(target.packages):
            continue
        folder = tmp_path_factory.mktemp(name)
        for item in export.files:
            (folder / item.name).write_text(item.text)
        asked.append(((name, number), str(folder)))
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([(name, folder) for (name, _), folder in asked])],
        env=reread._environment() | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr[-2000:]
    answers = [json.loads(line[6:]) for line in told.stdout.splitlines() if line.startswith("found:")]
    return {case: answer for (case, _), answer in zip(asked, answers, strict=True)}


@pytest.mark.parametrize(("name", "number"), CASES)
def test_every_setting_is_found_again(name: str, number: int, found: Any) -> None:
    target, export = made(name, number)
    if missing := packages.missing(target.packages):
        pytest.skip(f"not installed: {', '.join(missing)}")
    read = found[name, number]
    assert len(export.settings) > 3
    different = {
        key: (value, read.get(key))
        for key, value in export.settings.items()
        if not reread._is_alike(value, read.get(key))
    }
    assert different == {}


def test_a_setting_that_is_read_differently_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    target, export = made("torchrun", 0)
    monkeypatch.setattr(reread, "_read_back", lambda name, folder: {**export.settings, "job.shard": "zero2"})
    with pytest.raises(CannotEstimate, match=r"job.shard was written as 'hsdp' and is 'zero2'.*nothing was written"):
        reread.check(export, target)


def test_a_trainer_that_cannot_be_imported_does_not_stand_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, export = made("torchtitan", 0)
    (tmp_path / "torchtitan").mkdir()
    (tmp_path / "torchtitan" / "__init__.py").write_text("raise ImportError('wants a newer torch')")
    described = tmp_path / "torchtitan-9.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: torchtitan\nVersion: 9.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert str(reread.check(export, target)) == (
        "not validated: torchtitan cannot be imported here: wants a newer torch"
    )


@pytest.mark.ghost
@pytest.mark.parametrize(
    ("model", "plan", "gpus"),
    [
        ("llama-3.1-8b", Plan(tp=2, pp=2, shard="zero1", checkpointing="full"), "8xh100-80gb"),
        ("qwen3-8b", Plan(precision="fp16-mixed", checkpointing="attention", clip_grad_norm=2), "h100-80gb"),
    ],
)
def test_megatron_bridge_takes_its_overrides(model: str, plan: Plan, gpus: str) -> None:
    """Needs Transformer Engine and what Megatron-Bridge's recipes import (docs/reference/export.md)."""
    target = targets.find_target("megatron-bridge")
    if missing := packages.missing(target.packages):
        pytest.skip(f"not installed: {', '.join(missing)}")
    export = targets.export_plan(
        Case(request(model, seq_len=4096, grad_accum=2)[0], plan, parse_cluster(gpus)), model, target
    )
    assert f"all {len(export.settings)} settings are read as they were written" in str(reread.check(export, target))


def test_true_is_not_one() -> None:
    assert reread._is_alike(1, 1.0)
    assert not reread._is_alike(True, 1)
    assert reread._is_alike(["a", "b"], ["b", "a"])


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    target, export = made("torchrun", 0)
    monkeypatch.setattr(packages, "missing", lambda packages: ["axolotl"])
    assert str(reread.check(export, target)) == "not validated: axolotl is not installed"


def test_an_error_of_the_target_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    target, export = made("torchrun", 0)
    broken = dataclasses.replace(export, files=(File(name="job.json", text='{"bogus": 1}'),))
    monkeypatch.setattr(packages, "missing", lambda packages: [])
    with pytest.raises(CannotEstimate, match=r"torchrun does not take what was written for it: .*bogus"):
        reread.check(broken, target)


def test_a_target_that_never_ends_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    target, export = made("torchrun", 0)
    monkeypatch.setattr(reread, "TIMEOUT_SECONDS", 0.01)
    monkeypatch.setattr(packages, "missing", lambda packages: [])
    with pytest.raises(CannotEstimate, match="has not read what was written for it"):
        reread.check(export, target)


def test_fields_are_read_without_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "somewhere").mkdir()
    (tmp_path / "somewhere" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "somewhere" / "args.py").write_text(
        "class A:\n    one: int = 1\n    def f(self): ...\n    two: str\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert packages.fields("somewhere", "args.py", "A") == {"one", "two"}
    assert packages.fields("nowhere_at_all", "args.py", "A") == frozenset()
