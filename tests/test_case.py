"""Options that have no use in a plan are refused."""

from typing import Any

import pytest

from tonnage.case import check_unused
from tonnage.errors import UsageError
from tonnage.options import options
from tonnage.plans import Plan

ON_HOST = {"shard": "zero3", "param_offload": "cpu"}
INTERLEAVED = {"pp": 2, "pp_schedule": "interleaved", "pp_stages": 3}


def check(said: dict[str, Any], gpus: int, *open_ones: str) -> None:
    of_plan = {item.name for item, _ in options(Plan)}
    plan = Plan(**{name: value for name, value in said.items() if name in of_plan})
    check_unused(said, plan, gpus, lambda name: name in open_ones)


@pytest.mark.parametrize(
    ("said", "gpus", "open_ones", "reason"),
    [
        ({"accum_sync": True}, 1, ("shard", "param_offload"), "needs several GPUs that average .* there is 1 GPU"),
        ({"accum_sync": True}, 2, (), "needs several GPUs that average gradients, and shard is none"),
        ({"accum_sync": True, "shard": "ddp", "tp": 2}, 2, (), "tp 2 x pp 1 on 2 GPUs leaves one that averages"),
        ({"reduce_dtype": "bf16"}, 1, ("shard", "param_offload"), "reduce-dtype needs several .* leave it out"),
        ({"sequence_parallel": "on"}, 4, (), "sequence-parallel on needs tensor parallelism, and tp is 1"),
        ({"sequence_parallel": "on"}, 1, ("tp",), "sequence-parallel on needs tensor parallelism"),
        ({"pp_schedule": "gpipe"}, 4, (), "pp-schedule only applies to pipelines, and pp is 1"),
        ({"pp_schedule": "1f1b"}, 1, ("pp",), "pp-schedule only applies to pipelines, and pp is 1"),
        ({"pp_stages": 2}, 4, (), "pp-stages only applies to pipelines, and pp is 1"),
        ({"pp_stages": 3, "pp": 2}, 2, (), "pp-stages only applies to interleaved pipelines, .* pp-schedule is 1f1b"),
        ({"save_checkpoint": "sharded"}, 1, ("shard", "tp"), "there is 1 GPU; choose save-checkpoint full"),
        (
            {"save_checkpoint": "sharded", "shard": "ddp"},
            2,
            (),
            "shard is ddp; choose save-checkpoint full, or shard",
        ),
    ],
)
def test_an_option_without_a_use_is_refused(
    said: dict[str, Any], gpus: int, open_ones: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason) as refused:
        check(said, gpus, *open_ones)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("said", "gpus", "open_ones"),
    [
        ({"accum_sync": True, "shard": "zero3"}, 2, ()),
        ({"accum_sync": True}, 2, ("shard",)),
        ({"accum_sync": True, **ON_HOST}, 1, ()),
        ({"accum_sync": True, "shard": "zero3"}, 1, ()),
        ({"accum_sync": False}, 1, ()),
        ({"reduce_dtype": "bf16"}, 2, ("shard",)),
        ({"reduce_dtype": "bf16", "shard": "zero3"}, 1, ()),
        ({"reduce_dtype": "bf16", "param_offload": "cpu"}, 1, ("shard",)),
        ({"sequence_parallel": "on", "tp": 2}, 2, ()),
        ({"sequence_parallel": "on"}, 2, ("tp",)),
        ({"sequence_parallel": "off"}, 1, ()),
        ({"pp_schedule": "gpipe", "pp": 2}, 2, ()),
        ({"pp_schedule": "gpipe"}, 2, ("pp",)),
        (INTERLEAVED, 2, ()),
        ({"pp_stages": 4}, 2, ("pp", "pp_schedule")),
        ({"save_checkpoint": "sharded", "shard": "zero1"}, 2, ()),
        ({"save_checkpoint": "sharded", "tp": 2}, 2, ()),
        ({"save_checkpoint": "sharded"}, 2, ("shard",)),
        ({"save_checkpoint": "full"}, 1, ()),
    ],
)
def test_an_option_with_a_use_is_accepted(said: dict[str, Any], gpus: int, open_ones: tuple[str, ...]) -> None:
    check(said, gpus, *open_ones)


def test_an_option_that_was_not_given_is_not_checked() -> None:
    check_unused({}, Plan(accum_sync=True, pp_schedule="gpipe", sequence_parallel="on"), 1)
