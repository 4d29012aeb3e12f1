"""The public names, and options given by name."""

from typing import Any

import pytest

import tonnage
from estimates import fitting
from tonnage.catalog.devices import find_device
from tonnage.errors import UnknownDevice, UsageError
from tonnage.estimates import predict
from tonnage.estimates.summary import Run
from tonnage.job import Job
from tonnage.trainers.cases import request


def test_every_public_name_is_there() -> None:
    assert all(getattr(tonnage, name) is not None for name in tonnage.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'train'"):
        _ = tonnage.train


def test_options_become_fields_of_job_and_plan() -> None:
    job, plan = request("gpt2", seq_len=512, shard="zero3", offline=True)
    assert (job.model.name, job.seq_len, plan.shard) == ("gpt2", 512, "zero3")


def test_an_unknown_option_lists_the_possible_ones() -> None:
    with pytest.raises(UsageError, match=r"'seqlen'; possible: .*seq_len"):
        request("gpt2", seqlen=512)


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


def test_options_of_adapters_need_adapters() -> None:
    for ask in (tonnage.estimate, tonnage.plan):
        with pytest.raises(UsageError, match="lora-targets only applies to adapters, and method full has none"):
            ask("gpt2", gpu="t4", lora_targets="c_attn", offline=True)


def test_a_cluster_is_named_once() -> None:
    with pytest.raises(UsageError, match="cluster and gpu"):
        tonnage.estimate("gpt2", cluster="t4", gpu="t4", offline=True)
