"""Options that many plans differ in are checked like those of one."""

from dataclasses import replace

import pytest

from tonnage.errors import UsageError
from tonnage.options import varied
from tonnage.plans import Plan


@pytest.mark.parametrize(
    "changes",
    [{}, {"tp": 2}, {"shard": "zero3", "accum_sync": True}, {"checkpointing": "every-3", "clip_grad_norm": 0.5}],
    ids=str,
)
def test_a_varied_plan_is_a_replaced_one(changes):
    plan = Plan(precision="bf16-true")
    made = varied(plan, changes)
    assert made == replace(plan, **changes)
    assert hash(made) == hash(replace(plan, **changes))
    assert plan == Plan(precision="bf16-true")


@pytest.mark.parametrize("changes", [{"tp": 0}, {"tp": "2"}, {"shard": "zero9"}, {"clip_grad_norm": -1.0}], ids=str)
def test_what_cannot_be_is_refused_in_the_same_words(changes):
    with pytest.raises(UsageError) as replaced:
        replace(Plan(), **changes)
    with pytest.raises(UsageError) as refused:
        varied(Plan(), changes)
    assert str(refused.value) == str(replaced.value)


def test_a_field_that_there_is_not_is_no_change():
    with pytest.raises(TypeError, match="Plan has no sharded"):
        varied(Plan(), {"sharded": "zero3"})
