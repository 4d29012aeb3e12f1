"""Tests of the changes of a trainer's file for the best plan: all settings that differ, and environment variables."""

import json
from pathlib import Path

from tonnage.catalog.devices import parse_cluster
from tonnage.planner.settings_file import Change, _list_changes
from tonnage.planner.solution import Candidate
from tonnage.trainers import reading
from tonnage.trainers.cases import request

SETTINGS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "bf16": True, "fsdp": "full_shard"}


def changed(
    tmp_path: Path, settings: dict[str, object] | None = None, **better: object
) -> dict[str, tuple[object, object]]:
    """Return the values before and after of each changed key, for a plan with other options than the file."""
    (tmp_path / "training_args.json").write_text(json.dumps({**SETTINGS, **(settings or {})}))
    given, cluster = reading.read(tmp_path / "training_args.json"), parse_cluster("8xa100-80gb")
    options = given.exactly({"seq_len": 2048}, cluster.gpus)
    job, plan = request("llama-3.2-1b", offline=True, **{**options, **better})
    found = _list_changes(given, options, Candidate(job=job, plan=plan), "llama-3.2-1b", cluster, offline=True)
    return {change.key: (change.before, change.after) for change in found}


def test_nothing_is_changed_if_the_file_is_the_best_plan(tmp_path: Path) -> None:
    assert changed(tmp_path) == {}


def test_settings_and_environment_variables_are_listed(tmp_path: Path) -> None:
    found = changed(tmp_path, micro_batch=2, grad_accum=8, allocator="expandable", accum_sync=True)
    assert found["per_device_train_batch_size"] == (4, 2)
    assert found["gradient_accumulation_steps"] == (4, 8)
    assert found["accelerator_config.gradient_accumulation_kwargs.sync_each_batch"] == (None, True)
    assert found["PYTORCH_ALLOC_CONF (environment)"] == (None, "expandable_segments:True")


def test_checkpointing_under_its_older_name_is_kept(tmp_path: Path) -> None:
    settings: dict[str, object] = {"gradient_checkpointing": True, "fsdp": ""}
    found = changed(tmp_path, settings, shard="ddp", checkpointing="every-2")
    assert found["activation_checkpointing_kwargs.every_n_layers"] == (None, 2)
    assert "gradient_checkpointing" not in found


def test_a_setting_under_its_older_name_is_listed_once(tmp_path: Path) -> None:
    found = changed(tmp_path, {"gradient_checkpointing": True, "fsdp": ""}, shard="ddp", checkpointing="none")
    assert [key for key in found if "checkpointing" in key] == ["gradient_checkpointing"]
    assert found["gradient_checkpointing"] == (True, None)


def test_a_setting_that_the_file_has_no_place_for_belongs_to_the_script() -> None:
    lines = [str(Change(key=f"{where}optimizer", before="adamw", after="lion")) for where in ("job.", "")]
    assert lines == ["in your script, optimizer = lion (now adamw)", "optimizer = lion (now adamw)"]
