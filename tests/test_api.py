"""The public names, and options given by name."""

import dataclasses
import inspect
import subprocess
import sys
from dataclasses import replace
from typing import Any, Literal, Unpack, get_args, get_origin, get_overloads, get_type_hints

import pytest

import tonnage
from estimates import fitting
from tonnage import api
from tonnage.case import Options, SearchOptions
from tonnage.catalog.configurations import resolve
from tonnage.catalog.devices import find_device
from tonnage.errors import UnknownDevice, UsageError
from tonnage.estimates import predict, sources
from tonnage.estimates.from_traces import Run
from tonnage.job import Job, Method, Words
from tonnage.options import is_accepted, options
from tonnage.planner import limits
from tonnage.planner.solution import Candidate, Choice, Solution
from tonnage.plans import Plan
from tonnage.report.terminal import render
from tonnage.script import dry_run as script_dry_run
from tonnage.serving.settings import ServeOptions, ServeSettings
from tonnage.trainers.cases import request


def test_every_public_name_is_there() -> None:
    assert all(getattr(tonnage, name) is not None for name in tonnage.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'learn'"):
        _ = tonnage.learn


def test_options_become_fields_of_job_and_plan() -> None:
    job, plan = request("gpt2", seq_len=512, shard="zero3", offline=True)
    assert (job.model.name, job.seq_len, plan.shard) == ("gpt2", 512, "zero3")


def test_an_unknown_option_lists_the_possible_ones() -> None:
    with pytest.raises(UsageError, match=r"'seq_lens'; close: .*; possible: .*seq_len"):
        request("gpt2", seq_lens=512)


def test_the_card_is_checked_before_anything_runs() -> None:
    with pytest.raises(UnknownDevice, match="h1000"):
        tonnage.estimate("gpt2", gpu="h1000")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"gpu": 8}, "GPUs are given by a name such as '8xA100-80GB' or a Cluster, not by a int"),
        ({"gpu": "t4", "job": {"seq_len": 64}}, r"A Job is wanted, and this is a dict; give Job\(seq_len=8192\)"),
        ({"gpu": "t4", "plan": Job()}, r"A Plan is wanted, and this is a Job; give Plan\(shard=\"zero3\"\)"),
        ({"gpu": "t4", "rank": "0"}, "Rank '0' does not exist: the cluster has ranks 0 to 0"),
        ({"gpu": "t4", "steps": 0}, "0 steps cannot be run; at least 1"),
    ],
)
def test_a_value_of_another_type_is_a_one_line_error(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as refused:
        tonnage.estimate("gpt2", offline=True, **given)
    assert "\n" not in str(refused.value)


def test_a_job_and_a_plan_may_be_given_as_values(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        predict, "estimate", lambda *given, **others: asked.append(given) or Run(estimate=fitting(), traces=())
    )
    job, plan = tonnage.Job(seq_len=512, method="lora"), tonnage.Plan(shard="zero3")
    tonnage.estimate("gpt2", job, plan, "2xt4", offline=True)
    tonnage.estimate("gpt2", gpu="2xt4", seq_len=512, method="lora", shard="zero3", offline=True)
    assert asked[0] == asked[1]
    assert asked[0][0].job.model.name == "gpt2"
    tonnage.estimate("gpt2", job, plan, "2xt4", seq_len=256, offline=True)
    assert (asked[2][0].job.seq_len, asked[2][0].job.method) == (256, "lora")


def test_host_memory_is_of_each_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        predict, "estimate", lambda case, **others: asked.append(case) or Run(estimate=fitting(), traces=())
    )
    cards = tonnage.Cluster(device=find_device("t4"), gpus_per_node=2)
    for given in ({"gpu": "2xt4", "host_memory": "96GiB"}, {"cluster": cards, "host_memory": 96 * 2**30}):
        tonnage.estimate("gpt2", offline=True, **given)
    tonnage.estimate("gpt2", gpu=cards, offline=True)
    assert [case.cluster.host_limit_bytes for case in asked] == [96 * 2**30, 96 * 2**30, 2 * 31 * 2**30]


def test_the_whole_training_is_in_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    paced = dataclasses.replace(fitting(), time={"tokens_per_second_per_gpu": 1000.0}, job={"seq_len": 512})
    monkeypatch.setattr(predict, "estimate", lambda case, **others: Run(estimate=paced, traces=()))
    training = tonnage.estimate("gpt2", gpu="t4", offline=True, samples=100, price=2.0).time["training"]
    assert (training["tokens"], training["seconds"]) == (51200, 51200 / 1000 / paced.cluster["gpus"])


def test_options_of_adapters_need_adapters() -> None:
    for ask in (tonnage.estimate, tonnage.plan):
        with pytest.raises(UsageError, match="lora-targets only applies to adapters, and method full has none"):
            ask("gpt2", gpu="t4", lora_targets="c_attn", offline=True)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"optimizer_in_backward": "yes"}, "optimizer-in-backward is 'yes'; it must be True or False"),
        ({"accum_sync": 1}, "accum-sync is 1; it must be True or False"),
        ({"lora_dropout": False}, "lora-dropout is False; it must be at least 0"),
        ({"clip_grad_norm": "1"}, "clip-grad-norm is '1'; it must be a number above 0"),
        ({"seq_len": "8k"}, "seq-len is '8k'; it must be a whole number"),
        ({"seq_len": 8e3}, "seq-len is 8000.0; it must be a whole number"),
        ({"tp": True}, "tp is True; it must be a whole number"),
        ({"shard": None}, "Unknown shard None; possible: none, ddp"),
        ({"method": ["lora"]}, "Unknown method"),
        ({"lora_targets": {"q_proj": 1}}, "lora-targets: .* is not a list of words"),
        ({"offline": "no"}, "offline is 'no'; it must be True or False"),
        ({"gpus": "2"}, "gpus is '2'; it must be a whole number"),
        ({"gpu_memory": 24.0}, "a number of bytes is 24.0; it must be a whole number"),
        ({"tokens": 1e9}, "tokens is 1000000000.0; it must be a whole number"),
        ({"tokens": 100, "samples": 2}, "leave one of them out"),
    ],
    ids=str,
)
@pytest.mark.parametrize("ask", [tonnage.estimate, tonnage.plan], ids=lambda ask: ask.__name__)
def test_every_kind_of_value_is_checked(ask: Any, given: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as refused:
        ask("gpt2", **{"gpu": "t4", "offline": True, **given})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"pareto": "yes"}, "pareto is 'yes'"),
        ({"top": 0}, "top is 0"),
        ({"headroom": "4"}, "headroom is '4'"),
        ({"only": 3}, "only: 3 is not a list of words"),
        ({"host_memory": "much"}, "'much' is not a size"),
    ],
    ids=str,
)
def test_every_argument_of_a_search_is_checked(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        tonnage.plan("gpt2", gpu="t4", offline=True, **given)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"steps": "3"}, "steps is '3'"),
        ({"seconds": "no"}, "seconds is 'no'"),
        ({"timeout_seconds": "9"}, "timeout_seconds is '9'"),
        ({"gpu": 8}, "GPUs are given by a name"),
        ({"cluster": "t4"}, "cluster and gpu"),
    ],
    ids=str,
)
def test_every_argument_of_a_dry_run_is_checked(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        tonnage.dry_run("true", **{"gpu": "t4", **given})


def test_a_dry_run_takes_a_line_or_words_and_a_card_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        script_dry_run, "run", lambda command, cluster, **others: asked.append((command, str(cluster)))
    )
    tonnage.dry_run("python 'my train.py' --lr 1", gpu="2xt4")
    tonnage.dry_run(("python", "my train.py", "--lr", "1"), "2xt4")
    assert asked == [(["python", "my train.py", "--lr", "1"], "2xt4")] * 2


def field_types(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {item.name: Words if option.kind == "names" else hints[item.name] for item, option in options(kind)}


def typed_keywords(function: Any) -> Any:
    local = {"Unpack": Unpack, "Options": Options, "SearchOptions": SearchOptions, "ServeOptions": ServeOptions}
    return get_args(eval(str(function.__annotations__["options"]), local))[0]


@pytest.mark.parametrize("function", [tonnage.estimate, tonnage.plan], ids=lambda function: function.__name__)
def test_typed_keywords_are_the_options(function: Any) -> None:
    keywords, serving = map(typed_keywords, get_overloads(function))
    hints, settings = get_type_hints(serving), get_type_hints(ServeSettings)
    assert hints == {**settings, "lengths": str | None, "concurrency": int | None}
    expected = {**field_types(Job), **field_types(Plan)}
    if function is tonnage.plan:
        expected["method"] = Method | Literal["any"] | str
    assert get_type_hints(keywords) == expected
    own = set(inspect.signature(function).parameters)
    assert not own & set(expected)


@pytest.mark.parametrize("kind", [Job, Plan])
def test_literals_are_the_accepted_words(kind: type) -> None:
    for item, option in options(kind):
        if option.kind == "word":
            plain = tuple(word for word in option.possible if is_accepted(word, option.possible))
            assert literal_words(get_type_hints(kind)[item.name]) == plain


def test_other_words_of_python_are_those_that_are_accepted() -> None:
    assert get_args(api.Find) == limits.FINDS
    assert set(get_args(api.Source)) == set(sources.SOURCES)


def literal_words(hint: Any) -> tuple[str, ...]:
    """Return the words of each Literal in a type, in their order."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(word for part in get_args(hint) for word in literal_words(part))


def test_every_public_value_has_a_repr_of_one_line() -> None:
    solution = Solution(status="too_large", question={"model": "gpt2", "cluster": "t4"})
    best = Choice(name="best", candidate=Candidate(job=Job(), plan=Plan()), estimate=fitting())
    values = {
        "Cluster": tonnage.Cluster(device=find_device("t4"), gpus_per_node=2),
        "Device": find_device("h100-80gb"),
        "Estimate": fitting(),
        "Job": Job(model=resolve("llama-3.1-8b"), seq_len=8192),
        "Plan": Plan(shard="zero3"),
        "Solution": replace(solution, status="found", plans=(best,)),
        "Trace": tonnage.Trace(source="ghost", versions={}, device={}),
    }
    assert {name: len(repr(value)) < 250 and "\n" not in repr(value) for name, value in values.items()} == (
        dict.fromkeys(values, True)
    )
    assert repr(values["Plan"]) == "Plan(shard='zero3')"
    assert (
        repr(values["Job"]) == "Job(model=ModelRef(name='llama-3.1-8b', kind='config', factory=None), seq_len=8192)"
    )
    assert repr(values["Estimate"]) == "<Estimate: llama-7b on H100-80GB: fits: 60.00 GiB of 80.00 GiB>"
    assert repr(solution) == "<Solution: gpt2 on t4: too_large>"
    assert repr(values["Solution"]) == "<Solution: gpt2 on t4: 1 plan, the best fits: 60.00 GiB of 80.00 GiB>"


def test_printing_an_estimate_shows_the_page_without_colours() -> None:
    assert str(fitting()) == render(fitting())
    assert str(Run(estimate=fitting(), traces=())) == render(fitting())
    assert str(fitting()).startswith("FITS")
    assert "\x1b" not in str(fitting())


def test_public_names_complete_before_their_first_use() -> None:
    program = (
        "import tonnage; print({*tonnage.__all__} <= {*dir(tonnage)}, 'tonnage.api' in __import__('sys').modules)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["True", "False"]


@pytest.mark.parametrize(("arguments", "code"), [(["-m"], 2), (["x.py"], 1)])
def test_an_older_python_is_told_which_one_is_needed(arguments: list[str], code: int) -> None:
    program = f"import sys; sys.version_info, sys.argv = (3, 10, 13), {arguments}; import tonnage"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == code
    assert "tonnage needs Python 3.11 or newer" in ended.stderr.splitlines()[-1]
    assert len(ended.stderr.splitlines()) == 1 or code == 1


def test_a_cluster_is_named_once() -> None:
    with pytest.raises(UsageError, match="cluster and gpu"):
        tonnage.estimate("gpt2", cluster="t4", gpu="t4", offline=True)
