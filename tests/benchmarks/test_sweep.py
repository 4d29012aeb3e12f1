"""A few cases of benchmarks/sweep, the same each time: one question asked in several ways."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from benchmarks.sweep.cases import LAYERS, Case, case
from benchmarks.sweep.exporting import delivered, dropped, exported
from benchmarks.sweep.ways import Asking, differences, tell

from commands import SOON
from networks import tiny_job
from tonnage.catalog.devices import parse_cluster
from tonnage.plans import Plan
from tonnage.trainers import engine_of, libraries
from tonnage.trainers.packages import find_version
from tonnage.workers.worker import Worker

ANSWERED = 5
MOST = 200
NETWORKS = ("llama-3.1-8b", "qwen3-8b", "gemma-3-1b", "qwen3-30b-a3b", "gpt2", "bert", "vit", "t5")
WAYS = ("invariants", "repeated", "continued", "kept")


def test_a_number_makes_the_same_case_again() -> None:
    assert case("0-1") == case("0-1")
    assert case("0-1") != case("0-2")


def test_a_case_is_told_by_what_is_unusual_in_it() -> None:
    one = Case(number="0-1", job=tiny_job(seq_len=64, micro_batch=1), plan=Plan(tp=2), cluster=parse_cluster("2xt4"))
    assert str(one) == "0-1 llama of 3 layers on 2xt4: {'seq_len': 64, 'tp': 2}"


def test_differences_are_told_by_their_place() -> None:
    assert list(differences({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}], "c": 4})) == ["a[1].b 2 3", "c None 4"]


def first(name: str, networks: tuple[str, ...], engine: str) -> Case:
    """The first case of an engine; skipped where its packages are not installed."""
    missing = [package for package in engine_of(Plan(engine=engine)).packages if find_version(package) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    return case(f"ci-{name}", networks, (3,), engine)


@pytest.mark.parametrize("number", range(12))
def test_exports_lose_nothing_and_are_read_as_they_were_meant(number: int, asking: Asking) -> None:
    one = case(f"ci-exports-{number}", (), LAYERS)
    whole = None  # nothing is run
    assert dropped(asking, one, whole) == [], str(one)
    assert exported(asking, one, whole) == [], str(one)


@pytest.mark.ghost
@pytest.mark.parametrize("engine", ["tonnage", "hf-trainer", "accelerate", "deepspeed"])
def test_what_is_exported_needs_what_was_estimated(asking: Asking, engine: str) -> None:
    """To the byte; the first of a few cases that the trainer has words for."""
    for number in range(20):
        one = first(f"delivered-{number}", ("gpt2", "smollm2-135m"), engine)
        known = {"transformers", engine.replace("hf-trainer", "accelerate")}
        found = delivered(asking, one, None) if libraries(one.job, one.plan) <= known else None
        if found is not None:
            assert found == [], str(one)
            return
    pytest.fail("no case was exported")


@pytest.mark.ghost
@pytest.mark.parametrize(
    ("name", "engine", "gpus", "plan"),
    [
        ("llava", "hf-trainer", "8xa100-80gb", {"shard": "zero3", "checkpointing": "full"}),
        ("gemma3", "accelerate", "a100-80gb", {"loss": "chunked", "checkpointing": "selective"}),
        ("qwen2_5_vl", "tonnage", "8xa100-80gb", {"shard": "zero3", "loss": "chunked"}),
        ("qwen2_5_vl", "deepspeed", "8xa100-80gb", {"shard": "zero2"}),
    ],
)
def test_rows_of_images_need_what_was_estimated(
    asking: Asking, name: str, engine: str, gpus: str, plan: dict[str, str]
) -> None:
    if missing := [package for package in engine_of(Plan(engine=engine)).packages if find_version(package) is None]:
        pytest.skip(f"{missing[0]} is not installed")
    one = Case(number=name, job=tiny_job(name), plan=Plan(engine=engine, **plan), cluster=parse_cluster(gpus))
    found = delivered(asking, one, None)
    assert found == [], str(one)


@pytest.mark.ghost
def test_accelerates_plugin_moves_the_inputs_of_layers(asking: Asking) -> None:
    pytest.importorskip("accelerate")
    plan = Plan(engine="accelerate", shard="zero3", checkpointing="full", activation_offload="cpu")
    one = Case(number="moved", job=tiny_job("llama"), plan=plan, cluster=parse_cluster("8xa100-80gb"))
    assert delivered(asking, one, None) == []


@pytest.mark.ghost
def test_accelerates_script_keeps_nothing_that_was_divided(asking: Asking) -> None:
    """A network most of whose bytes are weights would be whole on each card at its peak."""
    pytest.importorskip("accelerate")
    job = tiny_job("llama", seq_len=8, micro_batch=1)
    config = {**job.model.config, "architectures": ["LlamaForCausalLM"], "intermediate_size": 65536}
    job = replace(job, model=replace(job.model, config=config))
    one = Case(
        number="divided", job=job, plan=Plan(engine="accelerate", shard="zero3"), cluster=parse_cluster("8xa100-80gb")
    )
    assert delivered(asking, one, None) == []


@pytest.fixture(scope="module")
def asking(worker: Worker) -> Iterator[Asking]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SOON.items():
            patch.setenv(name, value)
        yield Asking(worker)


@pytest.mark.ghost
def test_the_same_answer_in_every_way(asking: Asking) -> None:
    """Those that transformers alone can run; what is refused when the network is there does not count."""
    answered = 0
    for number in range(MOST):
        one = case(f"ci-{number}", NETWORKS, (3, 15))
        found = dict(tell(asking, one, WAYS)) if libraries(one.job, one.plan) == {"transformers"} else {}
        assert not any(found[way] for way in (*WAYS, "failed") if way in found), (str(one), found)
        answered += "invariants" in found
        if answered == ANSWERED:
            return
    pytest.fail(f"of {MOST} cases {answered} were answered")
