"""Tests of `tonnage estimate`: options arrive in Job, Plan and Cluster; the report, JSON and files come out."""

import json
from typing import get_args

import pytest
import typer
from lines import is_one_line

import estimates
from tonnage.catalog import local_gpus
from tonnage.catalog.devices import parse_cluster
from tonnage.cli.options import _job_and_plan_parameters
from tonnage.estimates import archive
from tonnage.estimates.estimate import CATEGORIES, Estimate
from tonnage.job import Job
from tonnage.options import options
from tonnage.plans import Plan


def test_defaults_are_those_of_job_and_plan(tonnage, calls):
    assert tonnage("estimate", "smollm2-135m", "--gpu", "t4").code == 0
    assert calls.plan == Plan()
    assert calls.job == Job(model=calls.job.model)
    assert calls.job.model.name == "smollm2-135m"
    assert (calls.cluster.device.id, calls.cluster.gpus) == ("t4", 1)
    assert {name: calls.options[name] for name in ("rank", "steps", "repeated", "torch_version")} == {
        "rank": None,
        "steps": 1,
        "repeated": 2,
        "torch_version": None,
    }


@pytest.mark.parametrize(
    "given",
    [
        "--steps 3",
        "--gpus 2 --shard ddp",  # DDP makes new buckets in the second step
        "--eval-batch 4",
        "--checkpointing budget=1GiB",
        "--source meta",
        "--gpu cpu",
    ],
)
def test_all_steps_are_run_if_they_are_asked_for_or_differ(tonnage, calls, given):
    assert tonnage("estimate", "gpt2", "--gpu", "t4", *given.split()).code == 0
    assert (calls.options["steps"], calls.options["repeated"]) == (3, 0)


def test_a_full_host_does_not_fit(tonnage, calls):
    host = calls.estimate.host.with_machine(96 * 2**30, {}, 64 * 2**30)
    calls.estimate = calls.estimate.with_host(host)
    ended = tonnage("estimate", "gpt2", "--gpu", "t4", "--host-memory", "64GiB", "--json", "--no-advice")
    document = json.loads(ended.out)
    assert (ended.code, document["fits"]) == (1, False)
    assert {"machine_bytes": 96 * 2**30, "limit_bytes": 64 * 2**30, "fits": False}.items() <= document["host"].items()
    assert calls.cluster.host_memory_bytes == 64 * 2**30
    assert tonnage("estimate", "gpt2", "--gpu", "2xt4", "--no-advice").code == 1
    assert (calls.cluster.host_memory_bytes, calls.cluster.host_limit_bytes) == (None, 62 * 2**30)


def test_every_option_arrives(tonnage, calls):
    text = (
        "estimate gpt2 --gpu 4x8xH100-80GB --method lora --lora-rank 8 --lora-targets q_proj,v_proj "
        "--lora-dropout 0.1 --seq-len 8192 --micro-batch 2 --grad-accum 4 --precision bf16-true "
        "--base-dtype fp32 --optimizer adamw-fused "
        "--checkpointing every-2 --shard zero3 --param-offload cpu --attention flash --loss chunked "
        "--allocator expandable --rank 5 --steps 2 --torch 2.12.0 --offline"
    )
    assert tonnage(*text.split()).code == 0
    job, plan = calls.job, calls.plan
    assert (job.method, job.lora_rank, job.lora_targets, job.lora_dropout) == ("lora", 8, ("q_proj", "v_proj"), 0.1)
    assert (job.seq_len, job.micro_batch, job.grad_accum) == (8192, 2, 4)
    assert plan == Plan(
        precision="bf16-true",
        base_dtype="fp32",
        optimizer="adamw-fused",
        checkpointing="every-2",
        shard="zero3",
        param_offload="cpu",
        attention="flash",
        loss="chunked",
        allocator="expandable",
    )
    assert (calls.cluster.nodes, calls.cluster.gpus_per_node) == (4, 8)
    assert (calls.options["rank"], calls.options["steps"], calls.options["torch_version"]) == (5, 2, "2.12.0")


def test_the_least_number_of_every_option_is_accepted():
    for kind in (Job, Plan):
        for item, option in options(kind):
            if option.kind == "number":
                declared = {parameter.name: parameter for parameter in _job_and_plan_parameters()}[item.name]
                assert get_args(declared.annotation)[1].parser(f"{option.least}") == option.least
                with pytest.raises(typer.BadParameter):
                    get_args(declared.annotation)[1].parser(f"{option.least - 1}")


def test_no_images_train_an_image_text_model_on_text(tonnage, calls):
    assert tonnage("estimate", "qwen2.5-vl-3b", "--gpu", "h100-80gb", "--images", "0").code == 0
    assert calls.job.images == 0


@pytest.mark.parametrize(
    ("given", "shard"),
    [
        ("--gpu 2xt4", "ddp"),
        ("--gpu 2xt4 --engine hf-trainer", "ddp"),
        ("--gpu 2xt4 --source meta", "ddp"),
        ("--gpu 2xa100-40gb --cp 2 --attention flash", "ddp"),
        ("--gpu 2xt4 --shard none", "none"),
        ("--gpu 2xt4 --optimizer-in-backward", "none"),  # which DDP's averaging rules out
        ("--gpu 2xh100-80gb --tp 2", "none"),
        ("--gpu t4", "none"),
        ("--gpu 2xcpu", "none"),
    ],
)
def test_several_gpus_without_shard_are_assumed_to_run_ddp(tonnage, calls, given, shard):
    assert tonnage("estimate", "gpt2", *given.split()).code == 0
    assert calls.plan.shard == shard
    assert [sentence for sentence in calls.assumed if "DDP" in sentence and "zero3" in sentence] == (
        list(calls.assumed) if shard == "ddp" else []
    )
    assert bool(calls.assumed) == (shard == "ddp")


@pytest.mark.parametrize("given", ["q_proj,v_proj,o_proj", "q_proj --lora-targets v_proj,o_proj"])
def test_names_may_be_given_in_one_option_or_several(tonnage, calls, given):
    text = f"estimate gpt2 --gpu t4 --method lora --lora-targets {given}"
    assert tonnage(*text.split()).code == 0
    assert calls.job.lora_targets == ("q_proj", "v_proj", "o_proj")


def test_memory_alone_describes_a_gpu(tonnage, calls):
    assert tonnage("estimate", "gpt2", "--gpu-memory", "24GiB", "--gpus", "2").code == 0
    assert (calls.cluster.device.capacity_bytes, calls.cluster.gpus) == (24 * 2**30, 2)


def test_here_uses_the_gpus_of_this_machine(calls, tonnage, monkeypatch):
    card = local_gpus.Found(
        name="Tesla T4",
        uuid="GPU-0",
        total_bytes=15 * 2**30,
        capacity_bytes=14 * 2**30,
        used_bytes=2**30,
        capability=(7, 5),
    )
    monkeypatch.setattr(local_gpus, "visible", lambda: [card])
    ended = tonnage("estimate", "gpt2", "--offline", "--here")
    assert (calls.cluster.device.id, calls.cluster.device.capacity_bytes) == ("t4", 14 * 2**30)
    assert "GPU 0 (Tesla T4): other processes hold 1.00 GiB of 14.00 GiB" in ended.err
    ended = tonnage("estimate", "gpt2", "--here", "--gpu", "t4")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "--gpu t4 and --here both name the GPUs" in ended.err


@pytest.mark.parametrize(("make", "code"), [(estimates.fitting, 0), (estimates.full_card, 1)])
def test_exit_code_says_whether_it_fits(make, code, tonnage, calls):
    calls.estimate = make()
    ended = tonnage("estimate", "gpt2", "--gpu", "t4")
    assert ended.code == code
    assert ended.err == ""
    assert ended.out.startswith("FITS" if code == 0 else "DOES NOT FIT")


CONTRACT = {
    "schema_version": int,
    "source": str,
    "versions": dict,
    "model": dict,
    "job": dict,
    "plan": dict,
    "cluster": dict,
    "fits": bool,
    "rank": int,
    "peak": dict,
    "phases": list,
    "host": dict,
    "time": dict,
    "coverage": dict,
    "ranks": list,
}
PEAK = {
    **dict.fromkeys(("allocated_bytes", "reserved_bytes", "process_bytes", "low_bytes", "high_bytes"), int),
    "phase": str,
    "layer": str,
    "by_category": dict,
}


@pytest.mark.parametrize("make", [estimates.fitting, estimates.full_card])
def test_json_follows_the_contract(make, tonnage, calls):
    calls.estimate = make()
    ended = tonnage("estimate", "gpt2", "--gpu", "t4", "--json")
    document = json.loads(ended.out)
    assert {name: type(document[name]) for name in CONTRACT} == CONTRACT
    assert {name: type(document["peak"][name]) for name in PEAK} == PEAK
    assert set(document["peak"]["by_category"]) == set(CATEGORIES)
    assert sum(document["peak"]["by_category"].values()) == document["peak"]["process_bytes"]
    assert set(document["time"]) >= {"step_seconds", "tokens_per_second_per_gpu", "mfu", "bound_by"}
    assert set(document["coverage"]) == {"run", "modelled", "assumed"}
    assert Estimate.from_json(document) == make()


def test_errors_leave_standard_output_empty_even_with_json(tonnage, calls):
    ended = tonnage("estimate", "no-such-model-anywhere", "--gpu", "t4", "--offline", "--json")
    assert (ended.code, ended.out) == (3, "")
    assert is_one_line(ended.err)


def test_files(tonnage, calls, tmp_path):
    page, kept = tmp_path / "page.html", tmp_path / "run.tonnage"
    ended = tonnage("estimate", "gpt2", "--gpu", "t4", "--html", str(page), "--save", str(kept))
    assert (ended.code, ended.err) == (0, f"wrote {kept}\nwrote {page}\n")
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert archive.load_estimate(kept) == calls.estimate


def test_a_file_that_cannot_be_written_stops_before_the_work(tonnage, calls, tmp_path):
    for option in ("--save", "--html", "--snapshot"):
        ended = tonnage("estimate", "gpt2", "--gpu", "t4", option, str(tmp_path / "none" / "file"))
        assert ended.code == 3
        assert is_one_line(ended.err)
        assert calls.job is None


def test_only_files_that_tonnage_wrote_are_replaced_without_force(tonnage, calls, tmp_path):
    mine, page, kept, picture = (tmp_path / name for name in ("train.py", "page.html", "run.tonnage", "z.pickle"))
    own = ("--html", str(page), "--save", str(kept))
    for _ in range(2):
        assert tonnage("estimate", "gpt2", "--gpu", "t4", *own).code == 0
    mine.write_text("print()")
    picture.write_bytes(b"recorded by torch")
    for option, path in (("--save", mine), ("--html", mine), ("--html", kept), ("--save", page)):
        calls.job, before = None, path.read_bytes()
        ended = tonnage("estimate", "gpt2", "--gpu", "t4", option, str(path))
        assert (ended.code, ended.out, calls.job, path.read_bytes()) == (2, "", None, before)
        assert is_one_line(ended.err)
        assert f"{path} exists; name another file, or add --force" in ended.err
    assert tonnage("estimate", "gpt2", "--gpu", "t4", "--snapshot", str(picture)).code == 2
    assert tonnage("estimate", "gpt2", "--gpu", "t4", "--save", str(mine), "--force").code == 0
    assert archive.load_estimate(mine) == calls.estimate


def test_snapshot_is_refused_on_the_cpu(tonnage, calls, tmp_path):
    ended = tonnage("estimate", "gpt2", "--gpu", "cpu", "--snapshot", str(tmp_path / "z.pickle"))
    assert (ended.code, calls.job) == (2, None)
    assert is_one_line(ended.err)
    assert "--snapshot shows a GPU's caching allocator, and the CPU has none" in ended.err


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("--accum-sync", "accum-sync needs several GPUs that average gradients"),
        ("--sequence-parallel on", "sequence-parallel on needs tensor parallelism"),
        ("--pp-schedule 1f1b", "pp-schedule only applies to pipelines"),
        ("--pp-stages 3", "pp-stages only applies to pipelines"),
        ("--save-checkpoint sharded", "save-checkpoint sharded needs a network that several GPUs shard"),
    ],
)
def test_options_without_effect_are_refused(tonnage, calls, tmp_path, given, reason):
    for command in ("estimate", "plan"):
        ended = tonnage(command, "gpt2", "--offline", "--gpu", "t4", *given.split())
        assert (ended.code, calls.job) == (2, None)
        assert is_one_line(ended.err)
        assert reason in ended.err
    path = tmp_path / "plan.toml"
    path.write_text('schema_version = 1\nmodel = "gpt2"\ngpu = "8xt4"\n[plan]\nshard = "zero3"\naccum_sync = true\n')
    assert (
        tonnage("estimate", "--offline", "--plan", str(path), "--gpu", "t4").code == 0
    )  # an option of the file is not refused


def test_a_full_disk_does_not_cost_the_answer(tonnage, calls):
    ended = tonnage("estimate", "gpt2", "--gpu", "t4", "--save", "/dev/full")
    assert ended.code == 3
    assert ended.out.startswith("FITS")
    assert is_one_line(ended.err)
    assert "No space left on device" in ended.err


def test_a_gpu_that_replaces_the_files_has_its_own_memory(calls, tonnage, tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('schema_version = 1\nmodel = "gpt2"\ngpu = "2x4x"\ngpu_memory_bytes = 25769803776\n')
    assert tonnage("estimate", "--offline", "--plan", str(path)).code == 0
    assert (calls.cluster.gpus, calls.cluster.device.capacity_bytes) == (8, 24 * 2**30)
    assert tonnage("estimate", "--offline", "--plan", str(path), "--gpu", "t4").code == 0
    assert calls.cluster == parse_cluster("t4")


def test_an_option_given_with_its_default_value_overrides_the_file(calls, tonnage, tmp_path):
    path = tmp_path / "plan.toml"
    head = 'schema_version = 1\nmodel = "gpt2"\ngpu = "t4"\n'
    path.write_text(head + '[job]\nseq_len = 512\n[plan]\nengine = "hf-trainer"\nprecision = "fp16-mixed"\n')
    assert tonnage("estimate", "--offline", "--plan", str(path)).code == 0
    assert (calls.job.seq_len, calls.plan.engine, calls.plan.precision) == (512, "hf-trainer", "fp16-mixed")
    given = ("--seq-len", "2048", "--engine", "tonnage")
    assert tonnage("estimate", "--offline", "--plan", str(path), *given).code == 0
    assert (calls.job.seq_len, calls.plan.engine, calls.plan.precision) == (2048, "tonnage", "fp16-mixed")
