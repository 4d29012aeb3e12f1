"""Tests of plan.toml: a plan is read back as it was written, and wrong files are refused."""

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

import estimates
from tonnage.catalog.devices import parse_cluster, spell_cluster
from tonnage.errors import UnreadableFile, UsageError
from tonnage.job import Job
from tonnage.model import ModelRef
from tonnage.planner import plan_file
from tonnage.planner.solution import Candidate, Choice
from tonnage.plans import Plan

JOB = Job(
    model=ModelRef(name='odd "name"', kind="config"), seq_len=8192, micro_batch=2, lora_targets=("q_proj", "v_proj")
)
PLAN = Plan(shard="zero3", checkpointing="budget=2GiB", tp=4, optimizer_in_backward=True)


def choice(job=JOB, plan=PLAN):
    estimate = replace(estimates.fitting(), time={"step_seconds": 1.5})
    return Choice(name="best", candidate=Candidate(job=job, plan=plan), estimate=estimate)


def test_a_plan_is_read_back_as_it_was_written(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(plan_file.text(choice(), gpu="8xa100-80gb", gpu_memory_bytes=2**34, host_memory_bytes=2**40))
    found = plan_file.read(path)
    assert (found.model, found.gpu, found.gpu_memory_bytes) == ('odd "name"', "8xa100-80gb", 2**34)
    assert found.host_memory_bytes == 2**40
    of_plan = {name: value for name, value in found.options.items() if name in Plan.__dataclass_fields__}
    of_job = {name: value for name, value in found.options.items() if name in Job.__dataclass_fields__}
    assert Plan(**of_plan) == PLAN
    assert Job(model=JOB.model, **of_job) == JOB


def test_a_norm_may_be_a_fraction(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(plan_file.text(choice(plan=Plan(clip_grad_norm=0.3)), gpu="t4"))
    assert plan_file.read(path).options["clip_grad_norm"] == 0.3
    with pytest.raises(UsageError, match=r"clip-grad-norm is -1; it must be a number above 0\."):
        Plan(clip_grad_norm=-1)


def test_given_options_override_the_file(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(plan_file.text(choice(), gpu="t4"))
    options = plan_file.read(path).under({"seq_len": 2048, "tp": 2, "checkpointing": "full"})
    assert options["seq_len"] == 2048  # the default value, but given
    assert (options["tp"], options["checkpointing"], options["shard"]) == (2, "full", "zero3")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UnreadableFile, match=r"plan\.toml does not exist"):
        plan_file.read(tmp_path / "plan.toml")


def test_an_endless_file_is_refused():
    with pytest.raises(UnreadableFile, match=r"larger than 1\.0 MiB"):
        plan_file.read(Path("/dev/zero"))


HEAD = 'schema_version = 1\nmodel = "gpt2"\ngpu = "t4"\n'


@pytest.mark.parametrize(
    ("text", "error", "word"),
    [
        ("", UnreadableFile, "is not a plan file: it has no schema_version"),
        ("schema_version = 2", UnreadableFile, "reads 1"),
        ("schema_version = true", UnreadableFile, "reads 1"),
        ("schema_version = 1.0", UnreadableFile, "reads 1"),
        ("{", UnreadableFile, "cannot be read as a plan file"),
        ('schema_version = 1\ngpu = "t4"', UsageError, 'model is missing; add a line such as model = "gpt2"'),
        ('schema_version = 1\nmodel = "gpt2"', UsageError, "gpu is missing; add a line such as gpu"),
        ('schema_version = 1\nmodel = "gpt2"\ngpu = 4', UsageError, "gpu must be a text, not 4"),
        (HEAD + "[job]\nseq_len = 2026-11-27", UsageError, "whole number, not 2026-11-27"),
        (HEAD + "cake = 1", UsageError, "unknown key 'cake'; possible"),
        (HEAD + "seq_len = 8", UsageError, r"unknown key 'seq_len'; it belongs under \[job\]; possible"),
        (
            HEAD + "[plan]\nmicro_batch = 8",
            UsageError,
            r"\[plan\]: unknown key 'micro_batch'; it belongs under \[job\]",
        ),
        (HEAD + "seq_length = 8", UsageError, r"unknown key 'seq_length'; here it is seq_len under \[job\]"),
        (HEAD + "[job]\nseq_length = 8", UsageError, r"\[job\]: unknown key 'seq_length'; here it is seq_len; "),
        (HEAD + "[plan]\nchekpointing = 'full'", UsageError, "unknown key 'chekpointing'.*checkpointing"),
        (HEAD + "[plan]\ntp = '4'", UsageError, "tp must be a whole number"),
        (HEAD + "[plan]\ntp = true", UsageError, "tp must be a whole number, not true"),
        (HEAD + "[plan]\noptimizer_in_backward = 1", UsageError, "true or false"),
        (HEAD + "[job]\nlora_dropout = '0.1'", UsageError, "lora_dropout must be a number"),
        (HEAD + "[job]\nlora_targets = 'q_proj'", UsageError, "list of texts"),
        (HEAD + "plan = 3", UsageError, "must be a table"),
        (HEAD + "gpu_memory_bytes = -1", UsageError, "above zero"),
    ],
)
def test_wrong_keys_and_values_are_refused(tmp_path, text, error, word):
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(error, match=word):
        plan_file.read(path)


def test_an_absent_file_raises_unreadable(tmp_path):
    with pytest.raises(UnreadableFile):
        plan_file.read(tmp_path / "none.toml")


@settings(max_examples=200)
@given(some.binary(max_size=300) | some.text(max_size=300).map(str.encode))
def test_any_bytes_are_read_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("plan") / "plan.toml"
    path.write_bytes(HEAD.encode() + content)
    with contextlib.suppress(UnreadableFile, UsageError):
        plan_file.read(path)


@pytest.mark.parametrize(
    ("spec", "memory_bytes"),
    [("t4", None), ("2x8xa100-80gb", None), ("4xa100-80gb", 2**34), ("3x", 2**34), ("2x4x", 24 * 2**30 + 1)],
)
def test_the_gpus_of_a_plan_are_read_back(tmp_path, spec, memory_bytes):
    cluster = parse_cluster(spec, gpu_memory_bytes=memory_bytes)
    gpu, memory = spell_cluster(cluster)
    path = tmp_path / "plan.toml"
    path.write_text(plan_file.text(choice(), gpu=gpu, gpu_memory_bytes=memory))
    again = plan_file.read(path)
    found = parse_cluster(again.gpu, gpu_memory_bytes=again.gpu_memory_bytes)
    assert (str(found), found.device.capacity_bytes) == (str(cluster), cluster.device.capacity_bytes)


def test_a_factory_must_be_named_by_the_user(tmp_path):
    path = tmp_path / "plan.toml"
    factory = Job(model=ModelRef(name="their.net:build", kind="factory", factory="their.net:build"))
    path.write_text(plan_file.text(choice(job=factory), gpu="t4"))
    assert "tonnage estimate their.net:build --plan FILE" in path.read_text()
    found = plan_file.read(path)
    with pytest.raises(UsageError, match=r"factory 'their\.net:build', whose code would be run"):
        found.network(None)
    assert found.network("their.net:build") == "their.net:build"
    assert found.network("gpt2") == "gpt2"


def test_the_model_is_the_files_unless_another_is_given(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(plan_file.text(choice(), gpu="t4"))
    assert plan_file.read(path).network(None) == 'odd "name"'
    assert plan_file.read(path).network("gpt2") == "gpt2"


def test_a_folder_is_written_by_its_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "gpt2"):
        (tmp_path / name).mkdir()
    assert plan_file.found_anywhere("./mine") == plan_file.found_anywhere("mine") == str(tmp_path / "mine")
    assert plan_file.found_anywhere("../" + tmp_path.name) == str(tmp_path)
    for other in (
        "gpt2",
        "org/name",
        "their.net:build",
        "a" * 5000,
        "\0",
    ):  # a name of the catalog wins over a folder
        assert plan_file.found_anywhere(other) == other
