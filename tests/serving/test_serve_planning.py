"""Plans for serving: what is chosen, what is found backwards, what is written."""

import json
import shlex

import pytest

from tonnage.catalog.devices import parse_cluster
from tonnage.catalog.models import find_model
from tonnage.errors import UnreadableFile, UsageError
from tonnage.report.serving_plans import render
from tonnage.serving import plan_file
from tonnage.serving.exports import TARGETS, engine_command, export_serving
from tonnage.serving.facts import USUAL_VERSIONS
from tonnage.serving.lengths import Lengths
from tonnage.serving.network import read_network
from tonnage.serving.planning import Question, candidates, evaluate, find_limit, plan_serving
from tonnage.serving.settings import ServeSettings

LENGTHS = Lengths(p50=1000, p95=4000, output=300)


def ask(model, gpu, concurrency=16, **options):
    network = read_network(model, offline=True)
    return Question(network=network, cluster=parse_cluster(gpu), lengths=LENGTHS, concurrency=concurrency, **options)


def test_the_best_plan_keeps_the_numbers_and_no_candidate_that_does_is_faster():
    question = ask("llama-3.1-70b", "4xh100-80gb", 64)
    solution = plan_serving(question)
    best = solution.plans[0]
    assert (solution.status, best.loss, best.settings.tp) == ("found", 0, 4)
    assert best.held >= 64
    for settings in candidates(question):
        other = evaluate(question, settings)
        if other.estimate.starts and other.held >= 64 and other.loss == 0:
            assert other.speed.output_tokens_per_second <= best.speed.output_tokens_per_second
    assert any(plan.loss for plan in solution.plans[1:])
    assert "only 23 of 64 requests run together" in best.reasons[0].why
    assert best.simulation.preemptions == 0


def test_small_networks_get_replicas():
    best = plan_serving(ask("llama-3.2-1b", "8xh100-80gb", 512)).plans[0]
    assert (best.settings.tp, best.settings.dp) == (1, 8)
    assert best.settings.max_seqs == 64


def test_what_was_stated_is_kept():
    stated = ServeSettings(tp=2, quantization="fp8", kv_dtype="auto")
    question = ask("llama-3.1-70b", "4xh100-80gb", stated=stated, fixed=frozenset({"tp", "quantization", "kv_dtype"}))
    for plan in plan_serving(question).plans:
        assert (plan.settings.tp, plan.settings.quantization, plan.settings.kv_dtype) == (2, "fp8", "auto")


def test_where_nothing_starts_what_would_is_said():
    solution = plan_serving(
        ask("llama-3.1-405b", "t4", stated=ServeSettings(), fixed=frozenset({"quantization", "kv_dtype"}))
    )
    assert (solution.status, solution.plans) == ("too_large", ())
    assert not solution.nearest.estimate.starts


def test_where_too_few_run_together_the_nearest_says_how_many():
    solution = plan_serving(ask("llama-3.1-8b", "l4", 400))
    assert solution.status == "too_large"
    assert 0 < solution.nearest.held < 400


@pytest.mark.parametrize("find", ["max-len", "max-concurrency"])
def test_a_limit_is_one(find):
    """What was found is held; a step more is not, by a plan that keeps the numbers."""
    fixed = frozenset({"quantization", "kv_dtype"})
    question = ask("llama-3.1-8b", "rtx-4090", 4, fixed=fixed)
    solution = find_limit(find, question)
    number = int(solution.found.split()[1])
    best = solution.plans[0]
    if find == "max-len":
        assert best.estimate.serving.max_len == number
        beyond = evaluate(question, best.settings.changed(max_len=number + 16))
        assert best.estimate.starts
        assert not beyond.estimate.starts
    else:
        assert best.held >= number
        more = plan_serving(ask("llama-3.1-8b", "rtx-4090", number + 1, fixed=fixed))
        assert more.status == "too_large"


def test_the_smallest_card_and_the_fewest():
    fixed = frozenset({"quantization", "kv_dtype"})
    smallest = find_limit("min-gpu", ask("qwen3-14b", "t4", 4, fixed=fixed))
    assert smallest.found.startswith("min-gpu a100-40gb")
    fewest = find_limit("min-gpus", ask("llama-3.1-70b", "h100-80gb", 4, fixed=fixed))
    assert fewest.found == "min-gpus 2"
    formats = find_limit("quantization", ask("qwen3-32b", "l40s", 4))
    assert formats.found == "quantization fp8"
    assert find_limit("quantization", ask("gpt-oss-20b", "t4", 4)).status == "too_large"
    with pytest.raises(UsageError, match="max-seq-len"):
        find_limit("max-seq-len", ask("qwen3-32b", "l40s"))


@pytest.mark.parametrize("target", TARGETS)
def test_exports_hold_every_setting(target):
    best = plan_serving(ask("llama-3.1-70b", "4xh100-80gb", 64)).plans[0]
    exported = export_serving(target, best.estimate)
    content = exported.files[0][1]
    assert "meta-llama/Llama-3.1-70B" in content
    if target == "vllm":
        words = shlex.split(content.splitlines()[1])
        assert words[1:4] == ["vllm", "serve", "meta-llama/Llama-3.1-70B"]
        assert dict(zip(words[4::2], words[5::2], strict=False))["--tensor-parallel-size"] == "4"
    elif target != "sglang":
        yaml = pytest.importorskip("yaml")
        documents = list(yaml.safe_load_all(content))
        if target == "compose":
            engine = documents[0]["services"]["engine"]
            command = engine["command"]
            assert engine["entrypoint"] == ["vllm", "serve"]  # whichever the image has
        else:
            container = documents[0]["spec"]["template"]["spec"]["containers"][0]
            command = container["args"]
            assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
        assert ["vllm", "serve", *command] == shlex.split(engine_command("vllm", best.estimate))


@pytest.mark.parametrize("target", ["compose", "kubernetes"])
def test_a_container_sees_the_models_folder(target, tmp_path, monkeypatch):
    yaml = pytest.importorskip("yaml")
    folder = tmp_path / "my $model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(find_model("llama-3.2-1b").config()))
    monkeypatch.chdir(tmp_path)
    asked = ask("./my $model", "l4", 1)
    content = export_serving(target, plan_serving(asked).plans[0].estimate).files[0][1]
    first = next(iter(yaml.safe_load_all(content)))
    if target == "compose":
        engine = first["services"]["engine"]
        spelled = str(folder).replace("$", "$$")
        assert engine["command"][0] == spelled
        assert f"{spelled}:{spelled}:ro" in engine["volumes"]
        assert "reservations" in engine["deploy"]["resources"]
        return
    pod = first["spec"]["template"]["spec"]
    assert pod["containers"][0]["args"][0] == str(folder)
    assert {"name": "model", "mountPath": str(folder), "readOnly": True} in pod["containers"][0]["volumeMounts"]
    assert {"name": "model", "hostPath": {"path": str(folder)}} in pod["volumes"]


def test_an_unknown_target_is_refused():
    best = plan_serving(ask("llama-3.2-1b", "l4", 1)).plans[0]
    with pytest.raises(UsageError, match="possible: vllm, sglang, compose, kubernetes"):
        export_serving("axolotl", best.estimate)


def test_a_format_that_needs_a_checkpoint_is_said():
    stated = ServeSettings(quantization="awq-int4")
    best = plan_serving(ask("llama-3.1-8b", "l4", 1, stated=stated, fixed=frozenset({"quantization"}))).plans[0]
    assert "need a checkpoint in that format" in export_serving("vllm", best.estimate).notes[0]


def test_a_saved_plan_is_read_back(tmp_path):
    settings = ServeSettings(tp=2, max_len=8192, kv_dtype="fp8", gpu_memory_utilization=0.9, eager=True)
    file = tmp_path / "serve.toml"
    file.write_text(plan_file.text(settings, model="llama-3.1-8b", gpu="2xl4", gpu_memory_bytes=None, remark="a"))
    assert plan_file.is_serve_file(file)
    read = plan_file.read(file)
    assert (read.settings, read.model, read.gpu) == (settings, "llama-3.1-8b", "2xl4")


@pytest.mark.parametrize(
    ("line", "error", "words"),
    [
        ("tp = 'two'", UsageError, "tp is 'two'"),
        ("tp = true", UsageError, "tp is True"),
        ("nodes = 2", UsageError, "unknown key 'nodes'"),
        ("kv_dtype = 8", UsageError, "kv_dtype is 8"),
    ],
)
def test_a_damaged_plan_is_one_line(tmp_path, line, error, words):
    file = tmp_path / "serve.toml"
    head = 'schema_version = 1\ntask = "serve"\nmodel = "gpt2"\ngpu = "l4"\n[serve]\n'
    file.write_text(f"{head}{line}\n")
    with pytest.raises(error, match=words):
        plan_file.read(file)
    file.write_text(head.replace("= 1", "= 9"))
    with pytest.raises(UnreadableFile, match="schema_version 1"):
        plan_file.read(file)
    assert not plan_file.is_serve_file(tmp_path / "none.toml")


def test_a_question_states_how_long_requests_may_be():
    assert ask("llama-3.1-8b", "l4").max_len == 18_432
    assert ask("llama-3.1-8b", "l4", stated=ServeSettings(max_len=999)).max_len == 999
    assert ask("llama-2-7b", "l4").max_len == 4096
    assert json.dumps(engine_command("sglang", plan_serving(ask("llama-3.2-1b", "l4", 1)).plans[0].estimate))


def test_where_nothing_serves_other_gpus_and_fewer_requests_are_priced():
    solution = plan_serving(ask("llama-3.1-8b", "l4", 400, price=0.8))
    changes = {next(iter(remedy.change)): remedy for remedy in solution.remedies if "gpu" not in remedy.change}
    assert changes["concurrency"].change["concurrency"] == solution.nearest.held
    gpus = [remedy for remedy in solution.remedies if "gpu" in remedy.change]
    assert [remedy.change["gpu"].split("x")[-1] == "l4" for remedy in gpus] == [True, False]
    more = gpus[0]
    assert more.price == pytest.approx(0.8 * more.plan.estimate.cluster.gpus)
    assert gpus[1].price is None
    assert all(remedy.plan.held >= 400 for remedy in gpus)


def best_for(engine, target, **settings):
    stated = ServeSettings(engine=engine, **settings)
    solution = plan_serving(ask("llama-3.2-1b", "l4", 1, stated=stated, fixed=frozenset({"engine", *settings})))
    return solution, export_serving(target, solution.plans[0].estimate)


@pytest.mark.parametrize(
    ("engine", "target", "is_said"),
    [
        ("vllm", "vllm", False),
        ("vllm", "compose", False),
        ("vllm", "sglang", True),
        ("sglang", "sglang", False),
        ("sglang", "kubernetes", False),
        ("transformers", "compose", True),
        ("transformers", "vllm", True),
    ],
)
def test_a_plan_for_one_engine_is_no_promise_for_another(engine, target, is_said):
    solution, exported = best_for(engine, target)
    assert any(f"was computed for {engine} " in note for note in exported.notes) == is_said
    if is_said:
        assert "gpu-memory-utilization" not in exported.files[0][1]
        assert "mem-fraction-static" not in exported.files[0][1]
    command = solution.to_json()["plans"][0]["command"]
    assert (command is None) == (engine == "transformers")
    assert ("'s command" in render(solution)) == (engine != "transformers")


@pytest.mark.parametrize("target", ["compose", "kubernetes"])
def test_a_container_starts_the_plans_engine(target):
    yaml = pytest.importorskip("yaml")
    solution, exported = best_for("sglang", target)
    first = next(iter(yaml.safe_load_all(exported.files[0][1])))
    if target == "compose":
        engine = first["services"]["engine"]
        words = [*engine["entrypoint"], *engine["command"]]
    else:
        engine = first["spec"]["template"]["spec"]["containers"][0]
        words = [*engine["command"], *engine["args"]]
    assert engine["image"] == f"lmsysorg/sglang:v{USUAL_VERSIONS['sglang']}"
    assert words[0] == "python3"
    assert words[1:] == shlex.split(engine_command("sglang", solution.plans[0].estimate))[1:]


def test_both_engines_quantize_while_they_load():
    for engine in ("sglang", "vllm@0.27.0"):
        solution, _ = best_for(engine, engine.partition("@")[0], quantization="nf4")
        assert "--quantization bitsandbytes" in solution.to_json()["plans"][0]["command"]
