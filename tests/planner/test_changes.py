"""What to change in a trainer's file, for the best plan: every setting that differs, and what is set around it."""

import json
from pathlib import Path

from tonnage.catalog.devices import parse_cluster
from tonnage.planner.changes import Change, _changes
from tonnage.planner.solution import Candidate
from tonnage.trainers import reading
from tonnage.trainers.cases import request

SAID = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "bf16": True, "fsdp": "full_shard"}


def changed(
    tmp_path: Path, said: dict[str, object] | None = None, **better: object
) -> dict[str, tuple[object, object]]:
    """What stands before and after for each key, for a plan with other options than the file's."""
    (tmp_path / "training_args.json").write_text(json.dumps({**SAID, **(said or {})}))
    given, cluster = reading.read(tmp_path / "training_args.json"), parse_cluster("8xa100-80gb")
    exactly = given.exactly({"seq_len": 2048}, cluster.gpus)
    job, plan = request("llama-3.2-1b", offline=True, **{**exactly, **better})
    found = _changes(given, exactly, Candidate(job=job, plan=plan), "llama-3.2-1b", cluster, offline=True)
    return {change.key: (change.before, change.after) for change in found}


def test_nothing_is_changed_where_the_file_says_the_best_plan(tmp_path: Path) -> None:
    assert changed(tmp_path) == {}


def test_settings_and_what_is_set_around_them_are_named(tmp_path: Path) -> None:
    found = changed(tmp_path, micro_batch=2, grad_accum=8, allocator="expandable", accum_sync=True)
    assert found["per_device_train_batch_size"] == (4, 2)
    assert found["gradient_accumulation_steps"] == (4, 8)
    assert found["accelerator_config.gradient_accumulation_kwargs.sync_each_batch"] == (None, True)
    assert found["PYTORCH_ALLOC_CONF (environment)"] == (None, "expandable_segments:True")


def test_layers_go_on_being_checkpointed_where_the_file_says_it_by_an_older_name(tmp_path: Path) -> None:
    said: dict[str, object] = {"gradient_checkpointing": True, "fsdp": ""}
    found = changed(tmp_path, said, shard="ddp", checkpointing="every-2")
    assert found["activation_checkpointing_kwargs.every_n_layers"] == (None, 2)
    assert "gradient_checkpointing" not in found


def test_a_setting_of_an_older_name_is_told_once(tmp_path: Path) -> None:
    found = changed(tmp_path, {"gradient_checkpointing": True, "fsdp": ""}, shard="ddp", checkpointing="none")
    assert [key for key in found if "checkpointing" in key] == ["gradient_checkpointing"]
    assert found["gradient_checkpointing"] == (True, None)


def test_what_a_file_has_no_place_for_is_said_to_be_the_scripts() -> None:
    said = [str(Change(key=f"{where}optimizer", before="adamw", after="lion")) for where in ("job.", "")]
    assert said == ["in your script, optimizer = lion (now adamw)", "optimizer = lion (now adamw)"]
