"""Whatever `estimate` takes for an engine is tried by its search, allowed by a word, or left out for a reason.

A plan that is saved and estimated again gives the same answer.
"""

import json
import random
from dataclasses import replace

import pytest

from solutions import question
from tonnage.catalog.devices import parse_cluster
from tonnage.cli.main import run
from tonnage.options import options
from tonnage.planner import plan_file
from tonnage.planner.candidates import list_candidates
from tonnage.planner.question import Question
from tonnage.planner.search_space import CHANGES
from tonnage.planner.solve import search
from tonnage.planner.trial_runner import TrialRunner
from tonnage.plans import ENGINES, Plan
from tonnage.trainers import engine_of
from tonnage.trainers.cases import request
from tonnage.units import format_gib

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
}

OTHER_MATHEMATICS = {
    "precision": "rounds otherwise; --allow precision has those that pay",
    "weights_dtype": "rounds otherwise",
    "reduce_dtype": "rounds otherwise",
    "base_dtype": "rounds otherwise",
    "quant": "stores frozen weights otherwise; the remedies of a plan that does not fit have it",
    "unquantized_dtype": "rounds otherwise; the remedies of a plan that does not fit have it",
    "optimizer": "updates otherwise; --allow optimizer has those that pay",
    "clip_grad_norm": "changes the update",
}
"""Options whose values change what is trained."""

LEFT_OUT = {
    "compile": "needs a compiler where one trains; offered with its price",
    "outputs": "how a loop keeps what it need not keep; the default keeps least",
    "sequence_parallel": "auto divides the sequence wherever tp does, which needs less and takes no longer",
    "pp_stages": "two stages a rank; more of them send more",
    "engine": "who trains is the user's choice",
    "attention": "auto takes the fastest kernel of the card; where it does not, or keeps scores, the search does",
    ("pp_schedule", "gpipe"): "keeps all micro-batches at once; 1f1b takes as long and keeps fewer",
    ("checkpointing", "full-reentrant"): "recomputes as much as full and keeps as much",
    ("checkpointing", "sqrt"): "keeps less than full only between segments, of which it recomputes whole ones",
    ("checkpointing", "attention"): "selective keeps the same products and recomputes no more",
    ("checkpointing", "attention-module"): "selective recomputes less of the attention",
    ("checkpointing", "every-N"): "tried with N 2 and 4",
    ("checkpointing", "budget=SIZE"): "no exported trainer runs it; --allow budget",
    ("activation_offload", "nvme"): "tried where the host's memory is stated and too small",
    ("optimizer_offload", "nvme"): "tried where the host's memory is stated and too small",
    ("param_offload", "nvme"): "tried where the host's memory is stated and too small",
    ("optimizer_offload", "cpu=FRACTION"): "a part of what cpu moves: as slow for each state",
    ("optimizer_offload", "nvme=FRACTION"): "a part of what nvme moves",
    ("allocator", "default"): "taken back to it where a plan fits without expandable segments",
}
"""Options, and values, that a better choice makes superfluous."""


@pytest.mark.parametrize("engine", ENGINES)
def test_whatever_is_accepted_is_tried_or_left_out_for_a_reason(engine, monkeypatch):
    monkeypatch.setattr("tonnage.trainers.engine.Engine.missing", lambda self: iter(()))
    for module in ("liger", "hf_trainer.run", "trl.run", "accelerate.run", "deepspeed.run", "axolotl.run"):
        with_packages = f"tonnage.trainers.{module}.find_version"
        monkeypatch.setattr(with_packages, lambda package: "1.0", raising=False)
    monkeypatch.setattr("tonnage.techniques.fused_loss.find_spec", lambda package: package)
    asked = [question("llama-3.2-1b", gpu, grad_accum=4, engine=engine) for gpu in ("2x8xh100-80gb", "h100-80gb")]
    if engine in ("trl", "axolotl"):
        asked = [
            replace(one, plan=replace(one.plan, **dict(engine_of(one.plan).own_defaults(one.job)))) for one in asked
        ]
    tried = {}
    for one in asked:
        for offload in (False, True):
            for candidate in list_candidates(one, offload=offload):
                for name, value in vars(candidate.plan).items():
                    tried.setdefault(name, set()).add(value)
    default = Plan()
    for item, option in options(Plan):
        if option.kind not in ("word", "switch") or item.name in OTHER_MATHEMATICS or item.name in LEFT_OUT:
            continue
        for value in option.possible or (False, True):
            known = engine_of(asked[0].plan).has_setting(item.name, value, getattr(default, item.name))
            if known and (item.name, value) not in LEFT_OUT:
                assert value in tried[item.name], f"{engine}: {item.name} {value} is accepted and never tried"
    assert set(CHANGES) <= set(OTHER_MATHEMATICS)


def list_small_questions(count=5):
    """Return questions about a small network, the same in every run: engines, cards, methods, lengths and batches."""
    draw = random.Random(52).choice
    for number in range(count):
        engine = "hf-trainer" if number == 0 else draw(("tonnage", "accelerate"))
        yield {
            "gpu": draw(("t4", "2xa100-40gb", "rtx-4090", "l4")),
            "engine": engine,
            "method": draw(("full", "lora")),
            "seq_len": draw((512, 1024)),
            "micro_batch": draw((1, 2)),
            "grad_accum": 1 + number % 2,
        }


@pytest.fixture(scope="module")
def runner():
    with TrialRunner(lambda text: None) as runner:
        yield runner


@pytest.mark.parametrize("options", list_small_questions(), ids=lambda options: "-".join(map(str, options.values())))
def test_saved_plan_gives_the_same_answer(options, runner, tmp_path, capsys):
    """The terminal, JSON and Python say the same of it."""
    folder = tmp_path / "network"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    gpu = options.pop("gpu")
    job, given = request(str(folder), offline=True, **options)
    stated = tuple(name for name in options if name != "micro_batch")
    asked = Question(job=job, plan=given, cluster=parse_cluster(gpu), stated=stated)
    solution = search(asked, runner, top=2)
    assert solution.status == "found"
    file = tmp_path / "plan.toml"
    for choice in solution.plans:
        file.write_text(plan_file.text(choice, gpu=gpu, model=str(folder)))
        assert run(["estimate", "--plan", str(file), "--json", "--offline"]) == 0
        again, planned = json.loads(capsys.readouterr().out), json.loads(json.dumps(choice.estimate.to_json()))
        for name in ("fits", "peak", "phases", "time", "host", "plan", "job", "cluster"):
            assert again[name] == planned[name], name
        assert run(["estimate", "--plan", str(file), "--offline"]) == 0
        assert format_gib(choice.estimate.peak.process_bytes) in capsys.readouterr().out
