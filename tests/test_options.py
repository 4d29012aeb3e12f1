"""`varied` makes and checks the same values as `dataclasses.replace`."""

from dataclasses import replace

import pytest

from tonnage.errors import UsageError
from tonnage.options import replace_checked
from tonnage.plans import Plan


@pytest.mark.parametrize(
    "changes",
    [{}, {"tp": 2}, {"shard": "zero3", "accum_sync": True}, {"checkpointing": "every-3", "clip_grad_norm": 0.5}],
    ids=str,
)
def test_varied_plan_equals_replaced_plan(changes):
    plan = Plan(precision="bf16-true")
    made = replace_checked(plan, changes)
    assert made == replace(plan, **changes)
    assert hash(made) == hash(replace(plan, **changes))
    assert plan == Plan(precision="bf16-true")


@pytest.mark.parametrize("changes", [{"tp": 0}, {"tp": "2"}, {"shard": "zero9"}, {"clip_grad_norm": -1.0}], ids=str)
def test_invalid_change_raises_the_same_message(changes):
    with pytest.raises(UsageError) as replaced:
        replace(Plan(), **changes)
    with pytest.raises(UsageError) as refused:
        replace_checked(Plan(), changes)
    assert str(refused.value) == str(replaced.value)


def test_unknown_field_raises_type_error():
    with pytest.raises(TypeError, match="Plan has no sharded"):
        replace_checked(Plan(), {"sharded": "zero3"})
